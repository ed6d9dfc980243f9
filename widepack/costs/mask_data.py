"""Finds out what the data of a weight are as a mask: which pairs of query and key they allow or forbid.

The weight is a buffer such as `torch.tril(torch.ones(L, L))`. Values of all members become a mask or a bias
with regions of pairs (`data_regions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from .data_regions import region_of
from .mask_values import FORBIDS, Bias, Constant, Known, Mask

MOST_ELEMENTS = 2**24
"""The most elements of a weight whose data are read as a mask."""
_MOST_ADDED = 1e3
"""The largest absolute value of a bias where it forbids nothing. `FORBIDS` is far below."""
_SAMPLE = 4096
"""The elements that are looked at first: most weights are no masks."""


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = frozenset({torch.bool, *_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The dtypes that masks have. torch does not compare numbers of 8-bit float dtypes."""


def known_of(members: Iterable[Tensor]) -> Known:
    """Returns what is known of a weight from its data.

    Args:
        members: The weight's values, one tensor for each member, at least one. One is read at a time. The
            last two dims are pairs.

    Returns:
        A mask for booleans, and for numbers that are 0 and 1. A bias for floats of which some forbid pairs. A
        constant for one number that all members have. None for other weights. A pair is true, or forbidden,
        if it is so at every place of the other dims and in all members.
    """
    form: Literal["mask", "bias"] | None = None
    numbers: list[float] = []
    always = sometimes = torch.empty(0)
    for value in members:
        if value.layout is not torch.strided or value.dtype not in _DTYPES:
            return None
        if value.numel() == 1:
            numbers.append(float(value))
            continue
        found = _pairs_in(value)
        if found is None or form not in (None, found[0]):
            return None
        pairs = found[1].reshape(-1, *value.shape[-2:])
        every, some = pairs.all(0), pairs.any(0)
        always, sometimes = (every, some) if form is None else (always & every, sometimes | some)
        form = found[0]
        del value, found, pairs  # before the next one is read
    if form is None:
        return Constant(numbers[0]) if len(set(numbers)) == 1 else None
    sure = region_of(always)
    if form == "bias":
        return Bias(sure) if sure else None
    return Mask(sure, sure if torch.equal(always, sometimes) else region_of(sometimes))


def _pairs_in(value: Tensor) -> tuple[Literal["mask", "bias"], Tensor] | None:
    """Returns where a mask is true, or where a bias forbids; None for other data."""
    if value.dim() < 2 or not 0 < value.numel() <= MOST_ELEMENTS:
        return None
    if value.dtype == torch.bool:
        return "mask", value
    for part in (value.flatten()[:_SAMPLE], value):
        true = part == 1
        is_mask = bool((true | (part == 0)).all())
        if not is_mask and not value.is_floating_point():
            return None
        forbidden = part <= FORBIDS
        if not is_mask and not bool((forbidden | (part.abs() <= _MOST_ADDED)).all()):
            return None
    return ("mask", true) if is_mask else ("bias", forbidden)
