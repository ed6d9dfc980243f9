"""Tests the plans of a CPU: the fastest way by predicted times, and which convolutions may be packed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_profiles import SHIPPED, scaled
from loaded import files_of
from small import all_kinds, node, program
from torch import nn

import widepack
from widepack.errors import VerificationError
from widepack.ir.values import Stacked
from widepack.kernel_times.profile import Profile
from widepack.kernels.library import FUNCTIONS
from widepack.planning import packed_convs
from widepack.planning.heuristics import plans
from widepack.planning.plan import Plan
from widepack.planning.request import StrategyRequest
from widepack.registry.registry import REGISTRY
from widepack_artifacts.program import Kind, Program, Ref


def network(
    side: int,
    *,
    dilation: int = 1,
    dtype: str = "float32",
    spatial: int = 2,
    linears: int = 0,
    groups: int = 1,
    padding: Any = 0,
    window: int = 1,
    twice: bool = False,
) -> Program:
    """Returns two convolutions of 4 channels with a relu between them, then linear layers.

    `twice`: both convolutions have the same weight.
    """
    image, kernel = ",".join([str(side)] * spatial), ",".join([str(window)] * spatial)
    weights = {
        "w": f"{dtype}[4,{4 // groups},{kernel}]",
        "v": f"{dtype}[4,{4 // groups},{kernel}]",
        "m": f"{dtype}[{side},{side}]",
    }
    rest: list[Any] = [
        [1] * spatial,
        padding if isinstance(padding, str) else [padding] * spatial,
        [dilation] * spatial,
        groups,
    ]
    op, out = f"conv{spatial}d{'.padding' if isinstance(padding, str) else ''}", f"{dtype}[B,4,{image}]"
    nodes = [
        node("one", op, Ref("x"), Ref("w"), None, *rest, out=out),
        node("r", "relu", Ref("one"), out=out),
        node("two", op, Ref("r"), Ref("w" if twice else "v"), None, *rest, out=out),
    ]
    last = "two"
    for i in range(linears):
        nodes.append(node(f"l{i}", "linear", Ref(last), Ref("m"), out=out))
        last = f"l{i}"
    return program(weights, {"x": f"{dtype}[B,4,{image}]"}, nodes, [last])


def plans_of(net: Program, members: int = 4, device: str = "cpu", requested: str = "auto") -> list[Plan]:
    slots = all_kinds(net, w="stacked", v="stacked", m="stacked")
    return plans(net, slots, members, {"B": 4}, "B", device, "shared", StrategyRequest.parse(requested))


def packed(plan: Plan) -> set[str]:
    return {n for n, c in plan.choices.items() if c.strategy == "packed"}


@pytest.fixture
def fast_packed(times: Callable[[Profile], None]) -> None:
    """Packed convolutions take no time."""
    times(scaled("packed.*convolution", 1e-3))


def test_plans_depend_on_the_kernel_times_of_the_machine(times: Callable[[Profile], None]) -> None:
    times(scaled("packed.*convolution", 1e-3))
    assert all(packed(p) == {"one", "two"} for p in plans_of(network(64)) if p.fits(8) or p.fits(64))
    times(scaled("packed.*convolution", 1e3))
    assert not any(packed(p) for p in plans_of(network(64)))


def test_members_run_in_a_loop_where_grouped_kernels_are_slow(times: Callable[[Profile], None]) -> None:
    times(scaled("grouped|batched|turned|packed", 1e3))
    assert all(p.looped() == {"one", "r", "two"} for p in plans_of(network(64)))
    times(scaled("^(packed |channels-last )?(1x1 )?convolution", 1e3))
    assert not any(p.looped() for p in plans_of(network(64)))


def test_a_reason_names_the_machine_and_both_times() -> None:
    for plan in plans_of(network(8)):
        because = plan.regions[-1].because
        assert because.startswith(f"predicted for {SHIPPED.machine}: at B = ")
        assert "one op for all" in because and "loop over" in because


def layers(rows: str = "B", count: int = 2, width: int = 256) -> Program:
    """Returns linear layers with relus between them."""
    nodes, last = [], "x"
    for i in range(count):
        out = f"float32[{rows},{width}]"
        nodes.append(node(f"l{i}", "linear", Ref(last), Ref(f"w{i}"), out=out))
        nodes.append(node(f"r{i}", "relu", Ref(f"l{i}"), out=out))
        last = f"r{i}"
    weights = {f"w{i}": f"float32[{width},{width}]" for i in range(count)}
    return program(weights, {"x": f"float32[{rows},{width}]"}, nodes, [last])


def plans_of_layers(net: Program, batch: str = "B", **sizes: int) -> list[Plan]:
    slots: dict[str, Kind] = {s.name: "stacked" for s in (*net.weights, *net.inputs)}
    return plans(net, slots, 8, sizes or {"B": 4}, batch, "cpu", "each", StrategyRequest())


def strategies(plan: Plan) -> set[str]:
    """Returns the strategies of both layers."""
    return {plan.choices[n].strategy for n in ("l0", "l1") if n in plan.choices}


def test_linear_layers_read_weights_in_the_fastest_form(times: Callable[[Profile], None]) -> None:
    for kinds, strategy in (("^packed product", "packed"), ("^turned product", "turned")):
        times(scaled(kinds, 1e-3))
        for plan in plans_of_layers(layers()):
            assert not plan.looped() and strategies(plan) == {strategy}
    times(scaled("batched|turned|packed|streamed|member|^product", 1e3))
    for plan in plans_of_layers(layers()):
        assert strategies(plan) == {"packed"} and {"l0", "l1"} <= plan.looped()
    times(scaled("turned|packed|inner|streamed|member", 1e3))
    for plan in plans_of_layers(layers()):
        assert not strategies(plan) & {"turned", "packed", "streamed"}


def test_one_row_of_each_member_is_streamed(times: Callable[[Profile], None]) -> None:
    times(scaled("^streamed product", 1e-3))
    one, *_ = plans_of_layers(layers())
    assert strategies(one) == {"streamed"} and not one.looped()


def test_every_batch_has_one_plan() -> None:
    for net in (layers(), layers(width=32), layers(count=9), network(8), network(64), network(64, linears=3)):
        found = plans_of_layers(net) if net.nodes[0].name == "l0" else plans_of(net)
        assert found[0].batch[0] == 1 and found[-1].batch[1] is None
        for before, after in itertools.pairwise(found):
            assert before.batch[1] is not None and after.batch[0] == before.batch[1] + 1


def test_a_program_without_a_batch_has_one_plan() -> None:
    (plan,) = plans_of_layers(layers("T"), batch="", T=6)
    assert plan.batch == (1, None) and " at " not in plan.regions[-1].because.partition(":")[2]


def test_sizes_that_depend_on_values_have_no_predicted_times() -> None:
    nodes = [
        node("n", "nonzero", Ref("x"), out="int64[u0,1]"),
        node("y", "mul.Tensor", Ref("x"), Ref("w"), out="float32[B]"),
    ]
    net = program({"w": "float32[1]"}, {"x": "float32[B]"}, nodes, ["y", "n"])
    (plan,) = plans(net, all_kinds(net, w="stacked"), 4, {"B": 4}, "B", "cpu", "shared", StrategyRequest())
    assert not plan.looped() and "cannot be predicted" in plan.regions[-1].because


@pytest.mark.parametrize(
    "net",
    [network(8, dilation=2), network(8, dtype="float64")],
    ids=["dilated", "float64"],
)
@pytest.mark.usefixtures("fast_packed")
def test_convolutions_that_gain_nothing_are_not_packed(net: Program) -> None:
    assert not any(packed(p) for p in plans_of(net))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("fast_packed")
def test_convolutions_of_16_bits_are_packed(dtype: str) -> None:
    assert packed(plans_of(network(8, dtype=dtype))[0]) == {"one", "two"}


@pytest.mark.usefixtures("fast_packed")
def test_weights_beyond_the_limit_are_not_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = (
        4 * 4 * 16 * 16
    )  # bytes of one packed float32 weight of four members: 4 x 4 numbers in blocks of 16 x 16
    monkeypatch.setattr(packed_convs, "PACKED_BYTES", 2 * one - 1)
    assert not any(packed(p) for p in plans_of(network(8)))
    monkeypatch.setattr(packed_convs, "PACKED_BYTES", 2 * one)
    assert packed(plans_of(network(8))[0]) == {"one", "two"}


@pytest.mark.usefixtures("fast_packed")
def test_weights_that_grow_many_times_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(plans_of(network(8))[0]), "a few bytes may become many times as many"
    monkeypatch.setattr(packed_convs, "SMALL_BYTES", 0)
    assert not packed(plans_of(network(8))[0])
    monkeypatch.setattr(packed_convs, "MOST_PADDED", 16)
    assert packed(plans_of(network(8))[0]) == {"one", "two"}


@pytest.mark.usefixtures("fast_packed")
def test_a_weight_of_two_convolutions_is_not_packed() -> None:
    assert not any(packed(p) for p in plans_of(network(8, twice=True)))


@pytest.mark.usefixtures("fast_packed")
def test_a_plan_packs_only_convolutions_with_a_packed_form() -> None:
    """A Shared input of several groups and `same` padding of an even window have no packed form."""
    assert packed(plans_of(network(8, groups=2))[0]) == {"two"}
    assert packed(plans_of(network(8, padding="same", window=3))[0]) == {"one", "two"}
    assert not any(packed(p) for p in plans_of(network(8, padding="same", window=2)))


@pytest.mark.usefixtures("fast_packed")
def test_a_plan_records_that_packing_was_switched_off() -> None:
    slots = all_kinds(network(8), w="stacked", v="stacked", m="stacked")
    found = plans(network(8), slots, 4, {"B": 4}, "B", "cpu", "shared", StrategyRequest(plain=True))
    assert not any(packed(p) for p in found) and all(
        p.plain and Plan.from_json(p.to_json()) == p for p in found
    )


def test_loops_pack_no_1d_convolutions(times: Callable[[Profile], None]) -> None:
    times(scaled("grouped|batched|turned", 1e6))
    for plan in plans_of(network(2000, spatial=1)):
        assert plan.looped() and not packed(plan)


@pytest.mark.parametrize("requested", ["wide", "loop"])
def test_a_requested_plan_packs_nothing(requested: str) -> None:
    (plan,) = plans_of(network(8), requested=requested)
    assert not packed(plan)


def test_other_devices_pack_nothing() -> None:
    (plan,) = plans_of(network(8), device="cuda")
    assert not packed(plan)


def test_a_strategy_that_the_user_prefers_comes_first() -> None:
    small, *_ = plans_of(network(8), requested="grouped")
    assert {c.strategy for c in small.choices.values()} == {"grouped"}


def member(i: int) -> nn.Module:
    torch.manual_seed(i)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def built(folder: Path, members: int = 4) -> widepack.BuildReport:
    """Builds `e.wide` with this number of members."""
    paths = files_of(folder, map(member, range(members)))
    return widepack.build(
        paths, folder / "e.wide", model=lambda: member(0), inputs=["input=float32[B,3,16,16]"], pt2=False
    )


@pytest.mark.extended
def test_an_artifact_has_plain_convolutions_where_packed_ones_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If packed convolutions give wrong answers in the build, the plans use plain ones.

    Here every packed convolution is wrong.
    """
    original = FUNCTIONS["widepack.convolution.default"]
    monkeypatch.setitem(FUNCTIONS, "widepack.convolution.default", lambda *given: original(*given) * 1.001)

    report = built(tmp_path)
    assert not any("packed" in p["strategies"] for p in report.plans)
    x = torch.randn(5, 3, 16, 16)
    truth = torch.stack([member(i)(x) for i in range(4)]).detach()
    ens = widepack.load(tmp_path / "e.wide")
    assert all(p.plain for p in ens.plans())
    torch.testing.assert_close(ens(x).clone(), truth)
    some = widepack.load(tmp_path / "e.wide", members=[2, 0])  # lowered again
    assert all(p.plain for p in some.plans())
    torch.testing.assert_close(some(x).clone(), truth[[2, 0]])
    tuned = widepack.tune(
        tmp_path / "e.wide", batches=[4], patterns=["shared"], budget_s=0.1, backends=["eager"], write=True
    )
    assert "packed" not in tuned.rows[0].strategies and "predicted" in tuned.rows[0].times_ms
    torch.testing.assert_close(widepack.load(tmp_path / "e.wide")(x).clone(), truth)


def test_answers_that_are_wrong_without_packed_convolutions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategies = REGISTRY["aten.relu.default"].strategies
    wrong = replace(
        strategies["pointwise"], rule=lambda w, x: Stacked(w.call("relu", w.call("neg", x.value)))
    )
    monkeypatch.setitem(strategies, "pointwise", wrong)
    with pytest.raises(VerificationError, match=r"first wrong node: relu"):
        built(tmp_path)
    assert not (tmp_path / "e.wide").exists()
