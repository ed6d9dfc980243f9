"""What everyday code writes and torch.export does not take as it stands: put another way of the same meaning, and right in both presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test_patterns import ROWS, Case, case, hold, linear, net


def whole(*shape: int, most: int = 9, dtype: torch.dtype = torch.int64) -> Any:
    """What makes a buffer of whole numbers from 0."""
    return lambda: torch.randint(0, most, shape, dtype=dtype)


def bits(self: Any, x: Tensor) -> Any:
    """Four-bit weights, two in a byte; and every operator on bits, in place too."""
    q = (self.packed[..., None] >> torch.tensor([0, 4], dtype=torch.uint8)) & 15
    up = (self.packed.int()[..., None] << torch.tensor([0, 4])) ^ self.n[:, None]
    a, b = self.n.clone(), self.n.clone()
    a <<= self.n % 3
    a >>= self.n % 2
    a &= self.n + 7
    b |= self.n
    b ^= self.n * 3
    b <<= 2
    b &= 31
    return self.fc(x) + q.flatten() - 8.0, up | self.n[:, None], a, b


ONCE: dict[str, set[str]] = {}
CASES: dict[str, Case] = {
    "bits": case(net(bits, fc=linear(6, 6), packed=whole(3, most=200, dtype=torch.uint8), n=whole(3)), ROWS),
}


@pytest.mark.parametrize("name", CASES)
def test_right_for_all_members(name: str, tmp_path: Path) -> None:
    hold(CASES[name], tmp_path, ONCE.get(name, set()))
