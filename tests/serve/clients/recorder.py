"""Records what the calls of a client return. It runs in the environment of the client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy


class Recorder:
    """Calls functions, and keeps what they return or raise.

    Attributes:
        errors: The classes of errors of the client.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        self.errors = errors
        self.values: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> None:
        """Calls a function. An array is kept as it is, and anything else as JSON."""
        try:
            found = call()
        except self.errors as e:
            self.values[name] = {"error": str(e)}
            return
        if isinstance(found, numpy.ndarray):
            self.arrays[name] = found
        else:
            self.values[name] = {"value": found}

    def write(self, path: str) -> None:
        """Writes all to `PATH.json` and `PATH.npz`."""
        Path(f"{path}.json").write_text(json.dumps(self.values))
        numpy.savez(f"{path}.npz", **self.arrays)
