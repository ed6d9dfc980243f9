"""An artifact loaded on one backend, as the race and the processes of `--full` both load it."""

from __future__ import annotations

import os
from inspect import signature
from typing import TYPE_CHECKING, Any

import widepack

if TYPE_CHECKING:
    from widepack import WideModel


def load_on(path: str | os.PathLike[str], device: str, backend: str, dtype: str | None = None) -> WideModel:
    """The artifact on a backend, in another dtype if one is given; what is not compiled yet is compiled now, since a benchmark was asked for it. Raises: what `widepack.load` does."""
    takes = "compile" in signature(widepack.load).parameters and backend not in ("auto", "eager")
    more: dict[str, Any] = {"compile": "now"} if takes else {}
    return widepack.load(path, device=device, dtype=dtype, backend=backend, **more)
