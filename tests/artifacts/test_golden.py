"""Tests that the golden artifacts open and return the same answers, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import GOLDEN, golden
from safetensors.torch import load_file

from make_golden import GOLDEN as MADE
from make_golden import Recorded, answer
from widepack import MemberMismatch, load

ARTIFACTS = sorted(GOLDEN.glob("*.wide"))
FLEETS = ("fleet", "scales")


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


@pytest.mark.parametrize("path", [p for p in ARTIFACTS if p.stem[11:] not in FLEETS], ids=lambda p: p.stem)
def test_a_golden_artifact_returns_its_recorded_answers(path: Path) -> None:
    kept = load_file(path.with_name(f"{path.stem}.answers.safetensors"))
    ens = load(path, backend="eager", verify="hashes")
    ens.probe()
    found: dict[str, Any] = {}
    for at in sorted(n.removesuffix(".input") for n in kept if n.endswith(".input")):
        name, pattern, _ = at.split(".")
        found[f"{at}.input"] = kept[f"{at}.input"]
        found.update(answer(ens, name, pattern, kept[f"{at}.input"], at))
    assert found.keys() == kept.keys()
    for name, value in kept.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert bits(found[name]) == bits(value), name


@pytest.mark.parametrize("name", ["state", "conv"])
def test_a_golden_artifact_lowered_again_returns_its_recorded_answers(name: str) -> None:
    path = golden(name)
    kept = load_file(path.with_name(f"{path.stem}.answers.safetensors"))
    ens = load(path, backend="eager", strategies="loop")
    at = "forward.shared.3"
    for which, value in answer(ens, "forward", "shared", kept[f"{at}.input"], at).items():
        assert bits(value) == bits(kept[which]), which


def test_the_parts_of_a_golden_artifact_return_its_recorded_answers() -> None:
    path = golden("parts")
    kept = load_file(path.with_name(f"{path.stem}.answers.safetensors"))
    x, y = kept["forward.shared.3.input"], kept["forward.shared.3.answer"]
    assert {w.members for w in load(path).manifest.entries["forward"].wide} == {None, (0, 2), (2, 1)}
    for members in ([0, 1], [2]):
        assert bits(load(path, members=members, backend="eager")(x)) == bits(y[members])


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_golden_artifact_with_factors_returns_its_members_bit_for_bit(fleet: str) -> None:
    path = golden(fleet)
    kept = load_file(path.with_name(f"{path.stem}.answers.safetensors"))
    ens = load(path, backend="eager", verify="hashes")
    ens.probe()
    factored = ens.manifest.factored
    assert [w.ranks for w in factored.weights] == [[2, 1, 3]] * 2
    assert all(bool(w.scale) == (fleet == "scales") for w in factored.weights)
    assert bool(factored.corrections) == (fleet == "fleet")
    x, y = kept.pop("input"), kept.pop("answer")
    found = {f"{i}.{n}": v for i in range(len(ens)) for n, v in ens.state_dict(i).items()}
    assert found.keys() == kept.keys()
    for name, value in kept.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert bits(found[name]) == bits(value), name
    assert bits(torch.stack([ens.member(i)(x) for i in range(len(ens))])) == bits(y)
    torch.testing.assert_close(ens(x), y, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(ens.each(torch.stack([x, x, x])), y, rtol=1e-5, atol=1e-3)


def test_a_golden_artifact_has_its_versions_and_extra_state() -> None:
    ens = load(golden("extra"), backend="eager")
    for i in range(len(ens)):
        state: Any = ens.state_dict(i)
        assert vars(state)["_metadata"]["layer"] == {"version": 2}
        member = Recorded()
        member.layer.extra = {}
        member.load_state_dict(state)
        assert member.layer.extra["names"] == ["a", "b", "c"]
        assert member.layer.extra["at"].tolist() == [1, 2]


def test_a_golden_artifact_refuses_members_with_other_values_of_its_literals(tmp_path: Path) -> None:
    ens = load(golden("literals"), backend="eager")
    assert [x.expression for x in ens.manifest.entries["forward"].literals] == ["steps"]
    for steps, message in ((3, "It is 2 in the artifact, and 3 in"), (2, "")):
        torch.save({**ens.state_dict(1), "steps": torch.tensor(steps)}, tmp_path / "new.pt")
        with pytest.raises(MemberMismatch, match=message) if message else nullcontext():
            ens.swap(0, tmp_path / "new.pt")


def test_every_form_has_a_golden_artifact() -> None:
    names = {p.stem[11:] for p in ARTIFACTS}
    assert names >= set(MADE)
    versions = {tuple(load(p, warmup=False).manifest.version) for p in ARTIFACTS}
    assert {(1, 0), (1, 1), (1, 3), (1, 4), (1, 5)} <= versions
    sizes = [sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in ARTIFACTS]
    assert max(sizes) < 60_000
