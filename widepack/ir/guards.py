"""Converts conditions over named dims from sympy or Python text to the arithmetic of guards."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod
from torch.utils._sympy.printers import PythonPrinter

from widepack_artifacts.guards import Expr

Axis = Mapping[int, str]  # axis -> "B" or "32*H"


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One tensor of a call: its name, type text, example, and which axes are dynamic."""

    name: str
    type: str
    example: torch.Tensor
    axes: Axis


def factor_of(text: str) -> tuple[int, str]:
    """`32*H` as its factor and its dim: (32, "H"). `B` has the factor 1."""
    head, _, tail = text.partition("*")
    return (int(head), tail) if tail else (1, head)


_SYMBOLIC: dict[str, Callable[..., Any]] = {
    "add": sympy.Add,
    "sub": lambda a, b: a - b,
    "mul": sympy.Mul,
    "floordiv": FloorDiv,
    "mod": Mod,
    "min": Min,
    "max": Max,
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
    "and": sympy.And,
    "or": sympy.Or,
    "not": sympy.Not,
}


def arithmetic(condition: Any, names: Mapping[str, Expr]) -> Expr:
    """A sympy condition over torch's symbols as arithmetic.

    names: the dim of each symbol. Raises: ValueError if it is none.
    """
    try:
        return expression(ast.parse(PythonPrinter().doprint(condition), mode="eval").body, {}, names)
    except (SyntaxError, TypeError) as e:
        raise ValueError(f"{condition} is not arithmetic over sizes") from e


def always(expr: Expr) -> bool:
    """Whether a condition provably holds at all sizes of at least 1, as `16 * B != 2 * B` does.

    An export has many of these.
    """

    def symbolic(e: Expr) -> Any:
        if isinstance(e, list):
            return _SYMBOLIC[e[0]](*map(symbolic, e[1:]))
        return sympy.Symbol(e, integer=True, positive=True) if isinstance(e, str) else sympy.Integer(e)

    try:
        return symbolic(expr) is sympy.true
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        AssertionError,
    ):  # a division by zero, or a form that sympy does not have
        return False


_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_EXTREMES = {
    "max": "max",
    "min": "min",
    "Max": "max",
    "Min": "min",
    "torch.sym_max": "max",
    "torch.sym_min": "min",
}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}


def expression(
    node: ast.expr, leaves: Mapping[str, InputLeaf], names: Mapping[str, Expr] = MappingProxyType({})
) -> Expr:
    """A condition in Python as arithmetic.

    leaves: the inputs. names: the meaning of a bare name. Raises: ValueError.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, bool)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return [
            _ARITHMETIC[type(node.op)],
            expression(node.left, leaves, names),
            expression(node.right, leaves, names),
        ]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", expression(node.operand, leaves, names)]
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and type(node.operand.value) is int
    ):
        return -node.operand.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["sub", 0, expression(node.operand, leaves, names)]
    if isinstance(node, ast.BoolOp):
        parts = [expression(v, leaves, names) for v in node.values]
        made = parts[0]
        for part in parts[1:]:
            made = ["and" if isinstance(node.op, ast.And) else "or", made, part]
        return made
    if isinstance(node, ast.Compare) and all(type(o) in _COMPARE for o in node.ops):
        sides = [expression(v, leaves, names) for v in (node.left, *node.comparators)]
        pairs = [[_COMPARE[type(o)], a, b] for o, a, b in zip(node.ops, sides, sides[1:])]
        made = pairs[0]
        for pair in pairs[1:]:
            made = ["and", made, pair]
        return made
    if isinstance(node, ast.Call) and (name := _EXTREMES.get(ast.unparse(node.func))) and len(node.args) >= 2:
        first, *rest = (expression(a, leaves, names) for a in node.args)
        for part in rest:
            first = [name, first, part]
        return first
    if isinstance(node, ast.Subscript):
        return _size_of(node, leaves)
    raise ValueError(f"{ast.unparse(node)} is not arithmetic over sizes")


def subscript_place(node: ast.Subscript) -> tuple[str, int]:
    """`L['x'].size()[1]` as the name of the input and the axis.

    A nested input is `x.0`. Raises: ValueError.
    """
    call = node.value
    if not (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "size"
        and isinstance(node.slice, ast.Constant)
    ):
        raise ValueError(f"{ast.unparse(node)} is not a size of an input")
    parts: list[str] = []
    at: ast.expr = call.func.value
    while isinstance(at, (ast.Subscript, ast.Attribute)):
        if isinstance(at, ast.Attribute):  # a field of a named tuple or of a registered class
            parts.insert(0, at.attr)
            at = at.value
            continue
        if not isinstance(at.slice, ast.Constant):
            raise ValueError(f"{ast.unparse(node)} is not a size of an input")
        parts.insert(0, str(at.slice.value))
        at = at.value
    return ".".join(parts), int(str(node.slice.value))


def _size_of(node: ast.Subscript, leaves: Mapping[str, InputLeaf]) -> Expr:
    """The size of an input, also of a nested one, as its dim."""
    name, axis = subscript_place(node)
    leaf = (
        leaves.get(name) or leaves.get(name.replace(".", "_")) or leaves.get(name.replace(".", "_", 1))
    )  # *args: x_0, x_0.key
    if leaf is None:
        raise ValueError(f"{ast.unparse(node)} belongs to an unknown input")
    if axis not in leaf.axes:
        return int(leaf.example.shape[axis])
    factor, letter = factor_of(leaf.axes[axis])
    return letter if factor == 1 else ["mul", factor, letter]
