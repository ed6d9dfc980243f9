"""Tests `widepack.distributed.load` in two processes over loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_processes as ranks
import torch
from loaded import saved
from split_models import Cell, Heads
from support import Artifacts
from torch import nn

import widepack
from widepack import UsageError


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    specs = [f"{name}:x=float32[B,6]" for name in ("forward", "encode")]
    saved(Heads, folder, *specs, members=5, entries=["forward", "encode"])
    return folder / "e.wide"


def test_without_a_group(heads: Path) -> None:
    with pytest.raises(UsageError, match="torch.distributed is not initialized; call torch.distributed.init"):
        widepack.distributed.load(heads)


@pytest.mark.slow
def test_all_ranks_answer_as_the_whole_artifact(heads: Path, tmp_path: Path) -> None:
    ranks.start(ranks.answers, 2, tmp_path, heads, True)


@pytest.mark.slow
def test_a_call_that_one_rank_refuses_runs_on_none(heads: Path, tmp_path: Path) -> None:
    ranks.start(ranks.refusals, 2, tmp_path, heads)


@pytest.mark.slow
def test_swaps_are_of_all_ranks(heads: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    torch.save(Heads().state_dict(), tmp_path / "new.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "bad.pt")
    ranks.start(ranks.swaps, 2, tmp_path, heads, tmp_path / "new.pt", tmp_path / "bad.pt")


@pytest.mark.slow
def test_states(tmp_path: Path) -> None:
    saved(Cell, tmp_path, "x=float32[B,4]", "h=float32[B,3]", members=3, state=["h=1"])
    ranks.start(ranks.states, 2, tmp_path, tmp_path / "e.wide")


@pytest.mark.slow
def test_heads_of_different_sizes(artifacts: Artifacts, tmp_path: Path) -> None:
    ranks.start(ranks.lists, 2, tmp_path, artifacts("ragged_heads"))


@pytest.mark.slow
def test_what_crosses_between_ranks(heads: Path, tmp_path: Path) -> None:
    ranks.start(ranks.traffic, 2, tmp_path, heads)


@pytest.mark.slow
def test_a_process_that_ended(heads: Path, tmp_path: Path) -> None:
    ranks.start(ranks.death, 2, tmp_path, heads, 20.0, False)


@pytest.mark.slow
def test_a_process_that_does_not_answer(heads: Path, tmp_path: Path) -> None:
    ranks.start(ranks.death, 2, tmp_path, heads, 6.0, True)
