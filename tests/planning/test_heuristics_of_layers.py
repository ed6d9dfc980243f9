"""Tests the plans of single layers: recurrent layers, embeddings and bags."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernel_profiles import scaled
from torch import nn

from widepack.building.preview import Preview
from widepack.kernel_times.profile import Profile
from widepack.lowering.pattern_programs import PatternPrograms
from widepack.planning.plan import Plan
from widepack.planning.request import StrategyRequest
from widepack_bench.layers.in_memory import InMemory, inputs, members


def model(make: Callable[[], nn.Module], spec: str, count: int, pattern: str = "each") -> PatternPrograms:
    return Preview(make, [spec]).of(count, pattern)


def plans_of(of: PatternPrograms, device: str = "cpu") -> list[Plan]:
    return of.plans(device, StrategyRequest())


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.RNN, "rnn_tanh"),
        pytest.param(nn.GRU, "gru", marks=pytest.mark.slow),
        pytest.param(nn.LSTM, "lstm", marks=pytest.mark.slow),
    ],
)
def test_plans_of_recurrent_layers_depend_on_the_times_of_steps(
    layer: Callable[..., nn.Module], kind: str, times: Callable[[Profile], None]
) -> None:
    for first, spec in ((True, "input=float32[B,4,16]"), (False, "input=float32[12,B,16]")):
        of = model(partial(layer, 16, 32, batch_first=first), spec, 8)
        times(scaled("_steps|packed_lstm", 1e-3))
        assert not any(p.looped() for p in plans_of(of))
        times(scaled(f"^{kind}$", 1e-3))
        assert all(p.looped() for p in plans_of(of))


def test_ids_of_each_member_are_looked_up_in_one_table() -> None:
    embedding = partial(nn.Embedding, 50, 8)
    for spec in ("input=int64[B,128]:0..49", "input=int64[B,4]:0..49"):
        plan = plans_of(model(embedding, spec, 32))[0]
        assert not plan.looped() and (plan.batch[1] is None or plan.batch[1] > 32)
        assert [c.strategy for c in plan.choices.values()] == ["flat_index"]
    shared = model(embedding, "input=int64[B,4]:0..49", 4, "shared")
    assert shared.lower(shared.plan("cpu")).used["embedding"] == "index_select"
    (on_gpu,) = plans_of(model(embedding, "input=int64[B,4]:0..49", 4), "cuda")
    assert [c.strategy for c in on_gpu.choices.values()] == ["gather"]


@pytest.mark.parametrize(
    "mode", ["mean", pytest.param("sum", marks=pytest.mark.slow), pytest.param("max", marks=pytest.mark.slow)]
)
def test_bags_of_all_members_run_in_one_call(mode: str) -> None:
    make = partial(nn.EmbeddingBag, 7, 4, mode=mode)
    modules = members(make, 3)
    spec, given = ["input=int64[B,5]:0..6"], inputs(["input=int64[B,5]:0..6"], 6, 3)
    programs, _ = InMemory(make, modules, spec, given, True).contestants()
    want = torch.stack([m(x) for m, x in zip(modules, given[0])])
    assert programs[0].used == ("flat",)
    for program in programs:
        torch.testing.assert_close(program.run(*given), want)
    for bad in (-1, 7, 13, 100):  # a row of another member, or no row
        given[0][1, 2, 3] = bad
        with pytest.raises(RuntimeError):
            modules[1](given[0][1])
        for program in programs:
            with pytest.raises(RuntimeError):
                program.run(*given)
