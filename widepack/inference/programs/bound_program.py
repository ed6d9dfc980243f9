"""Defines wide programs before and after they are bound to weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from widepack_artifacts.program import Program, Ref
from widepack_artifacts.tree import Tree

from ...backends import BoundFunction, MemberFunctions
from ...ir.edit import uses
from ...planning.plan import Plan
from ...runtime.executable import Executable
from ..graph_pool import GraphUse


@dataclass(frozen=True)
class StoredProgram:
    """A wide program with its plan. content: the SHA-256 of its file; "" if it was lowered in this
    process. int8: whether it reads int8 weights.
    """

    program: Program
    plan: Plan
    content: str = ""
    int8: bool = False


def within(programs: Sequence[StoredProgram], batch: tuple[int, int | None]) -> list[StoredProgram]:
    """Returns the programs that serve batches of a class, each for these batches alone."""
    found = []
    for stored in programs:
        least, most = max(batch[0], stored.plan.batch[0]), least_of(batch[1], stored.plan.batch[1])
        if most is None or least <= most:
            found.append(replace(stored, plan=replace(stored.plan, batch=(least, most))))
    return found


def least_of(a: int | None, b: int | None) -> int | None:
    """Returns the smaller one of two limits, of which None is no limit."""
    return b if a is None else a if b is None else min(a, b)


@dataclass(frozen=True)
class WalkCost:
    """What a walk found that a program takes, as the user's cache stores it.

    Attributes:
        work: Nanoseconds of one core.
        bytes: The most bytes in memory at one time.
    """

    work: float
    bytes: float

    def write(self) -> str:
        """Returns the text that `read` takes."""
        return f"{self.work!r} {self.bytes!r}"

    @classmethod
    def read(cls, text: str) -> WalkCost | None:
        """Parses a text of the cache; None if it has another form."""
        try:
            work, size = map(float, text.split())
        except ValueError:
            return None
        return cls(work, size) if 0 <= work < math.inf and 0 <= size < math.inf else None


@dataclass(frozen=True)
class Runnable:
    """A program over weights. function: what a backend bound; None if the flat graph of `executable` runs.
    members: what runs its members alone; None if nothing does.
    """

    executable: Executable
    function: BoundFunction | None = None
    members: MemberFunctions | None = None


class Graphs(Protocol):
    """Runs a bound program, by graphs where it has them."""

    @property
    def use(self) -> GraphUse:
        """Which calls run by a graph."""
        ...

    def run(self, *inputs: Any) -> list[Any]:
        """Runs the program on inputs. Returns: the values of its outputs."""
        ...

    def forget(self) -> None:
        """Drops the graphs. The next calls capture them again."""
        ...


class BoundProgram:
    """A wide program that is ready to run.

    Attributes: stored: The program that runs, with its plan. program, plan, content, int8: Those of `stored`.
        The plan's `batch` is the range of sizes of the first dim that the program is for. backend: The name
        of the backend. only: The number of the output that is the whole answer without change; -1 if the
        answer must be built. run: Runs the program on a list of inputs. lists: The numbers of the outputs
        that are lists of N in the artifact, and tensors in this program, since the loaded members have one
        shape. graphs: What runs it by graphs; None for a program without graphs.
    """

    graphs: Graphs | None = None

    def __init__(
        self,
        stored: StoredProgram,
        runnable: Runnable,
        result: Tree,
        backend: str = "eager",
        ragged: Collection[int] = (),
    ) -> None:
        self.stored, self.backend = stored, backend
        self.program, self.plan = stored.program, stored.plan
        self.content, self.int8 = stored.content, stored.int8
        self.replace_runnable(runnable)
        leaf = result.get("leaf", -1)
        self.lists = frozenset(k for k in ragged if stored.program.outputs[k].kind != "ragged")
        unchanged = leaf >= 0 and stored.program.outputs[leaf].kind != "shared" and leaf not in self.lists
        self.only = leaf if unchanged else -1

    @property
    def looped(self) -> tuple[str, int] | None:
        """The loop that makes the whole answer, and the number of its result; None if there is none, if ops
        for all members read the result, or if a compiled program runs.
        """
        return self._looped if self.runnable.function is None else None

    @cached_property
    def _looped(self) -> tuple[str, int] | None:
        program = self.executable.program
        value = program.outputs[self.only].value if self.only >= 0 else None
        made = {n.name: n for n in program.nodes}
        part = made.get(value.name) if isinstance(value, Ref) else None
        if part is None or part.op != "operator.getitem" or not isinstance(part.args[0], Ref):
            return None
        loop, number = made.get(part.args[0].name), part.args[1]
        alone = uses(program)[part.name] == 1 and program.outputs[self.only].kind == "stacked"
        return (loop.name, number) if loop is not None and loop.body is not None and alone else None

    def replace_runnable(self, runnable: Runnable) -> None:
        """Replaces what runs, from the next call on."""
        self.runnable = runnable
        if self.graphs is None:
            self.run = runnable.executable.run
        else:
            self.graphs.forget()

    def use_graphs(self, graphs: Graphs) -> None:
        """Runs the program by graphs from the next call on. graphs: of this program."""
        self.graphs, self.run = graphs, graphs.run

    @property
    def executable(self) -> Executable:
        """The program over its weights."""
        return self.runnable.executable

    @property
    def place(self) -> Path | None:
        """The folder of the compiled program; None if no folder holds one."""
        return self.runnable.function.place if self.runnable.function is not None else None
