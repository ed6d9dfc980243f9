"""Tests the text of long formulas: readers allow a formula a nesting of 60."""

from __future__ import annotations

import sympy
import torch

from widepack.costs.expressions import SizeSymbols
from widepack_artifacts.formulas import Formula


def test_sums_of_many_negative_terms_are_not_nested() -> None:
    size = sympy.Symbol("T", integer=True, positive=True)
    total = sympy.Add(*((-1) ** n * (n + 2) * sympy.Max(0, size - n) for n in range(150)))
    wanted = sum((-1) ** n * (n + 2) * max(0, 40 - n) for n in range(150))
    text = SizeSymbols({}, torch.float32).text(total)
    for formula in (text, f"7*({text})"):
        assert Formula(formula).at({"T": 40}) == wanted * (7 if formula.startswith("7") else 1)
    assert Formula(SizeSymbols({}, torch.float32).text(-total)).at({"T": 40}) == -wanted
