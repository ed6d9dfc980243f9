"""The wide interpreter: walks a member program and writes the wide one, node by node, each with its fake value.

What runs a node, in this order:

1. all arguments Shared and the op pure: the op itself, once
2. the strategy that the plan names
3. the first strategy of the op that applies
4. `sequential`
5. else an error with node, op, kinds, shapes and the user's own source line

After every node the wide value's rank, static sizes and dtype are compared with the member's own: a difference is an error of the lowering at that node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from widepack_artifacts.program import Node, Ref, substitute

from ..ir import ops
from .. import primitives  # fills the registry
from ..ir.encoding import decode, encode, type_of
from ..errors import LoweringError
from ..registry.sequential import sequential
from ..planning.plan import Choice
from ..registry.registry import REGISTRY, Strategy
from ..ir.fake_values import CPU, Fakes
from ..ir.values import Ragged, Shared, Stacked, Value, Wide, known
from ..registry.writer import Writer, unwrap, wide_items


class ProgramWriter(Writer):
    """Adds nodes to a program in the making. Equal calls of pure ops are one node."""

    def __init__(self, members: int, device: str, fakes: Fakes) -> None:
        super().__init__(members, device)
        self.fakes = fakes
        self.nodes: list[Node] = []
        self.at = Node("", "")  # the member's node at work
        self._names: dict[str, int] = {}
        self._made: dict[str, Value] = {}

    def name(self, wish: str) -> str:
        """A name that no value of the program has."""
        count = self._names.get(wish, -1) + 1
        self._names[wish] = count
        return wish if not count else self.name(f"{wish}_{count}")

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        given, named = list(encode(refs_of(list(args)))), encode(refs_of(kwargs))
        key = f"{op} {given!r} {named!r}"
        if key in self._made:
            return self._made[key]
        held = self.fakes.run(op, unwrap(args), unwrap(kwargs))
        value = Value(Ref(self.name(self.at.name or "made")), held)
        assert value.ref is not None
        self.nodes.append(Node(value.ref.name, op, tuple(given), named, type_of(held), self.at.source, self.at.name))
        if ops.pure(op, args, kwargs):
            self._made[key] = value
        return value

    def add(self, node: Node, held: Any) -> Value:
        """A node that is made already (a loop)."""
        self.nodes.append(node)
        return Value(Ref(node.name), held)


def refs_of(args: Any) -> Any:
    """Arguments with Values replaced by their names."""
    if isinstance(args, Value):
        return args.ref
    if isinstance(args, (tuple, list)):
        return [refs_of(a) for a in args]
    if isinstance(args, dict):
        return {k: refs_of(v) for k, v in args.items()}
    return args


def run_node(w: ProgramWriter, node: Node, values: Mapping[str, Any], choice: Choice | None, own: Any) -> tuple[Any, str]:
    """One node of the member program for all members.

    values: the wide values so far. choice: what the plan says. own: the member's own fake value.
    Returns: the wide value and the name of the strategy that made it. Raises: LoweringError.
    """
    w.at, w.op = node, node.op
    try:
        args, kwargs = (decode(substitute(a, values.__getitem__), CPU) for a in (list(node.args), node.kwargs))
        if node.op == "operator.getitem" and isinstance(args[0], tuple):
            return args[0][args[1]], "part"
        made, name = _run(w, node, args, kwargs, choice)
    except LoweringError:
        raise
    except Exception as e:  # a rule that met what it does not know: named with all that helps to find it
        raise LoweringError(f"{describe(node, values)} cannot be run for all members: {type(e).__name__}: {str(e)[:300]}") from e
    difference = compare(made, own, w.members)
    if difference:
        raise LoweringError(
            f"{describe(node, values)} came out wrong in strategy {name!r}: {difference}. This is an error of widepack; please report it, or build with --strategy loop"
        )
    return made, name


def _run(w: ProgramWriter, node: Node, args: Any, kwargs: Any, choice: Choice | None) -> tuple[Any, str]:
    wides = wide_items([args, kwargs])
    if any(isinstance(x, Ragged) for x in wides):
        raise LoweringError(f"node {node.name} reads a Ragged value outside a loop region")
    if all(isinstance(x, Shared) for x in wides) and ops.pure(node.op, node.args, node.kwargs):
        return w.shared(w.call(node.op, *shared(args), **shared(kwargs))), "once"
    strategies = REGISTRY[node.op].strategies if node.op in REGISTRY else {}
    if choice is not None and choice.strategy in strategies and strategies[choice.strategy].when(w, *args, **kwargs):
        return strategies[choice.strategy].rule(w, *args, **kwargs), choice.strategy
    if choice is None or choice.strategy != "sequential":
        for s in strategies.values():
            if s.when(w, *args, **kwargs):
                return s.rule(w, *args, **kwargs), s.name
    return sequential(w, node.op, args, kwargs), "sequential"


def applicable(w: Writer, op: str, args: Any, kwargs: Any) -> list[Strategy]:
    """The op's strategies that apply to these arguments, in order."""
    return [s for s in REGISTRY[op].strategies.values() if s.when(w, *args, **kwargs)] if op in REGISTRY else []


def shared(args: Any) -> Any:
    """Arguments with Shared values unwrapped, tuples kept."""
    if isinstance(args, Shared):
        return args.value
    if isinstance(args, (list, tuple)):
        return [shared(a) for a in args]
    if isinstance(args, dict):
        return {k: shared(v) for k, v in args.items()}
    return args


def compare(made: Any, own: Any, members: int) -> str:
    """How the wide value differs from the member's own in rank, static sizes or dtype; empty when it does not."""
    if made is None or own is None or isinstance(made, Ragged):
        return ""
    if isinstance(made, tuple):
        return next((d for m, o in zip(made, own) if (d := compare(m, o, members))), "")
    held = made.value.held if isinstance(made.value, Value) else made.value
    if not isinstance(own, torch.Tensor) or not isinstance(held, torch.Tensor):
        return ""
    want = [known(s) for s in own.shape]
    have = [known(s) for s in held.shape]
    if isinstance(made, Stacked):
        if have[:1] != [members]:
            return f"the wide value is {type_of(held)}, its first axis is not the {members} members"
        have = have[1:]
    if held.dtype != own.dtype:
        return f"the wide value is {held.dtype}, the member's own {own.dtype}"
    if len(want) != len(have) or any(a != b for a, b in zip(want, have) if a is not None and b is not None):
        return f"the wide value is {type_of(held)}, the member's own {type_of(own)}"
    return ""


def describe(node: Node, values: Mapping[str, Any]) -> str:
    """A node for an error: name, op, what it reads, and the user's own line."""

    def word(x: Wide) -> str:
        held = x.value.held if isinstance(x, (Shared, Stacked)) and isinstance(x.value, Value) else None
        return f"{type(x).__name__} {type_of(held)}"

    read = ", ".join(word(x) for x in wide_items(substitute(list(node.args), values.__getitem__)))
    return f"node {node.name} ({node.op}) over {read or 'no values'}{f', from {node.source},' if node.source else ''}"
