"""Packed sequences whose lengths are an input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import widepack

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(3))
SORTED, UNSORTED = torch.tensor([5, 4, 2, 1]), torch.tensor([2, 5, 1, 4])


class Packed(nn.Module):
    def __init__(self, kind: Any, ordered: bool, total: int | None, **options: Any) -> None:
        super().__init__()
        self.layer, self.ordered, self.total = kind(3, 4, batch_first=True, **options), ordered, total

    def forward(self, x: Tensor, lengths: Tensor, hx: Any = None) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        y, last = self.layer(packed, hx)
        padded, sizes = pad_packed_sequence(y, batch_first=True, total_length=self.total)
        return padded * 2, sizes, last


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in leaves(v)]


@pytest.mark.parametrize(
    ("kind", "ordered", "total", "states", "options"),
    [
        (nn.LSTM, False, None, 2, {"bidirectional": True}),
        (nn.LSTM, True, 7, 0, {"num_layers": 2}),
        (nn.GRU, True, None, 1, {"bidirectional": True}),
        (nn.RNN, False, 5, 0, {}),
    ],
)
def test_lengths_are_an_input(
    tmp_path: Path, kind: type[nn.RNNBase], ordered: bool, total: int | None, states: int, options: Any
) -> None:
    def make() -> nn.Module:
        return Packed(kind, ordered, total, **options).eval()

    paths = []
    for i in range(2):
        torch.manual_seed(i)
        paths.append(str(tmp_path / f"{i}.pt"))
        torch.save(make().state_dict(), paths[-1])
    h = torch.randn(2, 4, 4)
    hx = [] if not states else [h] if states == 1 else [(h, -h)]
    axes = {"x": {0: "B"}, "lengths": {0: "B"}, "hx": {1: "B"}}
    dynamic = {k: v for k, v in axes.items() if hx or k != "hx"}
    sample = (X, SORTED if ordered else UNSORTED, *hx)
    widepack.build(paths, tmp_path / "e.wide", model=make, sample=sample, dynamic=dynamic, race=False)
    ens = widepack.load(tmp_path / "e.wide")
    first = [v[:, :2] if isinstance(v, Tensor) else tuple(t[:, :2] for t in v) for v in hx]
    shorter = (X[:2], torch.tensor([4, 3] if ordered else [3, 4]), *first)
    for call in (sample, shorter):
        answers = leaves(ens(*call))
        for i, path in enumerate(paths):
            member = make()
            member.load_state_dict(torch.load(path))
            with torch.no_grad():
                for y, t in zip(answers, leaves(member(*call)), strict=True):
                    torch.testing.assert_close(y[i], t, atol=1e-6, rtol=1e-5)
