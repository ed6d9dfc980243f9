"""Tests that no artifact is published that the loader refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import save_members
from torch import nn

import widepack
from widepack.errors import ProbeError, VerificationError
from widepack.verification import probe
from widepack_artifacts.reader import Reader

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",), "budget": 0}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def saved(folder: Path, number: float | None = None) -> str:
    state = net().state_dict()
    if number is not None:
        state = {key: torch.full_like(value, number) for key, value in state.items()}
    torch.save(state, folder / "new.pt")
    return str(folder / "new.pt")


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, list[str]]:
    paths = [str(p) for p in save_members(net, tmp_path, 3)]
    widepack.build(paths, tmp_path / "e.wide", model=net, sample=(torch.randn(5, 8),), **QUICK)
    return tmp_path / "e.wide", paths


HOW: dict[str, Callable[[Path, list[str], str], object]] = {
    "build": lambda out, paths, new: widepack.build(
        [*paths, new], out, model=net, sample=(torch.randn(5, 8),), force=True, **QUICK
    ),
    "update": lambda out, paths, new: widepack.update(out, {2: new}),
    "append": lambda out, paths, new: widepack.append(out, [new]),
}


@pytest.mark.extended
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [1e20, 3e38])
def test_a_member_with_huge_weights(
    how: str, number: float, built: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Its answers leave float32. It becomes a member, or its checkpoint is named; the others are right."""
    out, paths = built
    before, new = Reader(out).manifest.digest, saved(tmp_path, number)
    try:
        HOW[how](out, paths, new)
    except VerificationError as refused:
        assert re.search(r"new\.pt|member (m2|new),", str(refused)) and "Nothing was" in str(refused)
        assert Reader(out).manifest.digest == before
    ens = widepack.load(out)
    x = torch.randn(3, 8)
    for i in range(2):
        member = net()
        member.load_state_dict(torch.load(paths[i]))
        torch.testing.assert_close(ens(x)[i], member(x).detach())


@pytest.mark.parametrize(
    "how", ["update", *(pytest.param(how, marks=pytest.mark.extended) for how in ("build", "append", "drop"))]
)
def test_what_the_loader_refuses_stays_unpublished(
    how: str, built: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, paths = built
    before, new = sorted(p.name for p in out.rglob("*")), saved(tmp_path)
    digest = Reader(out).manifest.digest

    def refuses(*given: Any) -> str:
        raise ProbeError("probe: output 0 of member 1 is off by 3")

    monkeypatch.setattr(probe, "check", refuses)
    change = HOW.get(how, lambda out, paths, new: widepack.drop(out, [2]))
    with pytest.raises(
        VerificationError,
        match=r"(?s)load would refuse.*It is the answer of member m?1, the checkpoint .*m1.pt; please",
    ) as found:
        change(out, paths, new)
    assert len(str(found.value).splitlines()) <= 5
    monkeypatch.undo()
    assert Reader(out).manifest.digest == digest and widepack.load(out)(torch.randn(2, 8)).shape == (3, 2, 4)
    assert sorted(p.name for p in out.rglob("*")) == before


@pytest.mark.extended
def test_factors_of_a_member_with_huge_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Linear(64, 64).state_dict()
    paths = []
    for i in range(4):
        state = {key: value.clone() for key, value in base.items()}
        state["weight"] += torch.randn(64, 1) @ torch.randn(1, 64) * 1e-2
        if i == 2:
            state = {key: torch.full_like(value, 3e38) for key, value in state.items()}
        torch.save(state, tmp_path / f"{i}.pt")
        paths.append(tmp_path / f"{i}.pt")
    options = {**QUICK, "model": lambda: nn.Linear(64, 64), "sample": (torch.randn(5, 64),), "unmerge": True}
    try:
        widepack.build(paths, tmp_path / "e.wide", **options)
    except VerificationError as refused:
        assert "member 2" in str(refused).lower()
    else:
        widepack.load(tmp_path / "e.wide")
