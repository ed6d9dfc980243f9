"""Switches TF32 off for a block, whatever torch's settings were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Runs a block in which torch computes float32 in float32, and restores the settings.

    torch refuses to answer `allow_tf32` where `fp32_precision` was set for one kind of ops only. So the block
    begins with `allow_tf32`, which sets all of them, and ends with both.
    """
    products: Any = torch.backends.cuda.matmul
    library: Any = torch.backends.cudnn
    places = (products, library.conv, library.rnn)
    before = [place.fp32_precision for place in places]
    products.allow_tf32 = library.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, library.allow_tf32 = before[0] == "tf32", "tf32" in before[1:]
        for place, precision in zip(places, before):
            place.fp32_precision = precision
