"""Stores what `masked_selection.py` finds out about values, and collects the nodes of its rewrites."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from widepack_artifacts.program import Node, Ref, refs, substitute

from ..ir import ops
from ..ir.ops import full_name


@dataclass(frozen=True)
class MaskedValue:
    """A value `[*a, K, *b]`, read at the K true positions of a mask `[*m]`, as a value at every position.

    mask: the name of the mask.
    dense: the value at every position, `[*a, *m, *b]`. Dims of m on which it does not depend may have size 1.
    before, within, behind: the number of dims of a, m and b.
    """

    mask: str
    dense: Ref
    before: int
    within: int
    behind: int

    @property
    def rank(self) -> int:
        """The rank of `[*a, K, *b]`."""
        return self.before + 1 + self.behind

    def fits(self, other: MaskedValue) -> bool:
        """Whether both values have the same positions and dims, so that one op may read both."""
        return (self.mask, self.before, self.within, self.behind) == (
            other.mask,
            other.before,
            other.within,
            other.behind,
        )


@dataclass(frozen=True)
class PositionIndices:
    """The indices of the true positions of a mask, as `nonzero` and `where` return them.

    mask: the name of the mask. within: its rank.
    dim: the dim of the mask that the K indices belong to; None for the indices `[K, within]` of all dims.
    """

    mask: str
    within: int
    dim: int | None


Result = MaskedValue | PositionIndices | tuple[MaskedValue, ...] | Ref | None
Rewrite = tuple[list[Node], Result]
"""New nodes, and what the node becomes: a masked value, indices, or a value without the number K.

The result None means that the node cannot be rewritten.
"""
UNCHANGED: Rewrite = ([], None)


class NodeWriter:
    """Collects the new nodes of one rewrite. They are named after the node that they replace."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Adds a node and returns its value. Its type is computed later."""
        name = f"{self.node.name}_at_{len(self.nodes)}"
        self.nodes.append(Node(name, full_name(op), args, kwargs, "", self.node.source))
        return Ref(name)

    def mask(self, value: MaskedValue) -> Ref:
        """Returns the mask as `[*m, 1, ...]`, which broadcasts over the dims behind the positions."""
        mask = Ref(value.mask)
        for _ in range(value.behind):
            mask = self("unsqueeze", mask, -1)
        return mask


class EqualValues:
    """Finds values that equal pure calls compute: such values are equal in a functional program."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # a value -> the first value with the same call
        self._by_call: dict[str, str] = {}

    def learn(self, node: Node) -> None:
        """Notes how a value is computed. Calls before and after an op that is not pure are not equal."""
        if node.body is not None or not ops.pure(node.op, node.args, node.kwargs):
            self._by_call.clear()
            return
        args, kwargs = (substitute(a, lambda n: Ref(self.first(n))) for a in (node.args, node.kwargs))
        arguments = ops.bind(node.op, args, kwargs) if node.op.startswith("aten.") else {"": args}
        call = repr((node.op, sorted(arguments.items())))  # the text tells 1, 1.0 and True apart
        self._first[node.name] = self._by_call.setdefault(call, node.name)

    def first(self, name: str) -> str:
        """Returns the first value that equals this one."""
        return self._first.get(name, name)


@dataclass
class Tracked:
    """What is known about the values of the program, by their names. types: their type texts."""

    types: dict[str, str]
    masked: dict[str, MaskedValue] = field(default_factory=dict)
    indices: dict[str, PositionIndices] = field(default_factory=dict)
    tuples: dict[str, tuple[MaskedValue, ...]] = field(default_factory=dict)
    equal: EqualValues = field(default_factory=EqualValues)

    def store(self, name: str, result: Result) -> None:
        """Notes what a value of the program is."""
        if isinstance(result, MaskedValue):
            self.masked[name] = result
        elif isinstance(result, PositionIndices):
            self.indices[name] = result
        elif isinstance(result, tuple):
            self.tuples[name] = result


@dataclass(frozen=True)
class Read:
    """A node that reads masked values or indices of positions."""

    node: Node
    tracked: Tracked

    @property
    def arguments(self) -> dict[str, Any]:
        """The node's arguments by the names of the op's schema."""
        return ops.bind(self.node.op, self.node.args, self.node.kwargs)

    @property
    def masked(self) -> list[MaskedValue]:
        """The masked values that the node reads, in the order of its arguments."""
        names = refs((self.node.args, self.node.kwargs))
        return [self.tracked.masked[r] for r in names if r in self.tracked.masked]

    def masked_at(self, argument: Any) -> MaskedValue | None:
        """Returns the masked value that an argument is, if it is one."""
        return self.tracked.masked.get(argument.name) if isinstance(argument, Ref) else None

    @property
    def only(self) -> MaskedValue | None:
        """The masked value of the first argument, if no other argument is masked."""
        values = list(self.arguments.values())
        first = self.masked_at(values[0])
        return first if first is not None and len(self.masked) == 1 else None

    def is_tracked(self, name: str) -> bool:
        """Whether a value is masked or holds indices of positions: its own size is data."""
        return name in self.tracked.masked or name in self.tracked.indices
