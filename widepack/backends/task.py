"""What a backend is given, and what it gives back.

A backend turns the main part of a wide program (what is left after the prologue) and its weights into a callable of the inputs:

    bind(task: Task) -> Function        function(*inputs) -> the program's outputs, in order, a list of N where one is Ragged

It never compiles unless `task.compile` says so, and raises `Unavailable` where it would have to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from widepack_artifacts.guards import Expr
from widepack_artifacts.program import Program

from ..errors import UsageError
from ..progress import Report

Function = Callable[..., Any]
Sizes = Mapping[str, int]


class Unavailable(UsageError):
    """A backend that cannot run here without compiling or installing something first."""


@dataclass(frozen=True)
class Task:
    """One wide program to bind.

    program, weights: the main part, and a value for each of its weights: a tensor, or a list of N. content: the hash of the whole wide program's file, or of the
    same JSON where it was lowered here. said: which one it is, for messages. eager: the same bound to the flat graph: the definition of what is right, and
    what runs at sizes that a compiled program does not hold for. dims: least, most and example of each. example: sizes to compile at. inputs: draws a call's
    inputs at sizes; None where no call can be drawn. bounds: how far each floating output may be off from the flat graph's. source: where the weights lie, for
    programs that read the file themselves. files: of the artifact, by weight name.
    """

    program: Program
    weights: Sequence[Any]
    device: torch.device
    content: str
    pattern: str
    said: str
    eager: Function
    dims: Mapping[str, tuple[int, int | None, int]]
    example: Sizes
    guards: Sequence[Expr]
    inputs: Callable[[Sizes], Sequence[torch.Tensor]]
    differ: Callable[[Sequence[Any], Sequence[Any]], str]
    compile: bool
    cache: Path | None
    progress: Report | None = None


class Backend(Protocol):
    """A module of this package. NAME: what a person types. version: what its cached programs depend on beside the task, in words."""

    NAME: str

    def bind(self, task: Task) -> Function: ...
