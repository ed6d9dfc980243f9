"""Compares the captures of two members, and describes where their programs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Ref, refs, substitute

from ..capture.capture import Captured
from ..checkpoints.differences import bit_equal


def difference(one: Captured, other: Captured, *, sizes: bool = False) -> str:
    """Returns how the program of another member differs from the captured one; "" if it does not.

    sizes: True allows integers, types and conditions to differ.
    """
    names: dict[str, str] = {}
    if words := _node_difference(one, other, names, sizes):
        return words
    if len(one.program.nodes) != len(other.program.nodes):
        return f"it has {len(other.program.nodes)} ops, the captured program {len(one.program.nodes)}"
    if words := _literal_tensor_difference(one, other):
        return words
    outputs = [replace(o, value=_under(o.value, names)) for o in other.program.outputs]
    if repr(list(one.program.outputs)) != repr(outputs) or repr(one.returned) != repr(other.returned):
        return f"it returns {other.returned}, the captured program {one.returned}"
    return "" if sizes else _interface_difference(one, other)


def _node_difference(one: Captured, other: Captured, names: dict[str, str], sizes: bool) -> str:
    """Returns how the first differing node differs.

    names: gets the names of the other's nodes in the captured program. The names may differ, because an op
    that changes its input in place may leave gaps in the numbering.
    """
    for x, y in zip(one.program.nodes, other.program.nodes):
        y = _renamed(y, names)
        where = f" ({y.source or x.source})" if y.source or x.source else ""
        if x.op != y.op:
            return f"it runs {y.op} where the captured program runs {x.op}{where}"
        if literal := _differing_literals(x, y, sizes):
            return f"{y.op}{where} has {literal[1]} in it, {literal[0]} in the captured program"
        if not sizes and x.out != y.out:
            return f"{y.op}{where} gives {y.out} in it, {x.out} in the captured program"
        names[y.name] = x.name
    return ""


def _literal_tensor_difference(one: Captured, other: Captured) -> str:
    """Returns how the first differing literal tensor differs."""
    ours, theirs = literals(one), literals(other)
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or not bit_equal(a, b):
            where = _first_read(other if b is not None else one, name)
            return (
                f"a tensor that the code makes of numbers{where} is {_tensor_text(b)} in it, "
                f"{_tensor_text(a)} in the captured program"
            )
    return ""


def _interface_difference(one: Captured, other: Captured) -> str:
    """Returns how weights, inputs, guards or dims differ."""

    def slots(which: Any) -> list[tuple[str, str]]:
        return [(s.source, s.type) for s in which]

    sides: list[tuple[str, Any, Any]] = [
        ("reads", slots(one.program.weights), slots(other.program.weights)),
        ("takes", one.signature, other.signature),
        ("takes", slots(one.program.inputs), slots(other.program.inputs)),
        ("holds under", sorted(str(g.expr) for g in one.guards), sorted(str(g.expr) for g in other.guards)),
        ("has dims", {d: v[:2] for d, v in one.dims.items()}, {d: v[:2] for d, v in other.dims.items()}),
    ]
    for what, mine, theirs in sides:
        if mine != theirs:
            return f"it {what} {_only_in(theirs, mine)}, the captured program {_only_in(mine, theirs)}"
    return ""


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Returns a node that reads values under other names."""
    return replace(node, args=_under(node.args, names), kwargs=_under(node.kwargs, names)) if names else node


def _under(value: Any, names: Mapping[str, str]) -> Any:
    return substitute(value, lambda n: Ref(names.get(n, n)))


def literals(captured: Captured) -> dict[str, torch.Tensor]:
    """Returns the literal tensors of a capture by name.

    The code makes them of Python numbers. No attribute has them, and all members share one.
    """
    return {n: value for n, (_, value) in captured.weights.items() if is_literal(n)}


def is_literal(name: str) -> bool:
    """Returns whether a weight's name is that of a literal tensor."""
    return name.rpartition(".")[2].startswith("lifted_tensor")


def _first_read(captured: Captured, weight: str) -> str:
    """Returns the user's line that reads a weight first, in brackets."""
    slot = next((s.name for s in captured.program.weights if s.source == weight), "")
    source = next((n.source for n in captured.program.nodes if slot in refs((n.args, n.kwargs))), "")
    return f" ({source})" if source else ""


def _only_in(mine: Any, theirs: Any) -> str:
    """Returns the text of what one side has and the other has not."""
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        mine = [m for m in mine if m not in theirs]
    return str(mine)[:200] if mine else "nothing of this"


def _tensor_text(value: torch.Tensor | None) -> str:
    if value is None:
        return "nothing"
    return str(value.tolist()) if value.numel() <= 8 else f"one of shape {list(value.shape)}"


def _operand_text(value: Any) -> str:
    return f"the value {value.name}" if isinstance(value, Ref) else repr(value)


def _differing_literals(x: Node, y: Node, sizes: bool) -> tuple[str, str] | None:
    """Returns the texts of the first literals in which two nodes differ; None if they are equal.

    Literals are compared as text: it tells 1, 1.0 and True apart, and NaN equals NaN.
    """

    def walk(a: Any, b: Any) -> tuple[str, str] | None:
        if (
            isinstance(a, (list, tuple))
            and isinstance(b, (list, tuple))
            and type(a) is type(b)
            and len(a) == len(b)
        ):
            return next((found for p, q in zip(a, b) if (found := walk(p, q))), None)
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            return next((found for k in a if (found := walk(a[k], b[k]))), None)
        if repr(a) == repr(b) or (sizes and type(a) is int and type(b) is int):
            return None
        if isinstance(a, Ref) or isinstance(b, Ref):
            return _operand_text(a), _operand_text(b)
        return repr(a), repr(b)

    return walk(list(x.args), list(y.args)) or walk(x.kwargs, y.kwargs)
