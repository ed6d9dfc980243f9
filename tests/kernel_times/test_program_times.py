"""Tests predicted times of programs: the work of kernels, times between sizes, and the sums of calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from widepack.building.preview import Preview
from widepack.kernel_times.curves import Curve, ProductTimes
from widepack.kernel_times.kernel_work import KernelWork
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.program import compiled_seconds, loop_seconds, wide_seconds, work_at
from widepack_artifacts.program import Program
from widepack_bench.models.mlp import mlp
from widepack_bench.models.recurrent import lstm

FLAT = Curve((1.0, 1e12), (1e-6, 1e-6))
ONE = ProductTimes(((1.0, Curve((1.0, 1e12), (1e-3, 1e-3))), (1e9, Curve((1.0, 1e12), (1e-3, 1e-3)))))


def profile(**changed: Any) -> Profile:
    """Every product takes 1 ms, its start 10 us, any other kernel 1 us, a view 2 us, a call 7 us."""
    kinds = ("product", "batched product", "packed product", "convolution", "attention", "lstm")
    values: dict[str, Any] = {
        "machine": "a machine",
        "torch": "2.13.0",
        "date": "2026-01-01",
        "threads": 1,
        "dtype": "float32",
        "starts": dict.fromkeys(kinds, 1e-5),
        "products": dict.fromkeys(kinds, ONE),
        "others": {"elementwise": FLAT},
        "cold": Curve((1.0, 2.0), (1e-15, 1e-15)),
        "reading": {"product": Curve((1.0, 2.0), (1e-15, 1e-15))},
        "fresh": Curve((1.0, 2.0), (1e-18, 1e-18)),
        "view_s": 2e-6,
        "modules": Curve((1.0, 2.0), (3e-6, 3e-6)),
        "call_s": 7e-6,
    }
    return Profile(**{**values, **changed})


def programs(make: Any, spec: str, members: int, strategy: str) -> tuple[Program, Program]:
    """Returns the member program, and the wide program of N members."""
    preview = Preview(make, [spec])
    found = preview.of(members)
    return preview.program, found.lower(found.plan("cpu", strategy)).program


def works(
    make: Any, spec: str, sizes: dict[str, int], members: int, strategy: str, prologue: bool = True
) -> list[KernelWork]:
    """Returns the works of the wide program; without a prologue those of the member."""
    program = programs(make, spec, members, strategy)[prologue]
    return [work for work, times in work_at(program, sizes, prologue=prologue).works for _ in range(times)]


def test_a_linear_layer_of_all_members_is_n_products() -> None:
    make = partial(mlp, inputs=12, width=20, outputs=6)
    first, relu, last = works(make, "input=float32[B,12]", {"B": 5}, 7, "wide")
    # all members multiply the same rows: one product with the matrices side by side
    assert (first.kind, first.count, first.rows, first.width) == ("product", 1, 5, 12 * 20 * 7)
    assert (last.kind, last.count, last.rows, last.width) == ("narrow batched product", 7, 5, 20 * 6)
    assert (relu.kind, relu.count, relu.elements) == ("elementwise", 0, 7 * 5 * 20)
    assert last.weight_bytes == 4 * 7 * (20 * 6 + 6)


def test_inference_mode_changes_no_work() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2))

    expected = works(make, "input=float32[B,4,6,6]", {"B": 2}, 3, "wide")
    with torch.inference_mode():
        found = works(make, "input=float32[B,4,6,6]", {"B": 2}, 3, "wide")
    assert found == expected
    assert {"convolution", "norm"} <= {work.kind for work in found}


def test_a_convolution_multiplies_a_row_for_each_place() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=2))

    (work,) = works(make, "input=float32[B,4,6,5]", {"B": 2}, 3, "loop", prologue=False)
    assert (work.kind, work.count, work.rows, work.width) == ("grouped convolution", 2, 2 * 6 * 5, 4 * 2 * 9)


@pytest.mark.extended
def test_every_step_of_a_recurrent_layer_counts() -> None:
    member = works(lstm, "x=float32[B,9,64]", {"B": 4}, 3, "wide", prologue=False)
    (alone,) = (w for w in member if w.kind == "lstm")
    assert (alone.count, alone.rows) == (2 * 9, 4)  # two layers
    steps = [w for w in works(lstm, "x=float32[B,9,64]", {"B": 4}, 3, "wide") if "lstm" in w.kind]
    assert [(w.count, w.rows) for w in steps] == [(3 * 9, 4)] * 2
    assert sum(w.count * w.width for w in steps) == 3 * alone.count * alone.width


def test_the_time_of_a_wide_call_is_the_sum_of_its_kernels() -> None:
    make = partial(mlp, inputs=12, width=20, outputs=6)
    member, wide = programs(make, "input=float32[B,12]", 7, "wide")
    views = sum(n.op.split(".")[1] in ("view", "unsqueeze", "transpose", "reshape", "t") for n in wide.nodes)
    products = 1e-5 + 1 * 1e-3 + 1e-5 + 7 * 1e-3
    found = wide_seconds(wide, {"B": 5}, profile(view_s=0.0))
    assert found == pytest.approx(7e-6 + products + 1e-6)
    assert wide_seconds(wide, {"B": 5}, profile(view_s=1.0)) - found <= views
    alone = loop_seconds([member], {"B": 5}, profile(), modules=4)
    assert alone == pytest.approx(2 * (1e-5 + 1e-3) + 1e-6 + 4 * 3e-6)
    assert loop_seconds([member] * 7, {"B": 5}, profile(), modules=4) == pytest.approx(7 * alone)


def test_weights_that_are_read_between_calls_leave_the_cache() -> None:
    make = partial(mlp, inputs=12, width=20, outputs=6)
    _, wide = programs(make, "input=float32[B,12]", 7, "wide")
    own = work_at(wide, {"B": 5}).weight_bytes
    assert own == 4 * 7 * (12 * 20 + 20 + 20 * 6 + 6)
    slow = {"product": Curve((1.0, 2.0), (1e-9, 1e-9))}
    cold = profile(cold=Curve((own, 4 * own), (1e-12, 1e-9)), reading=slow)
    found = [wide_seconds(wide, {"B": 5}, cold, between=n * own) for n in (0, 3)]
    assert found[1] - found[0] == pytest.approx(own * 1e-9, rel=0.01)


def test_a_loop_region_counts_for_every_member() -> None:
    make = partial(mlp, inputs=12, width=20, outputs=6)
    found = {
        n: wide_seconds(programs(make, "input=float32[B,12]", n, "loop")[1], {"B": 5}, profile())
        for n in (3, 6)
    }
    assert found[6] - 7e-6 == pytest.approx(2 * (found[3] - 7e-6))


def test_compiled_calls_start_no_elementwise_kernels() -> None:
    make = partial(mlp, inputs=12, width=20, outputs=6)
    _, wide = programs(make, "input=float32[B,12]", 7, "wide")
    assert wide_seconds(wide, {"B": 5}, profile(view_s=0.0)) - compiled_seconds(
        wide, {"B": 5}, profile(view_s=0.0)
    ) == pytest.approx(1e-6)


def test_large_results_are_those_of_at_least_the_limit() -> None:
    make = partial(mlp, inputs=12, width=20, outputs=6)
    _, wide = programs(make, "input=float32[B,12]", 7, "wide")
    hidden, answer = 4 * 7 * 5 * 20, 4 * 7 * 5 * 6
    work = work_at(wide, {"B": 5})
    assert work.large_results(1) == 2 * hidden + answer
    assert work.large_results(answer + 1) == 2 * hidden
    assert work.large_results(hidden + 1) == 0


def test_weights_that_fit_no_cache_take_longer() -> None:
    slow = profile(cold=Curve((1e3, 1e6), (1e-9, 1e-6)), reading={"product": Curve((1.0, 2.0), (1e-6, 1e-6))})
    work = KernelWork("product", 1, 1, 250, 0.0, 1000.0)
    hot, cold = slow.kernel(work, 1e3), slow.kernel(work, 1e6)
    assert hot == pytest.approx(1e-5 + 1e-3, rel=1e-2)
    assert cold == pytest.approx(1e-5 + 1e-3 + 1000 * 1e-6)


def test_results_in_new_memory_take_longer() -> None:
    slow = profile(fresh=Curve((1e3, 1e6), (1e-9, 1e-8)))
    of = {
        made: slow.kernel(KernelWork("elementwise", elements=10, made_bytes=made), 0.0) for made in (0.0, 1e6)
    }
    assert of[1e6] - of[0.0] == pytest.approx(1e6 * 1e-8)


@given(
    st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=6),
    st.floats(0.5, 1e7),
)
def test_a_curve_stays_between_its_neighbours(values: list[float], size: float) -> None:
    curve = Curve(tuple(10.0**i for i in range(len(values))), tuple(values))
    for at, value in zip(curve.sizes, values):
        assert curve.at(at) == pytest.approx(value)
    found = curve.at(size)
    assert min(values) * (1 - 1e-9) <= found <= max(values) * (1 + 1e-9)
    last = curve.sizes[-1]
    assert curve.at(3 * last, grows=True) == pytest.approx(3 * values[-1])


def test_products_are_interpolated_in_both_sizes() -> None:
    times = ProductTimes.through({(r, w): r * w * 1e-9 for r in (1, 16) for w in (100, 10_000)})
    assert times.at(1, 100) == pytest.approx(1e-7)
    assert times.at(4, 1000) == pytest.approx(4e-6)  # a power law is met exactly
    assert times.at(64, 10_000) == pytest.approx(64e-5)  # beyond, time grows with the work
    assert times.at(1, 10) == pytest.approx(1e-7)  # below, it stays
