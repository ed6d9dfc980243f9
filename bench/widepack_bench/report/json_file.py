"""Writes a result document as one JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(out: Path, document: Mapping[str, Any]) -> None:
    """Replaces the file in one step: an interruption never loses the earlier results."""
    temporary = out.with_name(f".{out.name}.new")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)
