"""Provides small edits of programs for several passes: other values, new nodes, no unread nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from . import ops
from .tensor_type import TensorType


def types_of(program: Program) -> dict[str, str]:
    """The type text of every value, by name."""
    slots = {s.name: s.type for s in (*program.weights, *program.inputs)}
    return slots | {n.name: n.out for n in program.nodes}


def free_name(wish: str, taken: set[str]) -> str:
    """Returns a name that is not taken: the wish, with underscores behind it. Adds it to `taken`."""
    while wish in taken:
        wish += "_"
    taken.add(wish)
    return wish


class NodeWriter:
    """Collects new nodes. stem: the start of their names; source: the user's source line."""

    def __init__(self, stem: str, source: str) -> None:
        self.stem, self.source = stem, source
        self.nodes: list[Node] = []

    def __call__(self, what: str, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Adds a node and returns its value. what: the end of its name."""
        self.nodes.append(Node(f"{self.stem}_{what}", ops.full_name(op), args, kwargs, "", self.source))
        return Ref(self.nodes[-1].name)

    def typed(self, value: Ref, type_: TensorType | str) -> Ref:
        """Notes the type of the last value, and returns the value."""
        self.nodes[-1] = replace(self.nodes[-1], out=str(type_))
        return value


def all_nodes(program: Program) -> Iterator[Node]:
    """Yields the nodes of a program; of a loop those of its body, after the loop."""
    for node in program.nodes:
        yield node
        if node.body is not None:
            yield from all_nodes(node.body)


def renamed(node: Node, to: Mapping[str, Any]) -> Node:
    """The node with other arguments. to: name of a value -> its replacement."""
    if not any(r in to for r in refs((node.args, node.kwargs))):
        return node
    args, kwargs = (substitute(a, lambda n: to.get(n, Ref(n))) for a in (node.args, node.kwargs))
    return replace(node, args=args, kwargs=kwargs)


def with_nodes(program: Program, nodes: list[Node], to: Mapping[str, Any]) -> Program:
    """The program with other nodes. to: name of a value that outputs read -> its replacement."""
    outputs = (replace(o, value=substitute(o.value, lambda n: to.get(n, Ref(n)))) for o in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=tuple(outputs))


def readers(program: Program) -> dict[str, list[Node]]:
    """The nodes that read each value, in order."""
    nodes: dict[str, list[Node]] = {}
    for node in program.nodes:
        for r in dict.fromkeys(refs((node.args, node.kwargs))):
            nodes.setdefault(r, []).append(node)
    return nodes


def uses(program: Program) -> Counter[str]:
    """How often each value is read by nodes and outputs."""
    return Counter(r for n in program.nodes for r in refs((n.args, n.kwargs))) + Counter(
        r for o in program.outputs for r in refs(o.value)
    )


def needed(
    nodes: Sequence[Node], names: Iterable[str], always: Callable[[Node], bool] = lambda node: False
) -> list[Node]:
    """The nodes that these values depend on, in order. always: which nodes are needed whatever reads them."""
    live, kept = set(names), []
    for node in reversed(nodes):
        if node.name in live or always(node):
            kept.append(node)
            live.update(refs((node.args, node.kwargs)))
    return kept[::-1]


def sweep(program: Program) -> Program:
    """The program without the nodes and weights that nothing reads."""
    read = [r for o in program.outputs for r in refs(o.value)]
    nodes = needed(program.nodes, read, lambda n: not (n.body or ops.pure(n.op, n.args, n.kwargs)))
    live = {*read, *(r for n in nodes for r in refs((n.args, n.kwargs)))}
    return replace(program, nodes=tuple(nodes), weights=tuple(s for s in program.weights if s.name in live))


VIEWS = frozenset({"aten.view.default", "aten._unsafe_view.default"})
"""Ops that refuse memory whose order of numbers does not fit the new shape."""

DENSE = frozenset({"aten.view_as_complex.default", "aten.view.dtype"})
"""Ops that read memory, so that its order of numbers matters."""


def with_reshapes(program: Program) -> Program:
    """Returns a program that also runs on inputs in another memory order, such as transposed ones.

    A capture replaces the reshapes of a module by the views that they are for its example.
    """
    nodes = [replace(n, op="aten.reshape.default") if n.op in VIEWS else n for n in program.nodes]
    return replace(program, nodes=tuple(nodes))


def drop_duplicates(program: Program) -> Program:
    """Returns the program with one node in place of equal nodes, so that each value is computed once.

    Exported code often computes one value several times: a mask for each layer, a positional table for each
    encoder, a transposed weight for each head. Two nodes are equal if they call the same op with the same
    values and literals. The first of them stays, so no kind changes. Ops that draw random numbers or write
    stay, and ops whose result has a size that depends on data: two equal calls of them have different symbols
    for that size.
    """
    first: dict[str, str] = {}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        node = renamed(node, to)
        if node.body is None and ops.repeats(node.op, node.args, node.kwargs):
            # The text tells apart what Python holds equal: True, 1 and 1.0, or 0.0 and -0.0.
            key = f"{node.op} {node.args!r} {sorted(node.kwargs.items())!r}"
            if key in first:
                to[node.name] = Ref(first[key])
                continue
            first[key] = node.name
        kept.append(node)
    return with_nodes(program, kept, to)
