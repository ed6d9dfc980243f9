"""Converts conditions over named dims from sympy or Python text to the arithmetic of guards."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
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


_LARGEST_SIZE = 2**31


def ratio_of(number: float) -> Fraction | None:
    """Returns the ratio a / b for which `n * a // b` is `math.floor(n * number)`, and `-(-n * a // b)` is
    `math.ceil(n * number)`, at all sizes n. None if there is none, as for 0.7: 10 * 0.7 is 7.0, but 170 *
    0.7 is 118.99999999999999.
    """
    if not 0 < number < _LARGEST_SIZE:
        return None
    exact = Fraction(number)
    if exact.numerator * _LARGEST_SIZE <= 2**53:  # no product is rounded
        return exact
    # A product that is not whole is at least 1/1000 away from a whole number. One that is whole for the ratio
    # must be rounded to it, and half a unit in the last place is at least 2**-54 of it.
    ratio = exact.limit_denominator(1000)
    near = ratio > 0 and number < 2**10 and abs(exact / ratio - 1) * 2**54 <= 1
    return ratio if near else None


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
    # a division by zero, or a form that sympy does not have
    except (ValueError, TypeError, ArithmeticError, AssertionError):
        return False


_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_EXTREMES = {form.format(m): m for m in ("max", "min") for form in ("{}", "torch.sym_{}")}
_EXTREMES |= {"Max": "max", "Min": "min"}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}


def expression(
    node: ast.expr, leaves: Mapping[str, InputLeaf], names: Mapping[str, Expr] = MappingProxyType({})
) -> Expr:
    """A condition in Python as arithmetic.

    leaves: the inputs. names: the meaning of a bare name. Raises: ValueError.
    """

    def of(part: ast.expr) -> Expr:
        return expression(part, leaves, names)

    def joined(word: str, parts: Sequence[Expr]) -> Expr:
        return functools.reduce(lambda a, b: [word, a, b], parts)

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, bool)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return [_ARITHMETIC[type(node.op)], of(node.left), of(node.right)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", of(node.operand)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = of(node.operand)
        return -value if type(value) is int else ["sub", 0, value]
    if isinstance(node, ast.BoolOp):
        return joined("and" if isinstance(node.op, ast.And) else "or", [of(v) for v in node.values])
    if isinstance(node, ast.Compare) and all(type(o) in _COMPARE for o in node.ops):
        sides = [of(v) for v in (node.left, *node.comparators)]
        return joined("and", [[_COMPARE[type(o)], a, b] for o, a, b in zip(node.ops, sides, sides[1:])])
    if isinstance(node, ast.Call) and (name := _EXTREMES.get(ast.unparse(node.func))) and len(node.args) >= 2:
        return joined(name, [of(a) for a in node.args])
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
        elif isinstance(at.slice, ast.Constant):
            parts.insert(0, str(at.slice.value))
        else:
            raise ValueError(f"{ast.unparse(node)} is not a size of an input")
        at = at.value
    return ".".join(parts), int(str(node.slice.value))


def _size_of(node: ast.Subscript, leaves: Mapping[str, InputLeaf]) -> Expr:
    """The size of an input, also of a nested one, as its dim."""
    name, axis = subscript_place(node)
    names = name, name.replace(".", "_"), name.replace(".", "_", 1)  # *args: x_0, x_0.key
    leaf = next((leaves[n] for n in names if n in leaves), None)
    if leaf is None:
        raise ValueError(f"{ast.unparse(node)} belongs to an unknown input")
    if axis not in leaf.axes:
        return int(leaf.example.shape[axis])
    factor, letter = factor_of(leaf.axes[axis])
    return letter if factor == 1 else ["mul", factor, letter]
