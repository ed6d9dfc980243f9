"""Tests how revisions treat measured plans and plans in the user's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from revisions import X, add_measured_plan, check_answers, check_refused, checked_manifest, content
from torch import nn

from widepack import append, drop, load, update
from widepack.errors import VerificationError
from widepack.planning import plan_cache
from widepack.planning.plan import Plan
from widepack.verification import reference
from widepack.verification.tolerance import ErrorStats, MeasuredError
from widepack_artifacts.reader import Reader


def test_measured_plans_are_kept_for_the_same_number_of_members(copy: Path, paths: list[Path]) -> None:
    add_measured_plan(copy)
    report = update(copy, {0: paths[3]})
    assert (
        report.left_out == []
        and sum("machine" in w.plan for w in checked_manifest(copy).entries["forward"].wide) == 1
    )
    report = append(copy, [paths[0]], names=["more"])
    assert (
        len(report.left_out) == 1
        and "theirs, 2 threads: measured with 3 members, and there are 4" in report.left_out[0]
    )
    assert not any("machine" in w.plan for w in checked_manifest(copy).entries["forward"].wide)


def test_a_measured_plan_that_is_wrong_is_left_out(copy: Path, paths: list[Path]) -> None:
    add_measured_plan(copy, wrong=True)
    report = update(copy, {0: paths[3]})
    assert (
        len(report.left_out) == 1
        and "theirs, 2 threads: the wide program (forward, shared) is wrong: output" in report.left_out[0]
    )
    assert (
        not any("machine" in w.plan for w in checked_manifest(copy).entries["forward"].wide)
        and report.lowered == []
    )


def test_a_program_that_is_wrong_for_new_weights_is_lowered_again(
    copy: Path, paths: list[Path], nets: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channel-packed convolutions may fail, because they sum in another order.

    Then plain convolutions are lowered.
    """
    check, before = reference.WideRun.check, content(copy)
    refuse = [True]

    def once(run: reference.WideRun, stats: Sequence[ErrorStats]) -> None:
        check(run, stats)
        if refuse and refuse.pop():
            again(run, stats)

    def again(
        run: reference.WideRun, stats: Sequence[ErrorStats]
    ) -> None:  # several evaluations find the same
        stats[0].wide.append(MeasuredError("m0", "B=2", 1.0, 1.0, "made wrong"))

    monkeypatch.setattr(reference.WideRun, "check", once)
    monkeypatch.setattr(reference.WideRun, "check_again", again)
    report = update(copy, {0: paths[3]})
    assert report.lowered == ["forward"] and all(
        w.plan.get("plain") for w in checked_manifest(copy).entries["forward"].wide
    )
    check_answers(copy, [nets[3], nets[1], nets[2]], X)
    before = content(copy)
    refuse.append(True)
    check_refused(
        lambda: update(copy, {0: paths[0]}),
        VerificationError,
        "is wrong: output output, member m0",
        "Nothing was published",
    )
    assert content(copy) == before


def test_plans_in_the_users_cache_follow_a_revision(copy: Path, paths: list[Path]) -> None:
    entry = Reader(copy).manifest.entries["forward"]
    row = next(w for w in entry.wide if w.pattern == "each")
    plan = replace(Plan.from_json(row.plan), machine="here", threads=1)
    before = Reader(copy).manifest.digest
    plan_cache.keep(before, "forward", "each", "cpu", [(Reader(copy).program(row.file), plan)])
    report = update(copy, {0: paths[3]})
    ((_, found),) = plan_cache.find(report.digest, "forward", "each", "cpu")
    assert found == plan and report.left_out == [] and load(copy).plans("each") == [plan]
    report = drop(copy, [0])
    assert report.left_out == [
        "forward, each, cpu, kept in your cache: measured with 3 members, and there are 2"
    ]
    assert plan_cache.find(report.digest, "forward", "each", "cpu") == []
