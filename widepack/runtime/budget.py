"""Limits the memory and the work that one load may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArtifactError

LEAST_BYTES = 256 * 2**20
LEAST_WORK = 4e9
BYTES_FOR_WEIGHTS, BYTES_FOR_PROBE = 16, 1024
WORK_FOR_WEIGHTS, WORK_FOR_PROBE = 200.0, 10_000.0
MOST_BOUND_NODES = 200_000
LONGEST_WALK = 60.0
"""Seconds of a core that computing sizes may take, for all programs of a load."""

_WHEN = {"load": "when it is loaded", "run": "when one member runs"}


class OverBudget(ArtifactError):
    """A program takes more memory, work, time or nodes than the files of its artifact allow."""


@dataclass
class Budget:
    """The memory and the work that the programs of one load may take, or one run of a member.

    bytes: live at one time. work: nanoseconds of one core. limit: the factor on the usual budget. spent: the
    work so far. resident: bytes of derived weights that the prologues of bound programs made. walked: seconds
    of a core that were spent on computing sizes. nodes: of all programs that were bound, each as often as it
    was. use: "load", whose limits a caller may lift, or "run".
    """

    bytes: float
    work: float
    limit: float = 1.0
    spent: float = 0.0
    resident: float = 0.0
    walked: float = 0.0
    nodes: int = 0
    use: str = "load"

    @classmethod
    def of(cls, weights: int, probe: int, limit: float = 1.0, use: str = "load") -> Budget:
        """The budget for files of these sizes. weights, probe: bytes. limit: a factor. use: see `Budget`."""
        memory = LEAST_BYTES + BYTES_FOR_WEIGHTS * weights + BYTES_FOR_PROBE * probe
        work = LEAST_WORK + WORK_FOR_WEIGHTS * weights + WORK_FOR_PROBE * probe
        return cls(memory * limit, work * limit, limit, use=use)

    def add_walked(self, title: str, seconds: float) -> None:
        """Counts the time of computing the sizes of a node.

        title: the program and the node. Raises: ArtifactError if all of them took too long.
        """
        self.walked += seconds
        longest = LONGEST_WALK * max(1.0, self.limit)
        if self.walked > longest:
            raise OverBudget(
                f"{title}: computing the sizes of the nodes up to here took {self.walked:,.0f} s of a core; "
                f"a {self.use} may take {longest:,.0f} s for it" + self.way_out("load(limit=None)")
            )

    def add_nodes(self, title: str, count: int) -> None:
        """Counts the nodes of a program that is bound, whether its file was read before or not.

        title: the program. Raises: ArtifactError if all of them are too many.
        """
        self.nodes += count
        allowed = MOST_BOUND_NODES * self.limit
        if self.nodes > allowed:
            raise OverBudget(
                f"{title} brings the programs of this {self.use} to {self.nodes:,} nodes; {allowed:,.0f} are "
                f"allowed"
                + self.way_out(f"load(limit={2 * self.nodes / MOST_BOUND_NODES:.1g}) allows this much")
            )

    def admit(self, title: str, work: float, memory: float) -> None:
        """Checks the work and the memory of the load.

        title: the program and the node. Raises: ArtifactError if it is too much.
        """
        for resource, requested, allowed, write in (
            ("memory", memory, self.bytes, _bytes),
            ("work", work, self.work, _seconds),
        ):
            if requested > allowed:
                resident = (
                    f", {_bytes(self.resident)} of it in programs that are bound already"
                    if resource == "memory" and self.resident
                    else ""
                )
                one, other = _apart(requested, allowed, write)
                factor = 2 * requested / allowed * self.limit
                raise OverBudget(
                    f"{title} would bring the {resource} of this {self.use} to {one}{resident}; an artifact "
                    f"of these files may take {other} {_WHEN[self.use]}"
                    + self.way_out(
                        f"load(limit={factor:.1g}) allows this much, a later node may need more, and "
                        "limit=None allows anything"
                    )
                )

    def way_out(self, call: str) -> str:
        """Returns the end of an error that says which call lifts the limit; empty if none does."""
        return f". If you trust its makers: {call}" if self.use == "load" else ""


def _bytes(count: float, digits: int = 1) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.{digits}f} {unit}"
    return f"{count:,.0f} bytes"


def _seconds(nanoseconds: float, digits: int = 0) -> str:
    return f"{nanoseconds / 1e9:,.{digits}f} s of a core"


def _apart(one: float, other: float, write: Callable[[float, int], str]) -> tuple[str, str]:
    """Two figures as text, with as many digits as show that they differ."""
    for digits in range(1, 10):
        texts = write(one, digits), write(other, digits)
        if texts[0] != texts[1]:
            break
    return texts
