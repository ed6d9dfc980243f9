"""Adds formulas up and writes the sum as one formula, without a computer algebra system.

A formula is expanded into terms: a whole number times powers of names. A part that is no sum, product or
power (`H // 2`, `max(1, T)`) counts as a name. Common factors are written in front: `2*B*T*(T + 64)`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from .formulas import MAX_EXPONENT, bounded, formula

Monomial = tuple[tuple[str, int], ...]  # name -> power, sorted by name
Terms = dict[Monomial, int]

_MOST_TERMS = 2000
"""A formula of more terms is not expanded."""


def added(texts: Iterable[str]) -> str:
    """Returns the sum of formulas as one formula. Raises: ArtifactError for a text that is not a formula."""
    counted: dict[str, int] = {}
    for text in texts:
        counted[text] = counted.get(text, 0) + 1
    total: Terms = {}
    for text, times in counted.items():
        _add(total, _expanded(text), times)
    return written(total)


def written(terms: Mapping[Monomial, int]) -> str:
    """Returns terms as a formula, with common factors in front."""
    kept = {m: n for m, n in terms.items() if n}
    if not kept:
        return "0"
    number = math.gcd(*kept.values())
    powers = [dict(m) for m in kept]
    common = {name: least for name in powers[0] if (least := min(p.get(name, 0) for p in powers))}
    rest = {
        tuple((n, p - common.get(n, 0)) for n, p in m if p > common.get(n, 0)): coefficient // number
        for m, coefficient in kept.items()
    }
    front = [str(number)] if number != 1 else []
    front += [_power(name, power) for name, power in sorted(common.items())]
    if len(rest) == 1:
        ((_, sign),) = rest.items()
        return ("-" if sign < 0 else "") + ("*".join(front) or "1")
    inner = _sum(rest)
    return f"{'*'.join(front)}*({inner})" if front else inner


def _sum(terms: Mapping[Monomial, int]) -> str:
    order = sorted(terms.items(), key=lambda row: (-sum(p for _, p in row[0]), row[0]))
    text = ""
    for monomial, number in order:
        factors = [_power(n, p) for n, p in monomial]
        if abs(number) != 1 or not factors:
            factors.insert(0, str(abs(number)))
        sign = ("-" if number < 0 else "") if not text else (" - " if number < 0 else " + ")
        text += sign + "*".join(factors)
    return text


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}**{power}"


def _add(into: Terms, terms: Mapping[Monomial, int], times: int = 1) -> None:
    for monomial, number in terms.items():
        into[monomial] = into.get(monomial, 0) + number * times


@lru_cache(maxsize=16384)
def _expanded(text: str) -> Terms:
    formula(text)  # refuses what is no formula
    return _terms(ast.parse(text, mode="eval").body)


def _terms(node: ast.expr) -> Terms:
    """Returns the terms of a part of a formula."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return {(): node.value}
    if isinstance(node, ast.UnaryOp):
        return {m: -n for m, n in _terms(node.operand).items()}
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Add, ast.Sub)):
            found = dict(_terms(node.left))
            _add(found, _terms(node.right), -1 if isinstance(node.op, ast.Sub) else 1)
            return found
        if isinstance(node.op, ast.Mult):
            return _product(_terms(node.left), _terms(node.right))
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant):
            return _raised(_terms(node.left), node.right.value)
    return {((_name(node), 1),): 1}


def _raised(terms: Terms, power: object) -> Terms:
    found: Terms = {(): 1}
    for _ in range(power if isinstance(power, int) and power <= MAX_EXPONENT else 0):
        found = _product(found, terms)
    return found


def _product(a: Terms, b: Terms) -> Terms:
    if len(a) * len(b) > _MOST_TERMS:
        parts = sorted([f"({_sum(a)})", f"({_sum(b)})"])
        return {tuple((p, 1) for p in parts): 1}
    found: Terms = {}
    for left, n in a.items():
        for right, k in b.items():
            powers = dict(left)
            for name, power in right:
                powers[name] = powers.get(name, 0) + power
            monomial = tuple(sorted(powers.items()))
            found[monomial] = found.get(monomial, 0) + int(bounded(n * k))
    return found


def _name(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Call)) else f"({text})"
