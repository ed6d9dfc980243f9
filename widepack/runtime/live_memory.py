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
        self._bytes: dict[str, float] = {}
        self._bases: dict[str, set[str]] = {}  # for each node the values that its value may view
        # For each node 1 while its value is live, and 1 for each node in memory that may view it.
        self._holders: dict[str, int] = {}

    def add(self, node: Node, value: WalkedValue) -> None:
        """Adds the value of a node. It takes as long as the node has arguments, however long a chain of views
        is.
        """
        read = refs((node.args, node.kwargs)) if value.views else ()
        bases = {r for r in read if r in self._holders}
        for base in bases:
            self._holders[base] += 1
        self._bases[node.name], self._holders[node.name] = bases, 1
        self._bytes[node.name] = value.bytes
        self.total += value.bytes

    def end(self, name: str) -> None:
        """Removes a value that no later node reads."""
        ended = [name] if name in self._holders else []
        while ended:
            node = ended.pop()
            self._holders[node] -= 1
            if not self._holders[node]:
                del self._holders[node]
                self.total -= self._bytes.pop(node)
                ended.extend(self._bases.pop(node))


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
