"""Values that the members' code reads from their weights, so that the programs hold for these values only.

In JSON an expression is the name of a weight, whose value is read, or `[op, argument, ...]`, whose result is
read: `["bool", ["gt", "scale", 0]]`. An argument is an expression or a number. The terms are limited.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .fields import manifest_error, read_name, read_text

Expression = Any  # str | tuple of an op and expressions or numbers: mypy has no recursive tuple

CASTS = ("bool", "int64", "float32", "float64")
_UNARY = (
    *("abs", "all", "any", "bitwise_not", "count_nonzero", "exp", "isfinite", "isinf", "isnan", "log"),
    *("logical_not", "max", "mean", "min", "neg", "sqrt", "square", "sum"),
)
_SIGNS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "bitwise_and": "&",
    "bitwise_or": "|",
}
ARITY = {**dict.fromkeys((*CASTS, *_UNARY), 1), **dict.fromkeys(_SIGNS, 2), "logical_and": 2, "logical_or": 2}
"""The number of arguments of each op. Ops of one argument are of all numbers of a weight."""
MAX_TERMS = 64
MAX_DEPTH = 16


class Literal(NamedTuple):
    """What the members' code reads from their weights. `line` is the user's line, for people."""

    expression: Expression
    line: str

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights."""
        return tuple(dict.fromkeys(_names(self.expression)))

    @property
    def text(self) -> str:
        """The expression in Python's notation: `scale > 0`, `(mask != 0).any()`."""
        found = self.expression
        return _text(found[1] if isinstance(found, tuple) and found[0] == "bool" else found)

    def renamed(self, names: dict[str, str]) -> Literal:
        """Returns the literal with other names of its weights."""
        return Literal(_renamed(self.expression, names), self.line)

    def to_json(self) -> list[Any]:
        return [self.expression, self.line]


def read_literal(value: Any, where: str) -> Literal:
    """Reads `[expression, line]`. Raises: ArtifactError."""
    if not isinstance(value, list) or len(value) != 2:
        raise manifest_error(f"{where}: expected [expression, line], got {str(value)[:60]}")
    literal = Literal(_read(value[0], where, [MAX_TERMS], 0), read_text(value[1], where))
    if not literal.weights:
        raise manifest_error(f"{where}: {str(value[0])[:60]} names no weight")
    return literal


def fits(expression: Expression) -> bool:
    """Whether an expression is within the limits of the format."""
    return _terms(expression) <= MAX_TERMS and _depth(expression) <= MAX_DEPTH


def _read(value: Any, where: str, budget: list[int], depth: int) -> Expression:
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        raise manifest_error(f"{where}: an expression of over {MAX_TERMS} terms, or over {MAX_DEPTH} deep")
    if isinstance(value, str):
        return read_name(value, where)
    if (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value)):
        return value
    op = value[0] if isinstance(value, list) and value else None
    if isinstance(op, str) and len(value) == 1 + ARITY.get(op, -1):
        return (op, *(_read(part, where, budget, depth + 1) for part in value[1:]))
    raise manifest_error(f"{where}: {str(value)[:60]} is not an expression over weights")


def _names(expression: Expression) -> list[str]:
    if isinstance(expression, tuple):
        return [name for part in expression[1:] for name in _names(part)]
    return [expression] if isinstance(expression, str) else []


def _terms(expression: Expression) -> int:
    return 1 + sum(map(_terms, expression[1:])) if isinstance(expression, tuple) else 1


def _depth(expression: Expression) -> int:
    return 1 + max(map(_depth, expression[1:])) if isinstance(expression, tuple) else 0


def _renamed(expression: Expression, names: dict[str, str]) -> Expression:
    if isinstance(expression, tuple):
        return (expression[0], *(_renamed(part, names) for part in expression[1:]))
    return names[expression] if isinstance(expression, str) else expression


def _text(expression: Expression) -> str:
    if not isinstance(expression, tuple):
        return str(expression)
    op, *arguments = expression
    parts = [f"({_text(a)})" if isinstance(a, tuple) and a[0] in _SIGNS else _text(a) for a in arguments]
    if op in _SIGNS:
        return f"{parts[0]} {_SIGNS[op]} {parts[1]}"
    return f"{parts[0]}.{op}({', '.join(parts[1:])})"
