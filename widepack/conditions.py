"""The conditions under which an export holds: torch's guards as arithmetic over named dims, each with the user's line that it comes from."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from widepack_artifacts.guards import Expr

from .errors import CaptureError
from .explain import user_frame

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


def guards_of(exported: torch.export.ExportedProgram, inputs: Sequence[Leaf], name: str) -> tuple[GuardSource, ...]:
    """Every condition of the export as arithmetic over named dims. Raises: CaptureError for one that cannot be written so."""
    codes = getattr(exported, "_guards_code", None)
    if codes is None:
        raise CaptureError(f"torch {torch.__version__} does not tell under which conditions an export holds; widepack needs torch 2.11 or newer")
    return guards_from(codes, inputs, name, _guard_sources(exported))


def guards_from(codes: Sequence[str], inputs: Sequence[Leaf], name: str, sources: Sequence[tuple[set[str], str]] = ()) -> tuple[GuardSource, ...]:
    """Torch's conditions, as the text that it writes, as arithmetic over named dims. sources: the numbers in a condition, and its line. Raises: CaptureError."""
    leaves = {leaf.name: leaf for leaf in inputs}
    made: dict[str, GuardSource] = {}
    for code in codes:
        try:
            expr = _expr(ast.parse(code.strip(), mode="eval").body, leaves)
        except (SyntaxError, ValueError) as e:
            raise CaptureError(
                f"{name} holds only while {code!r}, a condition that cannot be written as arithmetic over named dims ({e}); change the member's code"
            ) from e
        if isinstance(expr, bool) or (expr[0] in ("eq", "le", "ge") and expr[1] == expr[2]):
            if expr is False:
                raise CaptureError(f"{name}: the condition {code!r} does not hold for the example")
            continue
        numbers = set(re.findall(r"(?<![a-z\[\d])\d+(?![\]\d])", code))
        made.setdefault(str(expr), GuardSource(expr, next((where for found, where in sources if found - {"0", "1"} and found <= numbers), "")))
    return tuple(made.values())


def _conditions(exported: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """Each condition of the shape environment, and the user's line that it comes from; those that torch's own code made are left out."""
    values = [n.meta.get("val") for n in exported.graph.nodes if n.op == "placeholder"]
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    if not modes or modes[0].shape_env is None:
        return []
    rows = []
    for guard in modes[0].shape_env.guards:
        frame = getattr(guard.sloc, "framework_loc", None)
        name = getattr(frame, "filename", "") or ""
        if frame is not None and name and not name.startswith(str(Path(torch.__file__).parent)):
            rows.append((str(guard.expr), f"{Path(name).name}:{frame.lineno} in {frame.name}{f': {frame.line}' if frame.line else ''}"))
    return rows


def _guard_sources(exported: torch.export.ExportedProgram) -> list[tuple[set[str], str]]:
    """The numbers in each condition, and its line: torch writes a guard and the condition behind it differently, but with the same numbers."""
    return [(set(re.findall(r"(?<![a-z\d])\d+", expr)), where) for expr, where in _conditions(exported)]


@contextmanager
def specializations() -> Iterator[dict[int, str]]:
    """While an export runs: size -> the user's line at which a dynamic dim became that size. torch keeps its own line only, so the moment itself is watched."""
    lines: dict[int, str] = {}
    original = getattr(ShapeEnv, "_set_replacement", None)
    if original is None:  # another torch: the error then names the size without the line
        yield lines
        return

    def watch(self: ShapeEnv, symbol: Any, target: Any, *rest: Any) -> Any:
        if target.is_number:
            lines.setdefault(int(target), user_frame(traceback.extract_stack()))
        return original(self, symbol, target, *rest)

    ShapeEnv._set_replacement = watch  # type: ignore[method-assign, assignment]
    try:
        yield lines
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]


_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}


def _expr(node: ast.expr, leaves: Mapping[str, Leaf]) -> Expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, bool)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return [_ARITHMETIC[type(node.op)], _expr(node.left, leaves), _expr(node.right, leaves)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", _expr(node.operand, leaves)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["sub", 0, _expr(node.operand, leaves)]
    if isinstance(node, ast.BoolOp):
        parts = [_expr(v, leaves) for v in node.values]
        made = parts[0]
        for part in parts[1:]:
            made = ["and" if isinstance(node.op, ast.And) else "or", made, part]
        return made
    if isinstance(node, ast.Compare) and all(type(o) in _COMPARE for o in node.ops):
        sides = [_expr(v, leaves) for v in (node.left, *node.comparators)]
        pairs = [[_COMPARE[type(o)], a, b] for o, a, b in zip(node.ops, sides, sides[1:])]
        made = pairs[0]
        for pair in pairs[1:]:
            made = ["and", made, pair]
        return made
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "Max", "Min") and len(node.args) >= 2:
        first, *rest = (_expr(a, leaves) for a in node.args)
        for part in rest:
            first = [node.func.id.lower(), first, part]
        return first
    if isinstance(node, ast.Subscript):
        return _size_of(node, leaves)
    raise ValueError(f"{ast.unparse(node)} is no arithmetic over sizes")


def _size_of(node: ast.Subscript, leaves: Mapping[str, Leaf]) -> Expr:
    """`L['x'].size()[1]`, also of a nested input, as its letter."""
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
    leaf = (
        leaves.get(".".join(parts)) or leaves.get("_".join(parts)) or leaves.get(".".join(["_".join(parts[:2]), *parts[2:]]))
    )  # *args: x_0, x_0.key
    axis = int(str(node.slice.value))
    if leaf is None:
        raise ValueError(f"{ast.unparse(node)} is of no input that is known")
    if axis not in leaf.axes:
        return int(leaf.example.shape[axis])
    factor, letter = factor_of(leaf.axes[axis])
    return letter if factor == 1 else ["mul", factor, letter]
