"""Makes float64 the default dtype, for the truth of modules whose code makes floats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def double_by_default() -> Iterator[None]:
    """Makes float64 the default dtype in the block, which ops take that make floats of integers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
