"""Tests artifacts whose plans were predicted for another processor than the one that loads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of
from torch import nn

import widepack
from widepack.errors import LoweringError
from widepack.inference.programs.program_source import ProgramSource
from widepack.kernel_times import sources
from widepack.kernel_times.sources import VARIABLE, shipped

FIRST, SECOND = "amd-epyc-avx2", "amd-epyc-avx512"


def member(i: int) -> nn.Module:
    torch.manual_seed(i)
    layers = (nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5))
    return nn.Sequential(*layers).eval()


@pytest.fixture
def kernel_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Names the kernel times of this machine."""

    def name(profile: str) -> None:
        monkeypatch.setenv(VARIABLE, profile)
        sources.forget()

    return name


def built(folder: Path, name: str, **how: Any) -> Path:
    paths = files_of(folder, map(member, range(6)))
    place = folder / f"{name}.wide"
    widepack.build(paths, place, model=lambda: member(0), inputs=["input=float32[B,32]"], pt2=False, **how)
    return place


def chosen(model: widepack.WideModel) -> list[tuple[object, ...]]:
    """Returns what decides the programs of a model: batches, loops, and the strategies of its layers."""
    return [
        (p.pattern, p.batch, p.looped(), {n: c.strategy for n, c in p.choices.items() if "linear" in n})
        for p in model.plans()
    ]


def test_a_load_on_another_processor_has_the_plans_of_a_build_there(
    tmp_path: Path, kernel_times: Callable[[str], None]
) -> None:
    places = {}
    for name in (FIRST, SECOND):
        kernel_times(name)
        places[name] = built(tmp_path, name)
    kernel_times(SECOND)
    there, here = (widepack.load(places[name]) for name in (FIRST, SECOND))
    assert {p.predicted for p in here.plans()} == {shipped()[SECOND].machine}
    assert chosen(there) == chosen(here) != chosen(widepack.load(places[SECOND], strategies="wide"))
    x = torch.randn(3, 32)
    torch.testing.assert_close(there(x).clone(), here(x).clone())
    kernel_times(FIRST)
    back = widepack.load(places[FIRST])
    assert {p.predicted for p in back.plans()} == {shipped()[FIRST].machine}


def test_strategies_that_the_user_named_stay_on_another_processor(
    tmp_path: Path, kernel_times: Callable[[str], None]
) -> None:
    kernel_times(FIRST)
    place = built(tmp_path, FIRST, strategy=["one_gemm", "bmm"])
    here = chosen(widepack.load(place))
    kernel_times(SECOND)
    assert chosen(widepack.load(place)) == here


def test_the_second_load_on_another_processor_plans_nothing(
    tmp_path: Path, kernel_times: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a load on the processor of the build. They do not import what plans and lowers either."""
    heavy = ["widepack.lowering.pattern_programs", "widepack.kernel_times.work", "torch._dynamo"]
    load = (
        f"import sys, torch, widepack; widepack.load(sys.argv[1]); print(any(map(sys.modules.get, {heavy})))"
    )
    kernel_times(FIRST)
    place = built(tmp_path, FIRST)
    for name, planned in ((FIRST, ["False"]), (SECOND, ["True", "False"])):
        kernel_times(name)
        done = [subprocess.check_output([sys.executable, "-c", load, str(place)], text=True) for _ in planned]
        assert [words.strip() for words in done] == planned
    first, second = (chosen(widepack.load(place)) for _ in range(2))
    monkeypatch.setenv("WIDEPACK_PLANS", str(tmp_path / "empty"))
    assert first == second == chosen(widepack.load(place))


def test_stored_programs_serve_where_no_other_can_be_made(
    tmp_path: Path, kernel_times: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ProgramSource, pattern: str, strategies: object = ()) -> None:
        raise LoweringError("no time is left")

    kernel_times(FIRST)
    place, x = built(tmp_path, FIRST), torch.randn(3, 32)
    here = widepack.load(place)
    expected = here(x).clone()
    kernel_times(SECOND)
    monkeypatch.setattr(ProgramSource, "lower", refuse)
    there = widepack.load(place)
    assert torch.equal(there(x), expected) and chosen(there) == chosen(here)
