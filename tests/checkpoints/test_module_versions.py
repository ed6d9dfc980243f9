"""Tests files whose versions of submodules (`_metadata`) are not those of the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import widepack
from widepack import MemberMismatch

QUICK: dict[str, Any] = {
    "inputs": ["input=float32[B,4]"],
    "pt2": False,
    "targets": ("cpu",),
    "race": False,
    "force": True,
}


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def save(folder: Path, states: Sequence[Any]) -> list[Path]:
    paths = [folder / f"{i}.pt" for i in range(len(states))]
    for path, state in zip(paths, states):
        torch.save(state, path)
    return paths


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


class Spread(nn.BatchNorm1d):
    """Its variance was stored as a deviation before version 3."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 3:
            state[f"{prefix}running_var"] = state[f"{prefix}running_var"].square()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def spread() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), Spread(3))


def test_a_norm_with_versions_of_its_own_needs_the_model(tmp_path: Path) -> None:
    states = [seeded(spread, i).state_dict() for i in range(2)]
    older = OrderedDict({**states[1], "1.running_var": torch.full((3,), 3.0)})
    versions = {**vars(states[1])["_metadata"], "1": {"version": 2}}
    vars(older)["_metadata"] = OrderedDict(versions)
    paths, wide, x = save(tmp_path, [*states, older]), tmp_path / "e.wide", torch.randn(5, 4)
    widepack.build(paths[:2], wide, model=spread, share="none", **QUICK)
    ens = widepack.load(wide)
    with pytest.raises(MemberMismatch, match="has version 2 of 1, and the artifact's members have version 3"):
        ens.swap(0, paths[2])
    ens.swap(0, paths[2], model=spread)
    truth = spread().eval()
    truth.load_state_dict(torch.load(paths[2]))
    torch.testing.assert_close(ens(x)[0], truth(x))


@pytest.mark.parametrize("version", ["two", [2]])
def test_a_version_that_is_no_number(tmp_path: Path, version: Any) -> None:
    states = [seeded(norm, i).state_dict() for i in range(2)]
    odd = OrderedDict({k: v for k, v in states[1].items() if not k.endswith("num_batches_tracked")})
    vars(odd)["_metadata"] = OrderedDict({k.rpartition(".")[0]: {"version": version} for k in odd})
    paths, wide = save(tmp_path, [*states, odd]), tmp_path / "e.wide"
    widepack.build(paths[:2], wide, model=norm, **QUICK)
    with pytest.raises(MemberMismatch):
        widepack.load(wide).swap(0, paths[2])
    with pytest.raises(MemberMismatch):
        widepack.build(paths, wide, model=norm, **QUICK)
