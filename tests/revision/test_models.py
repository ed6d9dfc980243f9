"""Tests revisions of artifacts with heads of other sizes, several entries, states, and constants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from revisions import (
    SPECS,
    X,
    check_answers,
    check_refused,
    check_same,
    checked_manifest,
    member,
    names_of,
    save,
)
from safetensors.torch import load_file
from small_builds import QUICK
from torch import Tensor, nn

from widepack import append, build, drop, load, update
from widepack.errors import MemberMismatch
from widepack_artifacts.reader import Reader


class Heads(nn.Module):
    """Has a head whose size differs by member."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.head = nn.Linear(6, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).relu())


def heads(state_dict: Mapping[str, Tensor]) -> Heads:
    return Heads(len(state_dict["head.bias"]))


@pytest.mark.extended
@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_revisions_of_members_with_ragged_heads(built: bool, tmp_path: Path) -> None:
    nets = [member(lambda size=size: Heads(size), i) for i, size in enumerate([2, 3, 2, 3, 5])]  # type: ignore[misc]
    paths = save(tmp_path, nets)
    build(paths[:3], tmp_path / "e.wide", model=heads, **SPECS)

    def check(*order: int) -> None:
        found = checked_manifest(tmp_path / "e.wide")
        check_answers(tmp_path / "e.wide", [nets[i] for i in order], X)
        if built and len(set(order)) == len(order):
            build([paths[i] for i in order], tmp_path / "s.wide", model=heads, force=True, **SPECS)
            # ragged weights have no costs, and a revision has no module to derive them from
            random = ("probe", ".pt2", "costs-")
            assert names_of(found, random) == names_of(Reader(tmp_path / "s.wide").manifest, random)

    report = update(tmp_path / "e.wide", {0: paths[3]})
    assert (report.lowered, report.written) == (["forward"], "streamed")
    check(3, 1, 2)
    assert (
        update(tmp_path / "e.wide", {1: paths[3]}).written != "streamed"
    )  # a new member with the shapes of an old one
    check(3, 3, 2)
    update(tmp_path / "e.wide", {1: paths[1]})
    append(tmp_path / "e.wide", [paths[0]], names=["new"])
    check(3, 1, 2, 0)
    check_refused(
        lambda: append(tmp_path / "e.wide", [paths[4]]),
        MemberMismatch,
        "2 different sets of shapes",
        "build the artifact again",
    )
    if not built:
        return
    report = drop(tmp_path / "e.wide", ["m2", "new"])
    assert {(k["weight"], k["was"], k["kind"]) for k in report.kinds} == {
        ("head.weight", "ragged", "stacked"),
        ("head.bias", "ragged", "stacked"),
    }
    check(3, 1)
    assert len(Reader(tmp_path / "e.wide").manifest.entries["forward"].member) == 1


class Two(nn.Module):
    """Has two methods that read the same weights, and a buffer that one method changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.head = nn.Linear(4, 6)
        self.register_buffer("seen", torch.zeros(4))

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        self.seen = self.seen * 0.5 + hidden.mean(0)
        return hidden + self.seen

    def decode(self, z: Tensor) -> Tensor:
        return self.head(z)


@pytest.mark.extended
@pytest.mark.parametrize("built", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_revisions_of_models_with_two_entries_and_state(built: bool, tmp_path: Path) -> None:
    nets = [member(Two, i) for i in range(3)] + [member(Two, 3, trunk=5)]
    paths = save(tmp_path, nets)
    specs: dict[str, Any] = {
        "entries": ["encode", "decode"],
        "state": ["seen"],
        "targets": ("cpu",),
        "pt2": built,
    }
    specs["inputs"] = {"encode": ["x=float32[B,6]"], "decode": ["z=float32[B,4]"]}
    build(paths[:2], tmp_path / "e.wide", model=Two, **specs)
    programs = {n for n in Reader(tmp_path / "e.wide").manifest.files if "decode" in n}

    def check(*order: int) -> None:
        if built:
            build([paths[i] for i in order], tmp_path / "s.wide", model=Two, force=True, **specs)
            check_same(tmp_path / "e.wide", tmp_path / "s.wide")
        checked_manifest(tmp_path / "e.wide")
        ens = load(tmp_path / "e.wide")
        state = ens.state()
        for net, i in zip([nets[i] for i in order], range(len(order)), strict=True):
            assert torch.equal(state["seen"][i], net.get_buffer("seen"))
        first, state = ens.encode(X, state=state)
        second, _ = ens.encode(X + 1, state=state)
        for k, i in enumerate(order):
            alone = Two().eval()
            alone.load_state_dict(nets[i].state_dict())
            with torch.no_grad():
                torch.testing.assert_close(first[k], alone.encode(X), rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(second[k], alone.encode(X + 1), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(
                ens.decode(first[0])[1], nets[order[1]].decode(first[0]), rtol=1e-4, atol=1e-5
            )

    assert update(tmp_path / "e.wide", {1: paths[2]}).lowered == []
    check(0, 2)
    report = update(tmp_path / "e.wide", {1: paths[3]})
    assert report.lowered == ["encode"], "decode reads no weight of another kind"
    assert programs <= set(Reader(tmp_path / "e.wide").manifest.files)
    check(0, 3)
    if not built:
        return
    assert append(tmp_path / "e.wide", [paths[1]], names=["one"]).lowered == ["decode", "encode"]
    check(0, 3, 1)


class Table(nn.Module):
    """Takes integers without bounds. Only the example shows which integers are valid."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 4)

    def forward(self, ids: Tensor, w: Tensor) -> Tensor:
        return (self.rows(ids) * w.unsqueeze(-1)).sum(1)


@pytest.mark.slow
def test_the_probe_keeps_its_inputs(tmp_path: Path) -> None:
    nets = [member(Table, i) for i in range(4)]
    paths = save(tmp_path, nets)
    ids, w = torch.arange(20).reshape(5, 4) % 5, torch.randn(5, 4)
    build(
        paths[:2],
        tmp_path / "e.wide",
        model=Table,
        sample=(ids, w),
        dynamic={"ids": {0: "B"}, "w": {0: "B"}},
        **QUICK,
    )
    before = _probe(tmp_path / "e.wide")
    update(tmp_path / "e.wide", {0: paths[2]})
    after = _probe(tmp_path / "e.wide")
    assert {k: v.tolist() for k, v in before.items() if ".x" in k} == {
        k: v.tolist() for k, v in after.items() if ".x" in k
    }
    assert torch.equal(before["shared.y0.1"], after["shared.y0.1"]) and not torch.equal(
        before["shared.y0.0"], after["shared.y0.0"]
    )
    append(tmp_path / "e.wide", [paths[3]])
    drop(tmp_path / "e.wide", [0])
    last = _probe(tmp_path / "e.wide")
    assert torch.equal(last["each.x0"][0], before["each.x0"][1]) and torch.equal(
        last["each.x0"][1], before["each.x0"][0]
    )
    with torch.no_grad():
        for got, net in zip(load(tmp_path / "e.wide")(ids, w), [nets[1], nets[3]], strict=True):
            torch.testing.assert_close(got, net(ids, w))


def _probe(path: Path) -> dict[str, Tensor]:

    return load_file(path / Reader(path).manifest.probe)


class DifferentConstant(nn.Module):
    """Has a tensor that no checkpoint stores and whose values differ by member."""

    def __init__(self, state_dict: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.constant = state_dict["head.bias"] * 2 if state_dict is not None else torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.constant


def test_members_with_different_constants_are_refused(tmp_path: Path) -> None:
    paths = save(tmp_path, [member(DifferentConstant, i) for i in range(3)])
    build(paths[:2], tmp_path / "e.wide", model=DifferentConstant, **SPECS)
    check_refused(
        lambda: update(tmp_path / "e.wide", {0: paths[2]}),
        MemberMismatch,
        "constants that differ from member to member (constant). The weights of a checkpoint do not give",
        "build the artifact again",
    )
    drop(tmp_path / "e.wide", [0])
    checked_manifest(tmp_path / "e.wide")
