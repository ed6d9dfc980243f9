"""Finds which values of a program may share memory, and where each is read last."""

from __future__ import annotations

from typing import Any

from widepack_artifacts.program import Node, Program, Ref, refs

from ..ir import ops

_OUTSIDE = frozenset({""})
_MOST_MEMORIES = 8
_DENSE_VIEWS = ops.full_names("""
    alias flatten.using_ints operator.getitem permute reshape select.int slice.Tensor split.Tensor
    split_with_sizes squeeze squeeze.dim squeeze.dims t transpose.int unbind.int unflatten.int unsqueeze view
""")
"""Ops that read each place of their tensor once at most."""
_COMPUTES = ops.full_names("linear matmul conv1d conv2d")
"""Ops that torch implements by other ops, and that always compute: no result is an argument."""


class ValueMemory:
    """Which values of a program may share memory, and where each memory is read for the last time.

    A memory has the name of the node that makes it. The name "" is that of memory from outside.
    """

    def __init__(self, program: Program) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._dense: set[str] = set()  # the values of which no two places are one
        self._last: dict[str, int] = {}
        self._now: dict[str, str] = {}  # for a memory that a write replaced by another, that other one
        self._written: dict[str, int] = {}  # the last write of each memory
        for slot in (*program.weights, *program.inputs):
            self._of[slot.name] = _OUTSIDE
        for number, node in enumerate(program.nodes):
            read = self._read((node.args, node.kwargs), number)
            if _is_number(node):
                self._of[node.name] = frozenset()
            elif _makes_memory(node):
                self._of[node.name] = frozenset({node.name})
                self._dense.add(node.name)
            else:
                self._of[node.name] = read
                if node.op in _DENSE_VIEWS and node.args and _in(node.args[0], self._dense):
                    self._dense.add(node.name)
        for output in program.outputs:
            self._read(output.value, len(program.nodes))

    def _read(self, value: Any, number: int) -> frozenset[str]:
        """Counts what node `number` reads. Returns the memories that its results may be in."""
        found: set[str] = set()
        for name in refs(value):
            found |= self._of[name]
        for memory in found:
            self._last[memory] = number
        if len(found) <= _MOST_MEMORIES:
            return frozenset(found)
        for memory in found:  # too many to follow: none of them is overwritten
            self._of[memory] = _OUTSIDE
        return _OUTSIDE

    def may_overwrite(self, base: str, read: Any, first: int, number: int) -> bool:
        """Returns whether node `number` is the last that reads the memory of `base`.

        read: what the write reads beside `base`. first: the node at which the program reads it; a write runs
        later, at `number`, if it stands for several nodes. No two places of `base` may be one place in
        memory, as in an expanded value.
        """
        memories = self._of[base]
        if len(memories) != 1 or base not in self._dense:
            return False
        memory = self._current(next(iter(memories)))
        if memory in _OUTSIDE or self._of[memory] & _OUTSIDE:
            return False
        sources = {self._current(m) for r in refs(read) for m in self._of[r] if m}
        if any(self._written.get(s, -1) > first for s in sources):
            return False
        return self._last[memory] == number and memory not in sources

    def may_be_outside(self, name: str) -> bool:
        """Returns whether a value may share memory with a weight or an input."""
        return bool(self._of[name] & _OUTSIDE)

    def overwritten(self, node: str, base: str, number: int) -> None:
        """The value of node `number`, called `node`, is now in the memory of `base`; so is what views it."""
        memory = self._current(next(iter(self._of[base])))
        self._written[memory] = number
        self._now[node] = memory
        if self._of[node] & _OUTSIDE:
            self._of[memory] = _OUTSIDE
        self._last[memory] = max(self._last.get(node, 0), self._last[memory])

    def _current(self, memory: str) -> str:
        while memory in self._now:
            memory = self._now[memory]
        return memory


def _in(value: Any, names: set[str]) -> bool:
    return isinstance(value, Ref) and value.name in names


def _makes_memory(node: Node) -> bool:
    """Returns whether the results of a node have memory of their own, whatever its arguments are.

    An op that torch implements by other ops may return an argument, as dropout does outside of training.
    """
    if node.body is not None or node.op in ops.PYTHON or node.op.startswith("widepack."):
        return False
    if node.op in _COMPUTES:
        return True
    return not ops.may_view(node.op) and not ops.is_composite(node.op)


def _is_number(node: Node) -> bool:
    """Returns whether the result of a node is a number, which has no memory."""
    return node.op.startswith("aten.sym_") or (node.op in ops.PYTHON and node.op != "operator.getitem")
