"""Tests the moves of `advise`: what they offer, what they run, and the commands that they name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from advised import advised
from small_builds import QUICK
from support import Artifacts

import widepack
from widepack.errors import UsageError
from widepack_artifacts.reader import Reader
from widepack_bench.advice import advise, call_moves, load_moves, plan_moves, run
from widepack_bench.advice.plan_moves import copied
from widepack_bench.advice.subject import AdvisedArtifact
from widepack_cli.commands.tune import command as tune_command


@pytest.mark.extended
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_calls_of_parts_give_the_same_answers(
    artifacts: Artifacts, tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_moves, "FEWEST_MEMBERS", 1)
    path = artifacts("bert")
    with torch.inference_mode():
        subject = advised(path, tmp_path, pattern=pattern)
        monkeypatch.setattr(call_moves, "PARTS", (2, subject.count))
        rows = [m for m in call_moves.row_moves(subject) if "2 calls" in m.name]
        members = list(call_moves.member_moves(subject))
        assert len(rows) == 1 and members
        for found in (*rows, *members):
            assert found.open is not None
            opened = found.open(subject)
            assert subject.wrong(opened.answers()) == ""
            opened.call()
            predicted = found.predict(subject)
            assert predicted is not None and predicted > 0


def test_another_dtype_is_compared_at_its_own_rounding(subject: AdvisedArtifact) -> None:
    (bf16,) = load_moves.dtype_moves(subject, ["bf16", "bf16"])
    assert bf16.open is not None
    opened = bf16.open(subject)
    answers = opened.answers()
    assert answers.dtype == torch.bfloat16 and opened.other_dtype
    assert subject.wrong(answers, other_dtype=True) == ""
    assert "rms error" in subject.wrong(answers + 1.0, other_dtype=True)


def test_members_of_different_shapes_are_not_divided(artifacts: Artifacts, tmp_path: Path) -> None:
    path = artifacts("ragged_heads")
    with torch.inference_mode():
        subject = advised(path, tmp_path)
    assert subject.ragged
    assert not list(call_moves.row_moves(subject)) and not list(call_moves.member_moves(subject))


def test_commands_name_what_is_measured(artifacts: Artifacts, tmp_path: Path) -> None:
    path = tmp_path / "two words.wide"
    copied(artifacts("mlp"), path)
    with torch.inference_mode():
        subject = advised(path, tmp_path, pattern="each")
        (plan,) = plan_moves.plan_moves(subject, ["eager"])
    words = shlex.split(plan.how)
    assert words[:2] == ["widepack", "tune"] and words[2] == str(path)
    context = tune_command.make_context("tune", words[2:])
    assert context.params["pattern"] == "each" and context.params["threads"] == 1
    assert context.params["entry"] == "forward" and context.params["batches"] == (8,)


def test_the_plans_of_a_tuned_artifact_are_no_moves(
    artifacts: Artifacts, tmp_path: Path, subject: AdvisedArtifact
) -> None:
    names = [m.name for m in plan_moves.plan_moves(subject)]
    assert names[0] == "plan"
    path = tmp_path / "tuned.wide"
    copied(artifacts("mlp"), path)
    widepack.tune(path, batches=(8,), patterns=("shared",), budget_s=0.2, backends=["eager"], write=True)
    tuned = advised(path, tmp_path)
    assert plan_moves.is_tuned(tuned) and not list(plan_moves.plan_moves(tuned))
    assert [m.name for m in plan_moves.plan_moves(tuned, ["eager", "aot"])] == ["plan on aot"]  # it is named
    assert not plan_moves.is_tuned(advised(path, tmp_path, batch=9))


def test_sizes_that_are_fixed_count_as_tuned(artifacts: Artifacts, tmp_path: Path) -> None:
    from cases import load

    case, path = load("mlp"), tmp_path / "fixed.wide"
    inputs = [spec.replace("[B,", "[4,") for spec in case.INPUTS]
    widepack.build(artifacts.checkpoints("mlp"), path, model=case.model, inputs=inputs, **QUICK)
    with torch.inference_mode():
        assert not plan_moves.is_tuned(advised(path, tmp_path))
    widepack.tune(path, patterns=("shared",), budget_s=0.2, threads=1, backends=["eager"], write=True)
    with torch.inference_mode():
        subject = advised(path, tmp_path)
    assert plan_moves.is_tuned(subject) and subject.work.batch == 1 and not subject.sizes


@pytest.mark.extended
def test_fine_tunes_of_one_base_are_found_in_merged_checkpoints(tmp_path: Path) -> None:
    """The factory and the members' weights are enough: the base and the factors need no files."""
    from cases import load

    case = load("mlp")
    torch.manual_seed(0)
    base = {k: v.clone() for k, v in case.model().state_dict().items()}
    paths = []
    for i in range(6):
        state = {k: v.clone() for k, v in base.items()}
        for value in state.values():
            if value.dim() == 2:
                left, right = torch.randn(value.shape[0], 1), torch.randn(1, value.shape[1])
                value.add_(0.1 * left @ right)
        paths.append(tmp_path / f"{i}.pt")
        torch.save(state, paths[-1])
    factory = f"{case.__file__}:model"
    out = tmp_path / "merged.wide"
    widepack.build([str(p) for p in paths], out, model=factory, inputs=case.INPUTS, **QUICK)
    with torch.inference_mode():
        subject = advised(out, tmp_path)
        (rebuilt,) = plan_moves.rebuilt(subject, factory, {})
        assert rebuilt.open is not None
        opened = rebuilt.open(subject)
    assert subject.wrong(opened.answers()) == ""
    assert Reader(tmp_path / "rebuilt.wide").manifest.factored.weights


def test_only_the_backends_that_are_given_are_tried(subject: AdvisedArtifact) -> None:
    assert [m.name for m in plan_moves.plan_moves(subject, ["eager"])] == ["plan"]
    assert [m.name for m in plan_moves.plan_moves(subject, ["aot", "compile"])] == ["plan", "plan on aot"]
    moves = list(run.moves_of(subject, 1, [], ["eager"], None, {}))
    assert not any("compile" in m.how for m in moves)
    with pytest.raises(UsageError, match="unknown backend tvm; known: "):
        advise(subject.work.path, backends=["tvm"])
