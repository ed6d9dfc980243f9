"""Tests what is known of values of which masks are made."""

from __future__ import annotations

import pytest
import sympy
import torch

from widepack.costs.mask_data import known_of
from widepack.costs.mask_values import Constant, Mask, compared
from widepack.costs.pair_boxes import Box, Range
from widepack.costs.pair_regions import EVERYTHING, NOTHING


@pytest.mark.parametrize("number", [2.0, -100.0, 0.5])
def test_a_mask_never_equals_another_number_than_0_and_1(number: float) -> None:
    half = Mask((Box(keys=Range(None, sympy.Integer(4))),), (Box(keys=Range(None, sympy.Integer(4))),))
    for a, b in ((half, Constant(number)), (Constant(number), half)):
        equal, other = compared("eq", a, b), compared("ne", a, b)
        assert (equal.sure, equal.possible) == (NOTHING, NOTHING)
        assert (other.sure, other.possible) == (EVERYTHING, EVERYTHING)


def test_values_of_other_dtypes_and_layouts_are_not_masks() -> None:
    for value in (
        torch.zeros(3, 3).to(torch.float8_e4m3fn),
        torch.zeros(1).to(torch.float8_e4m3fn),
        torch.zeros(3, 3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ):
        assert known_of([value]) is None
