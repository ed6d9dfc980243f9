"""Estimates how many terms sizes have once torch expands their expressions, before it does.

torch expands the expressions of sizes to compare them, and writes a dim as a number above its least size:
`B` becomes `x + 2`. A power of a sum, or of a dim, has few terms before, and millions after. So sizes of an
untrusted program are checked before an op reads them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from .encoding import iter_arguments
from .torch_internals import known_expression

MOST_TERMS = 500
"""The most terms of a size, and of the number of elements of a tensor."""
MOST_TOGETHER = 3000
"""The most terms of the product of all sizes that one op reads. torch took 20 s for as many."""
_MOST_REPEATS = 4
"""How often one size counts in such a product."""
_JOINS = frozenset({"aten.cat.default", "aten.stack.default"})
"""Ops that add sizes of their operands and do not multiply them."""


def is_large(expression: Any) -> bool:
    """Returns whether an expression has more than `MOST_TERMS` terms once it is expanded.

    The terms of all its parts count, such as those of the operands of a division.
    """
    return _terms(expression) > MOST_TERMS


def has_large(value: Any) -> bool:
    """Returns whether a number, or the product of the sizes of a tensor, has more than `MOST_TERMS` terms.

    value: a tensor, a number, or a list of these.
    """
    return any(_product(sizes) > MOST_TERMS for sizes in _sizes(value))


def reads_large(op: str, args: Any, kwargs: Any) -> bool:
    """Returns whether the sizes that an op reads have too many terms: those of one operand, or of all."""
    found = [sizes for value in (*args, *kwargs.values()) for sizes in _sizes(value, listed=True)]
    if any(_product(sizes) > MOST_TERMS for sizes in found):
        return True
    return op not in _JOINS and _product([s for sizes in found for s in sizes]) > MOST_TOGETHER


def _sizes(value: Any, listed: bool = False) -> Iterator[list[Any]]:
    """Yields the symbolic sizes of each tensor, and each number. listed: the numbers of a list together."""
    numbers = []
    for part in iter_arguments(value):
        if isinstance(part, torch.Tensor):
            sizes: list[Any] = list(part.shape)
            yield [known_expression(s) for s in sizes if isinstance(s, torch.SymInt)]
        elif isinstance(part, (torch.SymInt, torch.SymFloat)):
            numbers.append(known_expression(part))
    if listed:
        yield numbers
    else:
        yield from ([n] for n in numbers)


def _product(expressions: list[Any]) -> int:
    """Returns the number of terms of a product of expressions."""
    found = 1
    for expression, times in Counter(expressions).items():
        found *= _of_power(_terms(expression), min(times, _MOST_REPEATS))
        if found > MOST_TOGETHER:
            break
    return found


def _of_power(terms: int, exponent: int) -> int:
    """Returns the number of terms of a sum to a power."""
    return math.comb(terms + exponent - 1, exponent) if terms > 1 else 1


def _terms(expression: Any) -> int:
    """Returns the number of terms of an expanded expression, with those of its parts.

    Returns a number above `MOST_TOGETHER` where it is found to be too large, without counting further.
    """
    if not hasattr(expression, "args"):
        return 1
    order = [expression]
    for part in order:
        if len(order) > MOST_TERMS:
            return MOST_TOGETHER + 1
        order.extend(part.args)
    terms: dict[Any, int] = {}
    inner = 0
    for part in reversed(order):  # operands come after what reads them
        if part in terms:
            continue
        own = [terms[a] for a in part.args]
        if part.is_Symbol:
            terms[part] = 2
        elif part.is_Add:
            found = [n for n, a in zip(own, part.args) if not a.is_number]
            terms[part] = max(2, sum(found))  # a number joins the constant that a dim brings
        elif part.is_Mul:
            terms[part] = math.prod(own)
        elif part.is_Pow and part.exp.is_Integer:
            terms[part] = _of_power(own[0], abs(int(part.exp)))
        else:
            terms[part] = 1
            inner += sum(own)
        if terms[part] > MOST_TERMS or inner > MOST_TERMS:
            return MOST_TOGETHER + 1
    return terms[expression]
