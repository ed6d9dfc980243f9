"""Checks, evaluates and prints guards: conditions over named dims under which a program is valid.

In JSON an expression is an integer, a dim's name, or `[op, left, right]`: `["le", "T", 512]`, `["eq", ["mod",
"H", 32], 0]`, `["and", g, g]`, `["not", g]`. Evaluation runs no code of the file, and it always ends: the
number of terms is limited, integers are checked, and a guard that divides by zero fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ArtifactError, some

Expr = Any  # int | str | list: JSON has no recursive type

_BINARY: dict[str, tuple[str, Callable[[int, int], int | bool]]] = {
    "add": ("+", lambda a, b: a + b),
    "sub": ("-", lambda a, b: a - b),
    "mul": ("*", lambda a, b: a * b),
    "floordiv": ("//", lambda a, b: a // b),
    "mod": ("%", lambda a, b: a % b),
    "min": ("min", min),
    "max": ("max", max),
    "eq": ("==", lambda a, b: a == b),
    "ne": ("!=", lambda a, b: a != b),
    "lt": ("<", lambda a, b: a < b),
    "le": ("<=", lambda a, b: a <= b),
    "gt": (">", lambda a, b: a > b),
    "ge": (">=", lambda a, b: a >= b),
    "and": ("and", lambda a, b: bool(a) and bool(b)),
    "or": ("or", lambda a, b: bool(a) or bool(b)),
}
OPS = (*_BINARY, "not")
MAX_TERMS = 1000
_LIMIT = 2**63


def check(expr: Expr, dims: Mapping[str, Any]) -> None:
    """Refuses an expression that is malformed, too large, or names an unknown dim. Raises: ArtifactError."""
    budget = [MAX_TERMS]

    def walk(e: Expr, depth: int) -> None:
        budget[0] -= 1
        if budget[0] < 0 or depth > 64:
            raise ArtifactError(f"guard: an expression of over {MAX_TERMS} terms, or nested over 64 deep")
        if isinstance(e, str):
            if e not in dims:
                raise ArtifactError(f"guard: the dim {e[:60]!r} is not one of {some(d[:60] for d in dims)}")
        elif isinstance(e, list) and e and e[0] in OPS and len(e) == (2 if e[0] == "not" else 3):
            for part in e[1:]:
                walk(part, depth + 1)
        elif type(e) is not int or abs(e) >= _LIMIT:
            raise ArtifactError(f"guard: {str(e)[:60]!r} is not an expression")

    walk(expr, 0)


def evaluate(expr: Expr, dims: Mapping[str, int]) -> int | bool:
    """Returns the value of an expression at these sizes.

    Raises: ZeroDivisionError; OverflowError beyond 64 bits.
    """
    if isinstance(expr, int):
        return expr
    if isinstance(expr, str):
        return dims[expr]
    if expr[0] == "not":
        return not evaluate(expr[1], dims)
    value = _BINARY[expr[0]][1](evaluate(expr[1], dims), evaluate(expr[2], dims))
    if abs(value) >= _LIMIT:
        raise OverflowError("a guard's value is outside 64 bits")
    return value


def holds(expr: Expr, dims: Mapping[str, int]) -> bool:
    """Returns whether a guard is true at these sizes. A guard that cannot be evaluated is false."""
    try:
        return bool(evaluate(expr, dims))
    except (ZeroDivisionError, OverflowError):
        return False


def of_small_sizes(expr: Expr) -> bool:
    """Returns whether a guard only excludes the values 0 and 1, for example `T // 2 != 1` or `B * T >= 2`."""
    if not isinstance(expr, list) or len(expr) != 3:
        return False
    op, left, right = expr
    if op == "ne":
        return (right if isinstance(right, int) else left if isinstance(left, int) else 0) in (0, 1)
    return (op, right) in (("ge", 1), ("ge", 2), ("gt", 0), ("gt", 1)) or (op, left) in (
        ("le", 1),
        ("le", 2),
        ("lt", 0),
        ("lt", 1),
    )


def letters(expr: Expr) -> set[str]:
    """Returns the dims that an expression names."""
    if isinstance(expr, list):
        return {name for part in expr[1:] for name in letters(part)}
    return {expr} if isinstance(expr, str) else set()


_BINDS = {"mul": 3, "floordiv": 3, "mod": 3, "add": 2, "sub": 2, "and": 0, "or": 0}  # comparisons bind with 1


def text(expr: Expr) -> str:
    """Returns the expression in Python's notation: `T <= 512`, `H % 32 == 0`, `T % (2 * H) == 0`."""
    return _text(expr, -1)


def _text(expr: Expr, around: int) -> str:
    """Writes an expression, in parentheses unless it binds more tightly than the expression around it
    (`around`).
    """
    if not isinstance(expr, list):
        return str(expr)
    if expr[0] == "not":
        words = f"not {_text(expr[1], 4)}"
        return f"({words})" if around >= 1 else words
    symbol = _BINARY[expr[0]][0]
    if symbol in ("min", "max"):
        return f"{symbol}({_text(expr[1], -1)}, {_text(expr[2], -1)})"
    binds = _BINDS.get(expr[0], 1)
    left = _text(
        expr[1], binds if binds == 1 else binds - 1
    )  # a left side of equal strength needs none: a * b % c
    joined = f"{left} {symbol} {_text(expr[2], binds)}"
    return f"({joined})" if binds <= around else joined
