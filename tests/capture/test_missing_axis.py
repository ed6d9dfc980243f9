"""Tests the advice in the error for an input spec with a missing axis."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from small_builds import refused
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("model", "spec", "words"),
    [
        # the features of a row are left out of the spec
        (
            lambda: nn.Linear(8, 4),
            "x=float32[B]",
            "It takes x=float32[B,8] at any B: write that if a row has 8",
        ),
        (
            lambda: nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3)),
            "x=float32[B]",
            "It takes x=float32[B,7]: w",
        ),
        (lambda: nn.Linear(8, 4), "x=float32[B,T]", "x=float32[B,T,8] at any B: .* Write x=float32[B,8] if"),
    ],
)
def test_a_spec_without_the_features_of_a_row(model: Any, spec: str, words: str, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.body(x)
            return y

    assert re.search(re.escape(words).replace(r"\.\*", ".*"), refused(Net, tmp_path, inputs=[spec]))
