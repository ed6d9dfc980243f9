"""Provides the backend `eager`: the flat graph, op after op. Every other backend is checked against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .flat import Flat
from .task import Function, MemberFunctions, Task

NAME = "eager"
COPIES = False


class EagerFunction:
    """The flat graph as a `BoundFunction`: nothing is compiled, and nothing is stored."""

    flat: Flat | None = None
    place: Path | None = None
    members: MemberFunctions | None = None

    def __init__(self, run: Function) -> None:
        self._run = run

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)


def bind(task: Task) -> EagerFunction:
    """Returns the flat graph itself."""
    return EagerFunction(task.eager)
