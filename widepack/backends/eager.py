"""`eager`: the flat graph, op after op, as torch runs it. Always there; what every other backend is held to."""

from __future__ import annotations

from .task import Function, Task

NAME = "eager"
COPIES = False


def bind(task: Task) -> Function:
    return task.eager
