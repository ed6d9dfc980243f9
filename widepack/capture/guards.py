"""The conditions under which an export holds: torch's guards as arithmetic over named dims, each with the user's line that it comes from."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod
from torch.utils._sympy.printers import PythonPrinter

from widepack_artifacts.guards import Expr, holds, letters

from ..errors import CaptureError
from .explain import way_out
from .export_events import Seen

Axis = Mapping[int, str]  # axis -> "B" or "32*H"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a call: its name, type text, example, and which axes are dynamic."""

    name: str
    type: str
    example: torch.Tensor
    axes: Axis


@dataclass(frozen=True, slots=True)
class GuardSource:
    expr: Expr
    source: str


def factor_of(text: str) -> tuple[int, str]:
    head, _, tail = text.partition("*")
    return (int(head), tail) if tail else (1, head)


def guards_of(exported: torch.export.ExportedProgram, inputs: Sequence[Leaf], name: str, seen: Seen | None = None) -> tuple[GuardSource, ...]:
    """Every condition of the export as arithmetic over named dims. seen: what was watched of it. Raises: CaptureError for one that cannot be written so."""
    codes = getattr(exported, "_guards_code", None)
    if codes is None:
        raise CaptureError(f"torch {torch.__version__} does not tell under which conditions an export holds; widepack needs torch 2.11 or newer")
    return guards_from(codes, inputs, name, lines_of(seen, inputs) if seen else (), unwritable(seen, inputs) if seen else "")


def guards_from(
    codes: Sequence[str], inputs: Sequence[Leaf], name: str, sources: Sequence[GuardSource] = (), line: str = ""
) -> tuple[GuardSource, ...]:
    """Torch's conditions, as the text that it writes, as arithmetic over named dims. sources: conditions as they came up, with lines. line: of the first that is
    no such. Raises: CaptureError."""
    leaves = {leaf.name: leaf for leaf in inputs}
    made: dict[str, Expr] = {}
    for code in codes:
        try:
            expr = _expr(ast.parse(code.strip(), mode="eval").body, leaves)
        except (SyntaxError, ValueError) as e:
            raise CaptureError(
                f"{name} holds only while {code!r}, a condition that cannot be written as arithmetic over named dims ({e})"
                f"{f', at {line}' if line else ''}; change the member's code{way_out(line) or ': reckon with sizes in whole numbers, +, -, *, // and %'}"
            ) from e
        if isinstance(expr, bool) or (expr[0] in ("eq", "le", "ge") and expr[1] == expr[2]):
            if expr is False:
                raise CaptureError(f"{name}: the condition {code!r} does not hold for the example")
            continue
        if not always(expr):
            made.setdefault(str(expr), expr)
    return tuple(GuardSource(expr, _line_of(expr, sources)) for expr in made.values())


_SYMBOLIC: dict[str, Callable[..., Any]] = {
    "add": sympy.Add, "sub": lambda a, b: a - b, "mul": sympy.Mul, "floordiv": FloorDiv, "mod": Mod, "min": Min, "max": Max,
    "eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge, "and": sympy.And, "or": sympy.Or, "not": sympy.Not,
}  # fmt: skip  # a line a kind


def arithmetic(condition: Any, names: Mapping[str, Expr]) -> Expr:
    """A condition of torch's (sympy) over its own symbols. names: each symbol's. Raises: ValueError for what is no arithmetic."""
    try:
        return _expr(ast.parse(PythonPrinter().doprint(condition), mode="eval").body, {}, names)
    except (SyntaxError, TypeError) as e:
        raise ValueError(f"{condition} is no arithmetic over sizes") from e


def always(expr: Expr) -> bool:
    """Whether a condition provably holds at all sizes from 1, as `16 * B != 2 * B` and `7 * H // 7 == H` do: an export has many such."""

    def symbolic(e: Expr) -> Any:
        if isinstance(e, list):
            return _SYMBOLIC[e[0]](*map(symbolic, e[1:]))
        return sympy.Symbol(e, integer=True, positive=True) if isinstance(e, str) else sympy.Integer(e)

    try:
        return symbolic(expr) is sympy.true
    except (ValueError, TypeError, ArithmeticError, AssertionError):  # a zero that is divided by, or a form that sympy has not
        return False


def names_of(seen: Seen, inputs: Sequence[Leaf]) -> dict[str, Expr]:
    """Torch's names of sizes -> what the inputs call them: a letter, or a multiple of one."""
    leaves = {leaf.name: leaf for leaf in inputs}
    found: dict[str, Expr] = {}
    for symbol, place in seen.names.items():
        try:
            found[symbol] = _expr(ast.parse(place, mode="eval").body, leaves)
        except (SyntaxError, ValueError):
            continue  # a size of something that is no input
    return found


def place_of(symbol: str, seen: Seen) -> tuple[str, int] | None:
    """The input and the axis whose size torch calls so."""
    try:
        node = ast.parse(seen.names.get(symbol, ""), mode="eval").body
        return _place(node) if isinstance(node, ast.Subscript) else None
    except (SyntaxError, ValueError):
        return None


def unwritable(seen: Seen, inputs: Sequence[Leaf]) -> str:
    """The member's line of the first condition that is no arithmetic over named dims; empty where there is none."""
    names, printer = names_of(seen, inputs), PythonPrinter()
    for condition, line in seen.conditions:
        try:
            _expr(ast.parse(printer.doprint(condition), mode="eval").body, {}, names)
        except (SyntaxError, ValueError, TypeError):
            if line:
                return line
    return ""


def lines_of(seen: Seen, inputs: Sequence[Leaf]) -> list[GuardSource]:
    """The conditions as they came up in an export, each with the member's line; those that are no arithmetic over named dims are left out."""
    names, printer = names_of(seen, inputs), PythonPrinter()
    made: dict[str, GuardSource] = {}
    for condition, line in seen.conditions:
        if line and str(condition) not in made:
            try:
                expr = _expr(ast.parse(printer.doprint(condition), mode="eval").body, {}, names)
            except (SyntaxError, ValueError, TypeError):
                continue
            if not isinstance(expr, (bool, int)):
                made[str(condition)] = GuardSource(expr, line)
    return list(made.values())


def _line_of(expr: Expr, sources: Sequence[GuardSource]) -> str:
    """The line of the first condition that says the same. Torch writes a guard and the condition behind it differently: they are compared by what they say."""
    named = letters(expr)
    sides = [s for s in sources if letters(s.expr) == named]
    for s in sides:
        at = list(_points(expr, s.expr))
        truth = [holds(expr, sizes) for sizes in at]
        if not all(truth) and truth == [holds(s.expr, sizes) for sizes in at]:
            return s.source
    return ""


def _points(*exprs: Expr) -> Iterator[dict[str, int]]:
    """Sizes at which conditions are compared: small ones, and those around the numbers in them."""
    named = sorted({d for e in exprs for d in letters(e)})
    around = sorted({n + step for e in exprs for n in _numbers(e) for step in (-1, 0, 1) if 0 < n + step < 2**40})
    each = [*range(2, 34 if len(named) == 1 else 9 if len(named) == 2 else 5), *around][: 400 if len(named) == 1 else 24 if len(named) == 2 else 7]
    return (dict(zip(named, picked)) for picked in itertools.islice(itertools.product(each, repeat=len(named)), 600))


def _numbers(expr: Expr) -> set[int]:
    if isinstance(expr, list):
        return {n for part in expr[1:] for n in _numbers(part)}
    return {expr} if type(expr) is int else set()


def bound_line(letter: str, size: int, outside: int, conditions: Sequence[GuardSource]) -> str:
    """The line of the condition on one dim alone that holds at its bound and not outside it; empty where there is none."""
    alone = (c for c in conditions if c.source and letters(c.expr) == {letter})
    return next((c.source for c in alone if holds(c.expr, {letter: size}) and not holds(c.expr, {letter: outside})), "")


_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}


def _expr(node: ast.expr, leaves: Mapping[str, Leaf], names: Mapping[str, Expr] = MappingProxyType({})) -> Expr:
    """names: what stands for a bare name."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, bool)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return [_ARITHMETIC[type(node.op)], _expr(node.left, leaves, names), _expr(node.right, leaves, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", _expr(node.operand, leaves, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and type(node.operand.value) is int:
        return -node.operand.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["sub", 0, _expr(node.operand, leaves, names)]
    if isinstance(node, ast.BoolOp):
        parts = [_expr(v, leaves, names) for v in node.values]
        made = parts[0]
        for part in parts[1:]:
            made = ["and" if isinstance(node.op, ast.And) else "or", made, part]
        return made
    if isinstance(node, ast.Compare) and all(type(o) in _COMPARE for o in node.ops):
        sides = [_expr(v, leaves, names) for v in (node.left, *node.comparators)]
        pairs = [[_COMPARE[type(o)], a, b] for o, a, b in zip(node.ops, sides, sides[1:])]
        made = pairs[0]
        for pair in pairs[1:]:
            made = ["and", made, pair]
        return made
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "Max", "Min") and len(node.args) >= 2:
        first, *rest = (_expr(a, leaves, names) for a in node.args)
        for part in rest:
            first = [node.func.id.lower(), first, part]
        return first
    if isinstance(node, ast.Subscript):
        return _size_of(node, leaves)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic over sizes")


def _place(node: ast.Subscript) -> tuple[str, int]:
    """`L['x'].size()[1]` as the input's name and the axis; a nested input as `x.0`. Raises: ValueError."""
    call = node.value
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "size" and isinstance(node.slice, ast.Constant)
    ):
        raise ValueError(f"{ast.unparse(node)} is no size of an input")
    parts: list[str] = []
    at: ast.expr = call.func.value
    while isinstance(at, ast.Subscript):
        if not isinstance(at.slice, ast.Constant):
            raise ValueError(f"{ast.unparse(node)} is no size of an input")
        parts.insert(0, str(at.slice.value))
        at = at.value
    return ".".join(parts), int(str(node.slice.value))


def _size_of(node: ast.Subscript, leaves: Mapping[str, Leaf]) -> Expr:
    """The size of an input, nested ones too, as its letter."""
    name, axis = _place(node)
    leaf = leaves.get(name) or leaves.get(name.replace(".", "_")) or leaves.get(name.replace(".", "_", 1))  # *args: x_0, x_0.key
    if leaf is None:
        raise ValueError(f"{ast.unparse(node)} is of no input that is known")
    if axis not in leaf.axes:
        return int(leaf.example.shape[axis])
    factor, letter = factor_of(leaf.axes[axis])
    return letter if factor == 1 else ["mul", factor, letter]
