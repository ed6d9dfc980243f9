"""Tests the errors of calls of a fused module that fail while they run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fusing import members
from torch import Tensor, nn

import widepack
from widepack import InputError

IDS = torch.tensor([[0, 1, 2], [3, 4, 5]])
WRONG = torch.tensor([[0, 1, 2], [3, 10, 5]])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(10, 4), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.drop(self.norm(self.table(ids)))
        return y


@pytest.fixture(scope="module")
def nets() -> list[Any]:
    return members(Words)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("share", [[], ["table.*"]], ids=["own", "shared"])
def test_an_index_out_of_range_is_named(
    training: bool, gradients: bool, share: list[str], nets: list[Any]
) -> None:
    nets = [copy.deepcopy(m).train(training) for m in nets]
    if share:
        for m in nets[1:]:
            m.table.load_state_dict(nets[0].table.state_dict())
    fused = widepack.fuse(nets, IDS, share=share)
    before = {n: v.clone() for n, v in fused.state_dict().items()}
    row = r"fused: the input ids contains {}, but node \w+ \(aten.embedding.default, from test_failed_run.py:"
    rest = r".*looks up one of 10 rows: 0 to 9 are possible$"
    with torch.set_grad_enabled(gradients):
        drawn = torch.random.get_rng_state()
        with pytest.raises(InputError, match=row.format(10) + rest):
            fused(WRONG)
        with pytest.raises(InputError, match=row.format(10) + rest):
            fused.each(torch.stack([IDS, WRONG, IDS]))
        with pytest.raises(InputError, match=row.format(-1) + rest):
            fused(-IDS)
        assert torch.equal(torch.random.get_rng_state(), drawn)
        fused(IDS)
    if not training:
        after = fused.state_dict()
        assert all(torch.equal(after[n], v) for n, v in before.items())


def test_other_errors_are_torchs_own(nets: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused = widepack.fuse(nets, IDS)
    fused(IDS)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory")

    for runner in fused.current_entry().runners:
        monkeypatch.setattr(runner, "run", fails)
    with pytest.raises(RuntimeError, match="^no memory$"):
        fused(IDS)
