"""Loads an artifact on one backend, for the race and for the processes of `--full`."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING, Any

import widepack

if TYPE_CHECKING:
    from widepack import WideModel


def load_on(path: str | os.PathLike[str], device: str, backend: str, dtype: str | None = None) -> WideModel:
    """Loads an artifact on a backend, in another dtype if one is named. The backend compiles at once.

    Raises: whatever `widepack.load` raises.
    """
    takes = "compile" in signature(widepack.load).parameters and backend not in ("auto", "eager")
    more: dict[str, Any] = {"compile": "now"} if takes else {}
    return widepack.load(path, device=device, dtype=dtype, backend=backend, **more)
