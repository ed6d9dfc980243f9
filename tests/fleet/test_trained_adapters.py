"""Tests fleets of adapters that were trained on images: what is factored, and that answers and weights are
those of the members.

All weights that the adapters change are factored, whether the adapters or merged checkpoints are given, and
whether the base is given, is a member, or is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from small_builds import QUICK
from torch import Tensor

import widepack
from fleet.small_fleets import equal_states
from fleet.trained_fleets import INPUTS, LAYERS, RANK, Digits, TrainedFleet, rms_errors, train_fleet
from widepack_cli.main import cli

datasets = pytest.importorskip("sklearn.datasets")


@dataclass(frozen=True)
class Case:
    """An artifact. states: of its members. source: where its base comes from."""

    path: Path
    states: list[dict[str, Tensor]]
    report: widepack.BuildReport
    source: str


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> TrainedFleet:
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    return train_fleet(tmp_path_factory.mktemp("digits"), images, torch.tensor(digits.target))


@pytest.fixture(scope="module", params=["adapters", "given", "among", "absent"])
def case(request: pytest.FixtureRequest, fleet: TrainedFleet) -> Case:
    kind = request.param
    paths, states = list(fleet.merged), list(fleet.states)
    if kind == "adapters":
        paths, states = list(fleet.adapters), list(fleet.exact)
    elif kind == "among":
        paths.insert(2, fleet.base)
        states.insert(2, torch.load(fleet.base))
    out = fleet.base.parent / f"{kind}.wide"
    report = widepack.build(
        paths,
        out,
        base=fleet.base if kind in ("adapters", "given") else None,
        unmerge=kind != "adapters",
        model=Digits,
        inputs=INPUTS,
        **QUICK,
    )
    source = {"adapters": "given", "given": "given", "among": "base", "absent": "recovered"}[kind]
    return Case(out, states, report, source)


@pytest.mark.extended(keep=1)
def test_trained_weights_are_factored(case: Case) -> None:
    assert case.report.fleet is not None
    rows = {row["weight"]: row for row in case.report.fleet["factored"]}
    assert set(rows) == {f"{name}.weight" for name in LAYERS}
    for row in rows.values():
        assert 0 < row["rank"] <= RANK and row["rank"] == max(row["ranks"])
        assert row["base"] == case.source
    assert case.report.fleet["stacked"] == []


@pytest.mark.extended(keep=1)
def test_answers_are_those_of_the_merged_members(case: Case, fleet: TrainedFleet) -> None:
    ens = widepack.load(case.path)
    for answers in (ens(fleet.images), ens.each(torch.stack([fleet.images] * len(ens)))):
        for i, state in enumerate(case.states):
            error, own = rms_errors(state, answers[i], fleet.images)
            assert error <= 2 * own


@pytest.mark.extended(keep=1)
def test_members_answer_for_the_classes_of_their_training(case: Case, fleet: TrainedFleet) -> None:
    found = widepack.load(case.path)(fleet.images).argmax(-1)
    for i, state in enumerate(case.states):
        member = Digits()
        member.load_state_dict(state)
        assert torch.equal(found[i], member(fleet.images).argmax(-1))
    assert not torch.equal(found[0], found[-1])


def test_weights_come_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    ens = widepack.load(case.path)
    assert all(equal_states(ens.state_dict(i), state) for i, state in enumerate(case.states))
    last = len(case.states) - 1
    out = tmp_path / "member.safetensors"
    done = CliRunner().invoke(cli, ["extract", str(case.path), str(last), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert equal_states(load_file(out), case.states[last])
