"""Reads the measurements in bench/results, and says where they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> Any:
    """Returns a document of bench/results."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def where(environment: Mapping[str, Any]) -> str:
    """Returns the date, the device, the threads and the version of torch in one line."""
    threads = environment["threads"]
    words = f"{threads} thread" + ("" if threads == 1 else "s")
    parts = [
        environment.get("date", ""),
        environment["device"],
        words,
        f"torch {environment['versions']['torch']}",
    ]
    return ", ".join(p for p in parts if p) + "."
