"""Writes the nodes of a wide program: it runs each node of the member program for all members on fake values.

`planning/apply_choice.py` has the order in which strategies are tried. If none can run the node, the error
has the node, op, kinds, shapes and the user's source line.

After every node the rank, static sizes and dtype of the wide value are compared with those of the member's
value. A difference is an error of the lowering at that node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Kind, Node, Ref, substitute

from .. import primitives as primitives  # fills the registry
from ..errors import LoweringError
from ..ir import ops
from ..ir.encoding import decode, encode, map_arguments, type_of
from ..ir.fake_values import CPU, Fakes
from ..ir.op_records import record
from ..ir.values import Ragged, Shared, Stacked, Value, WideValue, known
from ..planning.apply_choice import apply_choice
from ..planning.plan import NodeChoice
from ..registry.registry import REGISTRY, Strategy, strategies_of
from ..registry.writer import Writer, unwrap, wide_items
from ..simplify.canonical import REPLACED


class ProgramWriter(Writer):
    """Collects the nodes of a program. Equal calls of pure ops become one node."""

    def __init__(self, members: int, device: str, fakes: Fakes) -> None:
        super().__init__(members, device)
        self.fakes = fakes
        self.nodes: list[Node] = []
        self.at = Node("", "")  # the member's node that is lowered now
        self._names: dict[str, int] = {}
        self._pure_values: dict[str, Value] = {}

    def name(self, wish: str) -> str:
        """Returns a name that no value of the program has."""
        count = self._names.get(wish, -1) + 1
        self._names[wish] = count
        return wish if not count else self.name(f"{wish}_{count}")

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        positional, keywords = list(encode(refs_of(list(args)))), encode(refs_of(kwargs))
        key = f"{op} {positional!r} {keywords!r}"
        if key in self._pure_values:
            return self._pure_values[key]
        fake = self.fakes.run(op, unwrap(args), unwrap(kwargs))
        value = Value(Ref(self.name(self.at.name or "made")), fake)
        assert value.ref is not None
        self.nodes.append(
            Node(value.ref.name, op, tuple(positional), keywords, type_of(fake), self.at.source, self.at.name)
        )
        if ops.pure(op, args, kwargs):
            self._pure_values[key] = value
        return value

    def add(self, node: Node, fake: Any) -> Value:
        """Adds a complete node (a loop)."""
        self.nodes.append(node)
        return Value(Ref(node.name), fake)


def refs_of(args: Any) -> Any:
    """Returns arguments in which names replace Values."""
    return map_arguments(args, lambda a: a.ref if isinstance(a, Value) else a, as_lists=True)


def held(value: WideValue) -> tuple[Kind, Any]:
    """Returns the kind of a wide value, and the value, or the list of the members' values, that it holds."""
    if isinstance(value, Ragged):
        return "ragged", value.members
    return "shared" if isinstance(value, Shared) else "stacked", value.value


def run_node(
    w: ProgramWriter, node: Node, values: Mapping[str, Any], choice: NodeChoice | None, own: Any
) -> tuple[Any, str]:
    """Runs one node of the member program for all members.

    Args:
        w: The writer of the wide program.
        node: The node.
        values: The wide values of earlier nodes.
        choice: The choice of the plan.
        own: The member's fake value of the node.

    Returns:
        The wide value, and the name of the strategy that computes it.

    Raises:
        LoweringError: No strategy can run the node, or the result differs from the member's.
    """
    w.at, w.op = node, node.op
    try:
        args, kwargs = (
            decode(substitute(a, values.__getitem__), CPU) for a in (list(node.args), node.kwargs)
        )
        if node.op == "operator.getitem" and isinstance(args[0], tuple):
            return args[0][args[1]], "part"
        value, name = apply_choice(w, node, args, kwargs, choice.strategy if choice is not None else None)
    except LoweringError:
        raise
    except Exception as e:  # a rule met an unknown case: the error names node and shapes
        raise LoweringError(
            f"{describe(node, values)} cannot be run for all members: {type(e).__name__}: {str(e)[:300]}"
        ) from e
    difference = compare(value, own, w.members)
    if difference:
        raise LoweringError(
            f"{describe(node, values)} has a wrong result with strategy {name!r}: {difference}. This "
            "is an error of widepack; please report it, or build with --strategy loop"
        )
    return value, name


def applicable(w: Writer, op: str, args: Any, kwargs: Any) -> list[Strategy]:
    """Returns the op's strategies that apply to these arguments, in order."""
    return [s for s in strategies_of(op).values() if s.when(w, *args, **kwargs)]


def once_a_member() -> dict[str, list[str]]:
    """Returns for each reason the ops that run once for each member, if they read values that differ between
    members; "" is the reason of ops without one.

    Every other op that programs may use has a strategy, becomes an op that has one (`simplify/canonical.py`),
    or takes no tensor.
    """
    by_reason: dict[str, list[str]] = {}
    for op in sorted(OPS - set(REGISTRY) - REPLACED):
        if op.startswith("aten.") and any("Tensor" in type_ for _, type_, _ in ops.arguments(op)):
            by_reason.setdefault(record(op).once, []).append(op)
    return by_reason


def compare(wide: Any, own: Any, members: int) -> str:
    """Describes how a wide value differs from the member's in rank, static sizes or dtype; else empty."""
    if wide is None or own is None or isinstance(wide, Ragged):
        return ""
    if isinstance(wide, tuple):
        return next((d for m, o in zip(wide, own) if (d := compare(m, o, members))), "")
    fake = wide.value.fake if isinstance(wide.value, Value) else wide.value
    if not isinstance(own, torch.Tensor) or not isinstance(fake, torch.Tensor):
        return ""
    expected = [known(s) for s in own.shape]
    sizes = [known(s) for s in fake.shape]
    if isinstance(wide, Stacked):
        if sizes[:1] != [members]:
            return f"the wide value is {type_of(fake)}, its first axis is not the {members} members"
        sizes = sizes[1:]
    if fake.dtype != own.dtype:
        return f"the wide value is {fake.dtype}, the member's own {own.dtype}"
    if len(expected) != len(sizes) or any(
        a != b for a, b in zip(expected, sizes) if a is not None and b is not None
    ):
        return f"the wide value is {type_of(fake)}, the member's own {type_of(own)}"
    return ""


def describe(node: Node, values: Mapping[str, Any]) -> str:
    """Describes a node for an error: name, op, arguments, and the user's line."""

    def word(x: WideValue) -> str:
        fake = x.value.fake if isinstance(x, (Shared, Stacked)) and isinstance(x.value, Value) else None
        return f"{type(x).__name__} {type_of(fake)}"

    read = ", ".join(word(x) for x in wide_items(substitute(list(node.args), values.__getitem__)))
    source = f", from {node.source}," if node.source else ""
    return f"node {node.name} ({node.op}) over {read or 'no values'}{source}"
