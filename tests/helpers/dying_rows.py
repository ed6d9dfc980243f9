"""Ends a bench process from native code: in a baseline, in a measurement, or after the last row."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from widepack_bench.processes.fresh import tell


def rows_of(
    name: str, members: Sequence[int], preset: str, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    for n in members:
        for baseline in options["baselines"]:
            tell({"stage": f"preparing {baseline}"})
            if baseline == "vmap" or (baseline == "loop" and n == 5):
                os._exit(3)
        tell({"stage": "measuring"})
        if n == 4:
            os._exit(3)
        yield {
            "row": {
                "primitive": name,
                "members": n,
                "verdict": "checked",
                "skipped": {},
                "compiled-member": None,
            }
        }
    os._exit(3)


def forever() -> Iterator[dict[str, Any]]:
    """Yields a row with the id of its process, then never ends."""
    yield {"pid": os.getpid()}
    time.sleep(600)
