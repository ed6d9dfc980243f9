"""Loads the steps from one op after the other to the artifact's plan, each as a model, for `bench --levels`.

| level | what it is |
|---|---|
| `sequential` | every op of the wide program runs once for each member: the definition of all strategies |
| `loop` | member after member: one node for the whole region |
| `stacked` | every op for all members at once, the program as it was captured |
| `simplified` | the same after simplification and with a weight prologue |
| `tuned` | the artifact's own plan, or the one tuned for this machine |
| `compiled` | that plan on the backend `compile` |

A level that cannot be loaded here is left out with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import widepack

if TYPE_CHECKING:
    from widepack import WideModel

LEVELS: Mapping[str, Mapping[str, Any]] = {
    "sequential": {"strategies": ["wide", "sequential"], "backend": "eager"},
    "loop": {"strategies": "loop", "backend": "eager"},
    "stacked": {"strategies": "wide", "backend": "eager", "simplify": False, "prologue": False},
    "simplified": {"strategies": "wide", "backend": "eager"},
    "tuned": {"backend": "eager"},
    "compiled": {"backend": "compile", "compile": "now"},
}


def load_levels(
    path: str | os.PathLike[str], device: str, names: Iterable[str] = tuple(LEVELS)
) -> tuple[dict[str, WideModel], dict[str, str]]:
    """Loads levels as `level <name>`, and returns the reasons why others are left out."""
    levels: dict[str, WideModel] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            levels[f"level {name}"] = load_level(path, device, name)
        except widepack.WidepackError as error:
            missing[f"level {name}"] = str(error).splitlines()[0]
    return levels, missing


def load_level(path: str | os.PathLike[str], device: str, name: str) -> WideModel:
    """Loads one level. Raises: whatever `widepack.load` raises."""
    return widepack.load(path, device=device, **LEVELS[name])
