"""Tests the plans of a CUDA device: strategies, batch classes, reasons, and how long a plan takes."""

from __future__ import annotations

import re
import time
from functools import cache
from typing import Any

import pytest
import small
from small import all_kinds, node, program
from torch import nn

from widepack.building.preview import Preview
from widepack.checkpoints.named_factory import find_factory
from widepack.kernel_times.cuda import CudaModel
from widepack.lowering.pattern_programs import PatternPrograms
from widepack.planning import cuda_plans as cuda
from widepack.planning.heuristics import plans
from widepack.planning.plan import REQUESTED, Plan
from widepack.planning.request import StrategyRequest
from widepack.system.devices import DEVICES
from widepack_artifacts.program import Program, Ref
from widepack_bench.suite.rows import ROWS

NETWORKS = {row.name: row for row in ROWS}
REASON = re.compile(
    r"about [\d,.]+ us on an H100: \d+ kernels?, bound by (starts|computing|moving bytes)"
    r"(; next \w+, [\d,.]+ us)?"
)


@cache
def preview(name: str) -> Preview:
    row = NETWORKS[name]
    form = row.form("cpu")
    return Preview(find_factory(row.model, dict(form.options)), list(form.inputs))


def network(name: str, pattern: str = "each") -> PatternPrograms:
    return preview(name).of(NETWORKS[name].members, pattern)


def plans_of(of: PatternPrograms, requested: str = "auto") -> list[Plan]:
    request = StrategyRequest.parse(requested)
    return of.plans("cuda", request)


def made(make: Any, spec: str, members: int, pattern: str = "each") -> PatternPrograms:
    return Preview(make, [spec]).of(members, pattern)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("deep-mlp", "each", {"bmm": 9, "pointwise": 8}),
        ("deep-mlp", "shared", {"one_gemm": 1, "bmm": 8, "pointwise": 8}),
        ("resblock", "each", {"grouped": 2, "pointwise": 3}),
        ("resblock", "shared", {"one_conv": 1, "grouped": 1, "pointwise": 3}),
        ("gru-8", "each", {"fused": 1, "dim": 1, "bmm": 1}),
    ],
)
def test_networks_of_the_suite(name: str, pattern: str, expected: dict[str, int]) -> None:
    of = network(name, pattern)
    for plan in plans_of(of):
        assert plan.strategies() == expected and not plan.looped()
        assert all(REASON.fullmatch(choice.because) for choice in plan.choices.values())
        lowered = of.lower(plan)
        assert all(lowered.used[name] == choice.strategy for name, choice in plan.choices.items())
        assert plan.regions[0].because.startswith("predicted for an H100: at B = 2 one op for all members")
        assert Plan.from_json(plan.to_json()) == plan


def convolution(channels: int, **options: Any) -> Any:
    return lambda: nn.Conv2d(channels, channels, 3, padding=1, **options)


def test_small_members_share_a_kernel_and_large_ones_have_their_own() -> None:
    spec = "input=float32[B,256,32,32]"
    small_batch, large_batch = plans_of(made(convolution(256), spec, 8))
    assert [list(p.strategies()) for p in (small_batch, large_batch)] == [["grouped"], ["streams"]]
    assert small_batch.batch[0] == 1 and large_batch.batch == (small_batch.batch[1] + 1, None)  # type: ignore[operator]
    assert "; next streams, " in small_batch.choices["conv2d"].because
    assert "; next grouped, " in large_batch.choices["conv2d"].because
    assert small_batch.regions[0].because.count("at B = ") == 1
    (narrow,) = plans_of(made(convolution(8), spec.replace("256", "8"), 8))
    assert narrow.strategies() == {"grouped": 1} and narrow.batch == (1, None)


def test_half_precision_leaves_grouped_convolutions_earlier() -> None:
    def make() -> nn.Module:
        return nn.Sequential(convolution(256)(), nn.ReLU(), convolution(256)()).bfloat16()

    first, second = plans_of(made(make, "input=bfloat16[B,256,32,32]", 8))
    assert second.strategies() == {"streams": 2, "pointwise": 1}
    assert first.batch[1] is not None and first.batch[1] < 16


def test_a_depthwise_convolution_stays_grouped() -> None:
    for plan in plans_of(made(convolution(64, groups=64), "input=float32[B,64,32,32]", 8)):
        assert plan.strategies() == {"grouped": 1}


def test_the_boundary_is_where_both_plans_take_the_same_time() -> None:
    of = made(convolution(64), "input=float32[B,64,32,32]", 20)
    small_batch, large_batch = plans_of(of)
    predictor = cuda.Predictor(of.program, of.slots, 20, {}, False, CudaModel())
    assert small_batch.batch[1] is not None
    for batch, before in ((2, True), (small_batch.batch[1], True), (2 * small_batch.batch[1] + 2, False)):
        at = {**of.sizes, "B": batch}
        seconds = [
            predictor.times(at, lambda n, t, name=name: name).total.seconds  # type: ignore[misc]
            for name in ("grouped", "streams")
        ]
        assert (seconds[0] <= seconds[1]) == before
    assert list(large_batch.strategies()) == ["streams"]


def test_a_loop_is_chosen_where_it_is_predicted_to_be_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    of = made(convolution(256), "input=float32[B,256,32,32]", 8)
    monkeypatch.setattr(cuda, "LOOP_PART", 100.0)
    (loop,) = plans_of(of)
    assert loop.looped() and "a loop over the members takes about" in loop.regions[0].because
    assert not any(p.looped() for p in plans_of(of, "wide"))


def test_what_the_user_requests_stays() -> None:
    of = made(convolution(256), "input=float32[B,256,32,32]", 8)
    for plan in plans_of(of, "unfold_bmm"):
        assert plan.choices["conv2d"].requested and plan.strategies() == {"unfold_bmm": 1}
    for plan in plans_of(of, "wide"):
        assert {r.because for r in plan.regions} == {REQUESTED}
    (loop,) = plans_of(of, "loop")
    assert loop.looped() and loop.regions[0].because == REQUESTED


@pytest.mark.extended
def test_a_plan_of_first_strategies_has_the_program_of_the_cpu() -> None:
    """An artifact has one program for both devices then: choices that change nothing are marked."""
    (plan,) = plans_of(network("deep-mlp"))
    assert all(choice.first for choice in plan.choices.values())
    large = plans_of(made(convolution(256), "input=float32[B,256,32,32]", 8))[1]
    assert not large.choices["conv2d"].first
    embedding = made(lambda: nn.Embedding(50, 8), "input=int64[B,4]:0..49", 4)
    (looked_up,) = plans_of(embedding)
    assert looked_up.strategies() == {"gather": 1}


def test_training_takes_strategies_with_derivatives() -> None:
    of = made(convolution(256), "input=float32[B,256,32,32]", 8)
    request = StrategyRequest(training=True)
    found = of.plans("cuda", request)
    assert all("streams" not in plan.strategies() for plan in found)


def chain(side: int = 6) -> Program:
    """Returns two convolutions with a relu between them, and a mean."""
    image = f"float32[B,4,{side},{side}]"
    weights = {"w": "float32[4,4,3,3]", "b": "float32[4]", "v": "float32[4,4,1,1]"}
    return program(weights, {"x": image}, [
        node("one", "conv2d", Ref("x"), Ref("w"), Ref("b"), [1, 1], [1, 1], out=image),
        node("r", "relu", Ref("one"), out=image),
        node("two", "conv2d", Ref("r"), Ref("v"), out=image),
        node("y", "mean.dim", Ref("two"), [2, 3], out="float32[B,4]"),
    ], ["y"])  # fmt: skip


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("preferred", ["auto", "streams", "unfold_bmm", "bmm_1x1", "grouped_channels_last"])
def test_plans_for_cuda_run_right_on_the_cpu(preferred: str) -> None:
    net = chain()
    slots = all_kinds(net, x="stacked", w="stacked", b="stacked", v="stacked")
    request = StrategyRequest.parse(preferred)
    for plan in plans(net, slots, 3, {"B": 4}, "B", "cuda", "each", request):
        small.check(net, small.lowered(net, slots, plan, 3).program, slots, 3)


def test_sizes_that_depend_on_values_leave_the_first_strategies() -> None:
    net = program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("y", "linear", Ref("x"), Ref("w"), out="float32[B,4]"),
        node("m", "gt.Scalar", Ref("x"), 0.0, out="bool[B,4]"),
        node("z", "masked_select", Ref("x"), Ref("m"), out="float32[u0]"),
        node("s", "sum", Ref("z"), out="float32[]"),
        node("o", "mul.Tensor", Ref("y"), Ref("s"), out="float32[B,4]"),
    ], ["o"])  # fmt: skip
    slots = all_kinds(net, w="stacked")
    (plan,) = plans(net, slots, 3, {"B": 4}, "B", "cuda", "shared", StrategyRequest())
    assert not plan.choices and "cost N times the launches" in plan.regions[0].because
    slots = all_kinds(net, w="stacked", x="stacked")
    (plan,) = plans(net, slots, 3, {"B": 4}, "B", "cuda", "each", StrategyRequest())
    assert plan.strategies() == {"bmm": 1, "pointwise": 1, "loop": 3}, "numbers of one member in a loop"


def test_a_guard_on_the_batch_leaves_one_class() -> None:
    """The members of this batch cannot be regrouped at other batches: the example's sizes count."""
    net = program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("v", "view", Ref("x"), [3, 4, 4], out="float32[3,4,4]"),
        node("y", "linear", Ref("v"), Ref("w"), out="float32[3,4,4]"),
    ], ["y"])  # fmt: skip
    slots = all_kinds(net, w="stacked", x="stacked")
    (plan,) = plans(net, slots, 5, {"B": 12}, "B", "cuda", "each", StrategyRequest())
    assert plan.strategies()["bmm"] == 1 and "at B = 12 one op" in plan.regions[0].because


def test_members_of_other_shapes_run_member_after_member() -> None:
    net = chain()
    slots = all_kinds(net, x="stacked", w="ragged", b="ragged", v="stacked")
    (plan,) = plans(net, slots, 3, {"B": 4}, "B", "cuda", "each", StrategyRequest())
    assert plan.looped() == {"one", "r", "two", "y"} and not plan.choices
    slots = all_kinds(net, x="stacked", w="stacked", b="stacked", v="ragged")
    (plan,) = plans(net, slots, 3, {"B": 4}, "B", "cuda", "each", StrategyRequest())
    assert plan.looped() == {"two", "y"} and plan.strategies() == {"grouped": 1, "pointwise": 1, "loop": 2}
    assert any(r.because.startswith("predicted for an H100") for r in plan.regions)


def test_a_plan_takes_less_time_than_to_lower_it() -> None:
    of = network("resblock")
    plans_of(of)  # imports, and caches of torch
    begin = time.thread_time()
    (plan,) = plans_of(of)
    planned, begin = time.thread_time() - begin, time.thread_time()
    of.lower(plan)
    assert planned < max(0.2, 4 * (time.thread_time() - begin))


def test_another_device_has_other_times() -> None:
    of = made(convolution(64), "input=float32[B,64,32,32]", 8)
    times = {}
    for name in ("h100", "a100", "l4"):
        model = CudaModel(DEVICES[name])
        predictor = cuda.Predictor(of.program, of.slots, 8, {}, False, model)
        times[name] = predictor.at({**of.sizes, "B": 256}, 256).wide.total.seconds
    assert times["h100"] < times["a100"] < times["l4"]


PUBLISHED = {"mlp-b32": 40, "deep-mlp": 6.2, "resblock": 4.9, "resnet18": 2.3}
"""Speed-ups of WideCompiler's wide programs on an A100, eager, against an eager loop."""


@pytest.mark.slow
def test_the_model_ranks_published_speed_ups() -> None:
    found = {}
    for name in PUBLISHED:
        row = NETWORKS[name]
        form = row.form("full")
        model = Preview(find_factory(row.model, dict(form.options)), list(form.inputs))
        of = model.of(row.members)
        a100 = CudaModel(DEVICES["a100"])
        predictor = cuda.Predictor(of.program, of.slots, row.members, {}, False, a100)
        times = predictor.at({**of.sizes, of.batch: row.batch}, row.batch)
        found[name] = times.loop.seconds / times.wide.total.seconds
    assert sorted(found, key=found.__getitem__) == sorted(PUBLISHED, key=PUBLISHED.__getitem__)
