"""Tracks the memory that is live while a program is walked: what each node makes, and which values may view
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, refs

from ..ir import limits, ops
from ..ir.torch_internals import memory_id

_GIVES_PARTS = frozenset({"operator.getitem"})


@dataclass(frozen=True)
class WalkedValue:
    """The value of a node on a walk.

    bytes: the memory that the node makes. room: bytes that it takes beside that while it runs. views: whether
    the value may share the memory of an argument.
    """

    value: Any
    bytes: float
    room: float = 0.0
    views: bool = False

    @classmethod
    def of(cls, op: str, value: Any, room: float, args: Any) -> WalkedValue:
        """The value of an op. args: all its arguments."""
        tensors = sum(1 for _ in limits.tensors(value))
        if op in _GIVES_PARTS or ops.only_views(op):
            return cls(value, tensors * limits.OBJECT, room, True)
        shares = ops.may_view(op) or bool(_memories(value) & _memories(args))
        return cls(value, limits.size(value), room, shares)


class LiveMemory:
    """The bytes that are live. The memory of a node is live until the last value that may view it ends.

    outside: bytes that are live outside the program. total: all live bytes, with these.
    """

    def __init__(self, outside: float) -> None:
        self.total = outside
        self._makers: dict[str, frozenset[str]] = {}  # for each live value the nodes whose memory it may view
        self._bytes: dict[str, float] = {}
        self._viewers: dict[str, int] = {}  # for each node the number of live values that may view its memory

    def add(self, node: Node, value: WalkedValue) -> None:
        """Adds the value of a node."""
        none: frozenset[str] = frozenset()
        viewed = (
            none.union(*(self._makers.get(r, none) for r in refs((node.args, node.kwargs))))
            if value.views
            else none
        )
        self._makers[node.name] = viewed | {node.name}
        self._bytes[node.name] = value.bytes
        self.total += value.bytes
        for maker in self._makers[node.name]:
            self._viewers[maker] = self._viewers.get(maker, 0) + 1

    def end(self, name: str) -> None:
        """Removes a value that no later node reads."""
        for maker in self._makers.pop(name, ()):
            self._viewers[maker] -= 1
            if not self._viewers[maker]:
                del self._viewers[maker]
                self.total -= self._bytes.pop(maker)


def last_uses(program: Program) -> Iterator[list[str]]:
    """Yields for each node the values that no later node and no output reads."""
    last: dict[str, int] = {}
    for i, node in enumerate(program.nodes):
        last[node.name] = i
        for name in refs((node.args, node.kwargs)):
            last[name] = i
    for output in program.outputs:
        for name in refs(output.value):
            last.pop(name, None)
    ends: list[list[str]] = [[] for _ in program.nodes]
    for name, i in last.items():
        ends[i].append(name)
    return iter(ends)


def _memories(value: Any) -> set[int]:
    """The memories of the tensors of a value, as numbers."""
    return {memory_id(t) for t in limits.tensors(value) if t.layout is torch.strided}
