"""Tests the rules of thumb for single layers: recurrent layers, embeddings, pools and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from widepack.building.preview import Preview
from widepack.lowering.pattern_programs import PatternPrograms
from widepack.planning.plan import Plan
from widepack.planning.request import StrategyRequest
from widepack_bench.layers.in_memory import InMemory, inputs, members


def model(make: Callable[[], nn.Module], spec: str, count: int, pattern: str = "each") -> PatternPrograms:
    return Preview(make, [spec]).of(count, pattern)


def plans_of(of: PatternPrograms, device: str = "cpu") -> list[Plan]:
    return of.plans(device, StrategyRequest())


@pytest.mark.parametrize(
    "layer",
    [nn.RNN, pytest.param(nn.GRU, marks=pytest.mark.slow), pytest.param(nn.LSTM, marks=pytest.mark.slow)],
)
def test_plans_of_recurrent_layers_depend_on_one_step(layer: Callable[..., nn.Module]) -> None:
    """The length of the sequence and its dim do not change the plan."""
    short, long = (
        plans_of(model(partial(layer, 16, 32, batch_first=first), spec, 8))
        for first, spec in ((True, "input=float32[B,4,16]"), (False, "input=float32[12,B,16]"))
    )
    assert short[0].batch == long[0].batch
    assert not short[0].looped() and short[0].batch[1] is not None and short[0].batch[1] > 100
    assert short[-1].looped()


def test_ids_of_each_member_are_looked_up_in_one_table() -> None:
    embedding = partial(nn.Embedding, 50, 8)
    for spec in ("input=int64[B,128]:0..49", "input=int64[B,4]:0..49"):
        (plan,) = plans_of(model(embedding, spec, 32))  # wide at every batch size
        assert not plan.looped() and plan.batch == (1, None)
        assert [c.strategy for c in plan.choices.values()] == ["flat_index"]
    shared = model(embedding, "input=int64[B,4]:0..49", 4, "shared")
    assert (
        shared.lower(shared.plan("cpu")).used["embedding"] == "index_select"
        and not plans_of(shared)[0].choices
    )
    (on_gpu,) = plans_of(model(embedding, "input=int64[B,4]:0..49", 4), "cuda")
    assert [c.strategy for c in on_gpu.choices.values()] == ["gather"]


class Behind(nn.Module):
    """Has a pool after another op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(x.relu(), 2)


def test_a_single_pool_gains_nothing_from_the_cache() -> None:
    spec = "input=float32[B,64,32,32]"
    (plan,) = plans_of(model(partial(nn.MaxPool2d, 2), spec, 32))
    assert not plan.looped() and "straight into the answer" in plan.regions[0].because
    assert plans_of(model(Behind, spec.replace("input", "x"), 32))[-1].looped()


def test_a_large_single_convolution_reads_plain_weights() -> None:
    conv = partial(nn.Conv2d, 64, 64, 3, padding=1)
    spec = "input=float32[B,64,32,32]"
    lone = plans_of(model(conv, spec, 16))
    assert lone[-1].looped() and not lone[-1].choices
    assert any(plan.choices for plan in lone[:-1])  # plans of small batches pack the weights
    assert [p.batch[0] for p in lone[1:]] == [
        p.batch[1] + 1 for p in lone[:-1] if p.batch[1] is not None
    ]  # every batch size has a plan
    two = plans_of(model(lambda: nn.Sequential(conv(), nn.ReLU(), conv()), spec, 16))
    assert two[-1].looped() and two[-1].choices


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
