"""Evaluates formulas over sizes, such as `2*B*(T + 64)`, that come from a file. No code of the text runs.

A formula is whole numbers and names with `+ - * // %`, `**` with a small whole exponent, `min(...)` and
`max(...)`. Python parses the text, and every part must be in this list.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, reduce

from .errors import ArtifactError

Number = int | Fraction
_Compiled = Callable[[Mapping[str, Number]], Number]

MAX_TEXT = 200_000
MAX_DEPTH = 60
MAX_EXPONENT = 16
MAX_BITS = 4096
"""The most bits of a number in between: powers of powers would take all memory."""
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CHAINS: dict[type[ast.operator], Callable[[Sequence[Number]], Number]] = {
    ast.Add: sum,
    ast.Mult: lambda parts: reduce(lambda a, b: bounded(a * b), parts),
}
_CALLS: dict[str, Callable[[Sequence[Number]], Number]] = {"min": min, "max": max}


class Formula:
    """A formula that is ready to be evaluated. text: as it is written. names: those that it reads."""

    def __init__(self, text: str) -> None:
        """Reads a formula. Raises: ArtifactError for a text that is not one."""
        self.text = text
        names: set[str] = set()
        self._compiled = _compile(_parsed(text), names, 0)
        self.names = frozenset(names)

    def at(self, values: Mapping[str, Number]) -> Number:
        """Returns the value at these sizes: an integer where it is whole.

        Raises: ArtifactError if the formula divides by zero or reads a name without a value.
        """
        try:
            found = self._compiled(values)
        except ZeroDivisionError:
            raise ArtifactError(f"the formula {self.text[:200]} divides by zero at these sizes") from None
        except KeyError as e:
            raise ArtifactError(f"the formula {self.text[:200]} needs a value of {e.args[0]}") from None
        return found.numerator if found.denominator == 1 else found


@lru_cache(maxsize=65536)
def formula(text: str) -> Formula:
    """Returns the formula of a text; equal texts give one object. Raises: ArtifactError."""
    return Formula(text)


def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_TEXT:
        raise ArtifactError(f"a formula of {len(text):,} characters; the limit is {MAX_TEXT:,}")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text) from None


def _refused(text: str) -> ArtifactError:
    return ArtifactError(
        f"{text[:80]!r} is not a formula: whole numbers and names with + - * // %, ** and min, max"
    )


def _compile(node: ast.expr, names: set[str], depth: int) -> _Compiled:
    """Returns a function that computes a part of a formula. names: gets the names that it reads."""
    if depth > MAX_DEPTH:
        raise ArtifactError(f"a formula is nested over {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
        return lambda values: number
    if isinstance(node, ast.Name):
        name = node.id
        names.add(name)
        return lambda values: values[name]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _compile(node.operand, names, depth + 1)
        return lambda values: -inner(values)
    if isinstance(node, ast.BinOp):
        return _compile_binary(node, names, depth)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        if not node.args or node.keywords:
            raise _refused(ast.unparse(node))
        return _joined(_CALLS[node.func.id], [_compile(a, names, depth + 1) for a in node.args])
    raise _refused(ast.unparse(node))


def _compile_binary(node: ast.BinOp, names: set[str], depth: int) -> _Compiled:
    kind = type(node.op)
    if kind in _CHAINS:
        return _joined(_CHAINS[kind], [_compile(n, names, depth + 1) for n in _chain(node, kind)])
    if kind is ast.Pow:
        exponent = node.right.value if isinstance(node.right, ast.Constant) else None
        if type(exponent) is not int or not 0 <= exponent <= MAX_EXPONENT:
            raise _refused(ast.unparse(node))
        power = exponent
        base = _compile(node.left, names, depth + 1)
        return lambda values: _raised(base(values), power)
    if kind not in _BINARY:
        raise _refused(ast.unparse(node))
    op = _BINARY[kind]
    left, right = _compile(node.left, names, depth + 1), _compile(node.right, names, depth + 1)
    return lambda values: op(left(values), right(values))


def bounded(number: Number) -> Number:
    """Returns a number. Raises: ArtifactError if it has more than `MAX_BITS` bits."""
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise ArtifactError(f"a formula gives a number of over {MAX_BITS} bits")
    return number


def _raised(base: Number, power: int) -> Number:
    found: Number = 1
    for _ in range(power):
        found = bounded(found * base)
    return found


def _chain(node: ast.expr, kind: type[ast.operator]) -> list[ast.expr]:
    """Returns the parts of `a + b + c`, which Python reads as `(a + b) + c`, without recursion."""
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and type(node.op) is kind:
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _joined(op: Callable[[Sequence[Number]], Number], parts: Sequence[_Compiled]) -> _Compiled:
    if len(parts) == 2:
        first, second = parts
        return lambda values: op((first(values), second(values)))
    return lambda values: op([part(values) for part in parts])
