"""What a backend is given, and what it gives back.

A backend turns the main part of a wide program (what is left after the prologue) and its weights into a callable of the inputs:

    bind(task: Task) -> Function        function(*inputs) -> the program's outputs, in order, a list of N where one is Ragged

It never compiles unless `task.compile` says so, and raises `Unavailable` where it would have to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from widepack_artifacts.guards import Expr, holds
from widepack_artifacts.program import Program

from ..errors import UsageError
from ..system.progress import Report

Function = Callable[..., Any]
Sizes = Mapping[str, int]


class Unavailable(UsageError):
    """A backend that cannot run here without compiling or installing something first."""


class Mapped(NamedTuple):
    """A tensor of a weights file. at: where it is in memory. bytes: its size. file, offset: where it is in the artifact."""

    at: int
    bytes: int
    file: str
    offset: int


@dataclass(frozen=True)
class Task:
    """One wide program to bind.

    program, weights: the main part, and a value for each of its weights: a tensor, or a list of N. content: the hash of the whole wide program's file, or of the
    same JSON where it was lowered here. said: which one it is, for messages. eager: the same bound to the flat graph: the definition of what is right, and
    what runs at sizes that a compiled program does not hold for. dims: least, most and example of each. example: sizes to compile at. guards: under which the
    program holds. inputs: draws a call's inputs at sizes. differ: where outputs differ from those of the flat graph by more than rounding, in words. compile: whether it may compile. cache: the
    folder of compiled programs; None is the usual one. most_nodes: of a program, as the compiler sees it, that may be compiled; 0 for any. workers: how many
    members a loop may run at once. located: the tensors of the artifact's weights files.
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
    located: Callable[[], Sequence[Mapped]] = tuple
    progress: Report | None = None
    most_nodes: int = 0
    workers: int = 0


class Backend(Protocol):
    """A module of this package. NAME: what a person types. COPIES: whether what it binds holds copies of weights, so that writing into a weight changes nothing."""

    NAME: str
    COPIES: bool

    def bind(self, task: Task) -> Function: ...


def sizes_to_try(task: Task) -> Iterator[dict[str, int]]:
    """Sizes at which a compiled program is held to the flat graph: the example, each dim at its least and at a few others, within bounds and guards."""
    seen: list[dict[str, int]] = []
    others = [
        {d: s} for d, (least, most, _) in task.dims.items() for s in (least, 1, 2, 5, 17, 32) if s >= max(least, 1) and (most is None or s <= most)
    ]
    for change in itertools.chain([{}], others):
        sizes = {**task.example, **change}
        if sizes not in seen and all(holds(g, sizes) for g in task.guards):
            seen.append(sizes)
            yield sizes


def words(sizes: Sizes) -> str:
    """`B = 2, T = 7`."""
    return ", ".join(f"{d} = {s}" for d, s in sizes.items())


def first_line(e: Exception) -> str:
    """What an exception of somebody else's says first."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Whatever a compiler prints goes to standard error, and what torch's exporter logs of packages that are not there goes nowhere."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(before)
