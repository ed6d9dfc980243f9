"""Defines the argument and the result of a backend.

A backend turns the main part of a wide program (what is left after the prologue) and its weights into a
callable of the inputs:

    bind(task: Task) -> BoundFunction   function(*inputs) -> the outputs, a list of N for a Ragged one

A backend compiles only if `task.compile` is true; otherwise it raises `Unavailable` if it would have to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from widepack_artifacts.guards import Expr, holds
from widepack_artifacts.program import Program

from ..errors import Unavailable as Unavailable
from ..system.progress import Report

if TYPE_CHECKING:
    from .flat import Flat

Function = Callable[..., Any]
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
Sizes = Mapping[str, int]
SIZES = (1, 2, 5, 17, 32)


class Mapped(NamedTuple):
    """A tensor of a weights file.

    at: its address. bytes: its size. file, offset: its place in the artifact.
    """

    at: int
    bytes: int
    file: str
    offset: int


@dataclass(frozen=True)
class Task:
    """One wide program to bind.

    Attributes:
        program, weights: The main part, and a function that returns a value for each of its weights: a
            tensor, or a list of N.
        content: The hash of the wide program's file, or of the same JSON if it was lowered in this process.
        title: The name of the program in messages.
        eager: The flat graph. It defines the right answers, and runs where no compiled program is valid.
        dims: The least size, the largest size and an example of each dim.
        example: The sizes to compile at.
        guards: The conditions under which the program is valid.
        inputs: Draws the inputs of a call at given sizes.
        differ: Describes where outputs differ from the flat graph's by more than rounding; empty if nowhere.
        compile: Whether the backend may compile.
        cache: The folder of compiled programs; None for the default one.
        weights_key: Identifies the values of the weights; "" for values that no file has.
        before: What is bound to the same program with another checkpoint of `member`; None for a first bind.
        member: The place of the only member whose weights differ from those of `before`.
        graph: Returns the ONNX graph that the artifact has of a program, by its digest; None if it has none,
            or if nobody vouches for the artifact.
        progress: Reports progress; may be None.
        most_nodes: The most nodes of a program that may be compiled; 0 for any number.
        workers: The number of members that a loop may run at once.
    """

    program: Program
    weights: Callable[[], Sequence[Any]]
    device: torch.device
    content: str
    pattern: str
    title: str
    eager: Function
    dims: Mapping[str, tuple[int, int | None, int]]
    example: Sizes
    guards: Sequence[Expr]
    inputs: Callable[[Sizes], Sequence[torch.Tensor]]
    differ: Callable[[Sequence[Any], Sequence[Any]], str]
    compile: bool
    cache: Path | None
    weights_key: str = ""
    before: BoundFunction | None = None
    member: int = -1
    graph: Callable[[str], bytes | None] = lambda _: None
    progress: Report | None = None
    most_nodes: int = 0
    workers: int = 0


class MemberFunctions(Protocol):
    """Runs single members of a bound program."""

    def open(self, member: int, wrong: Callable[[Function], str]) -> bool:
        """Prepares a member.

        wrong: Returns what is wrong with the answers of a function as `run` is, or "". Returns: whether `run`
        takes the member. Raises: OSError if a file is gone; what the backend raises.
        """
        ...

    def run(self, member: int, inputs: Sequence[torch.Tensor]) -> list[Any] | None:
        """Runs a member that is open.

        inputs: the member's own, in the order of the program's inputs. Returns: the member's outputs; None if
        the member's own program must run these inputs.
        """
        ...


class BoundFunction(Protocol):
    """Runs a bound program: takes the inputs of a call and returns the program's outputs in order.

    Every backend returns one. `flat` is the program that was compiled, with its weights; None if nothing was
    compiled. `place` is the folder of the compiled program; None if no folder holds one. `members` runs
    members alone; None if nothing does.
    """

    @property
    def flat(self) -> Flat | None: ...

    @property
    def place(self) -> Path | None: ...

    @property
    def members(self) -> MemberFunctions | None: ...

    def __call__(self, *inputs: Any) -> Any: ...


class Backend(Protocol):
    """A module of this package.

    NAME: of the backend. COPIES: whether it copies weights, so that a write into a weight has no effect.
    """

    NAME: str
    COPIES: bool

    def bind(self, task: Task) -> BoundFunction: ...


def sizes_to_try(task: Task, others: Sequence[int] = SIZES) -> Iterator[dict[str, int]]:
    """The sizes at which a compiled program is checked against the flat graph: the example, and each dim at
    its least size and a few others.
    """
    seen: list[dict[str, int]] = []
    changes = [
        {d: s}
        for d, (least, most, _) in task.dims.items()
        for s in (least, *others)
        if s >= max(least, 1) and (most is None or s <= most)
    ]
    for change in itertools.chain([{}], changes):
        sizes = {**task.example, **change}
        if sizes not in seen and all(holds(g, sizes) for g in task.guards):
            seen.append(sizes)
            yield sizes


def words(sizes: Sizes) -> str:
    """`B = 2, T = 7`."""
    return ", ".join(f"{d} = {s}" for d, s in sizes.items())


def first_line(e: BaseException) -> str:
    """The first line of the message of an exception."""
    lines = [line.strip() for line in _COLORS.sub("", str(e)).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def first_cause(e: BaseException) -> str:
    """The class and the first line of the error that others were raised from.

    Errors of torch's exporters name only the stage that failed.
    """
    while e.__cause__ is not None:
        e = e.__cause__
    return f"{type(e).__name__}: {first_line(e)}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Sends the prints of a compiler to standard error, and silences the warnings of torch's exporters about
    missing packages and about the class of a file.
    """
    before = {name: logging.getLogger(name).level for name in ("torch.onnx", "torch.export")}
    for name in before:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
