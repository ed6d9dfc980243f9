"""Tests the rules of thumb: which convolutions they prepack, and which batches run wide on a CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of
from small import all_kinds, node, program
from torch import nn

import widepack
from widepack.errors import VerificationError
from widepack.ir.kinds import kinds
from widepack.ir.values import Stacked
from widepack.kernels.library import FUNCTIONS
from widepack.planning import cpu_plans, packed_convs, working_set
from widepack.planning.cpu_plans import PACKED
from widepack.planning.heuristics import plans
from widepack.planning.plan import Plan
from widepack.planning.request import StrategyRequest
from widepack.planning.working_set import CACHE_BYTES, MEMBER_BYTES
from widepack.registry.registry import REGISTRY
from widepack_artifacts.program import Program, Ref

ONES, NONE = [1, 1], [0, 0]


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


def bytes_of_a_row(side: int, members: int) -> int:
    """Returns the bytes that each op reads and writes at batch size 1, for all members, without weights."""
    return 2 * members * 4 * 4 * side * side


def test_small_images_run_wide_with_packed_weights_and_loop_at_large_batches_with_plain_ones() -> None:
    small, large = plans_of(network(8))
    at = PACKED * CACHE_BYTES // bytes_of_a_row(8, 4)
    assert small.batch[0] == 1 and large.batch == (small.batch[1] + 1, None)  # type: ignore[operator]
    assert small.batch[1] == pytest.approx(at, rel=0.2), (
        "the first convolution's input is Shared and read once"
    )
    assert packed(small) == {"one", "two"} and not small.looped()
    assert not packed(large) and large.looped() == {"one", "r", "two"}


def test_large_images_loop_with_packed_weights_and_run_wide_with_plain_ones() -> None:
    small, large = plans_of(network(64))
    assert small.batch[1] == pytest.approx(CACHE_BYTES / bytes_of_a_row(64, 4), abs=1)
    assert not packed(small) and not small.looped()
    assert packed(large) == {"one", "two"} and large.looped()


@pytest.mark.parametrize(
    "net",
    [network(8, dilation=2), network(8, dtype="float64")],
    ids=["dilated", "float64"],
)
def test_convolutions_that_gain_nothing_are_not_packed(net: Program) -> None:
    assert not any(packed(p) for p in plans_of(net))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_convolutions_of_16_bits_are_packed(dtype: str) -> None:
    assert packed(plans_of(network(8, dtype=dtype))[0]) == {"one", "two"}


def test_weights_beyond_the_limit_are_not_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = (
        4 * 4 * 16 * 16
    )  # bytes of one packed float32 weight of four members: 4 x 4 numbers in blocks of 16 x 16
    monkeypatch.setattr(packed_convs, "PACKED_BYTES", 2 * one - 1)
    assert not any(packed(p) for p in plans_of(network(8)))
    monkeypatch.setattr(packed_convs, "PACKED_BYTES", 2 * one)
    assert packed(plans_of(network(8))[0]) == {"one", "two"}


def test_weights_that_grow_many_times_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(plans_of(network(8))[0]), "a few bytes may become many times as many"
    monkeypatch.setattr(packed_convs, "SMALL_BYTES", 0)
    assert not packed(plans_of(network(8))[0])
    monkeypatch.setattr(packed_convs, "MOST_PADDED", 16)
    assert packed(plans_of(network(8))[0]) == {"one", "two"}


def test_a_weight_of_two_convolutions_is_not_packed() -> None:
    assert not any(packed(p) for p in plans_of(network(8, twice=True)))


def test_a_plan_packs_only_convolutions_with_a_packed_form() -> None:
    """A Shared input of several groups and `same` padding of an even window have no packed form."""
    assert packed(plans_of(network(8, groups=2))[0]) == {"two"}
    assert packed(plans_of(network(8, padding="same", window=3))[0]) == {"one", "two"}
    assert not any(packed(p) for p in plans_of(network(8, padding="same", window=2)))


def test_a_plan_records_that_packing_was_switched_off() -> None:
    slots = all_kinds(network(8), w="stacked", v="stacked", m="stacked")
    found = plans(network(8), slots, 4, {"B": 4}, "B", "cpu", "shared", StrategyRequest(plain=True))
    assert not any(packed(p) for p in found) and all(
        p.plain and Plan.from_json(p.to_json()) == p for p in found
    )


def test_a_network_of_linear_layers_with_a_convolution_keeps_its_limit() -> None:
    """A transformer with a patch embedding is not planned as a convolutional network."""
    (few, _), (many, loop) = plans_of(network(8)), plans_of(network(8, linears=5))
    assert many.batch[1] * 2 < few.batch[1]  # type: ignore[operator]
    assert not packed(many) and packed(loop) == {"one", "two"}


def test_loops_pack_no_1d_convolutions() -> None:
    (loop,) = plans_of(network(20000, spatial=1))
    assert loop.looped() and not packed(loop)


def test_many_members_of_few_activations_run_wide_beyond_the_cache() -> None:
    """A hundred launches cost more time than a pass over memory."""
    net = network(16)
    slots = all_kinds(net, w="stacked", v="stacked")
    grows = working_set.activations(net, kinds(net, slots), 100, {"B": 4}, "B")
    at = grows.crossover()
    assert (
        at is not None
        and grows.fixed + grows.slope * at <= 100 * MEMBER_BYTES < grows.fixed + grows.slope * (at + 1)
    )
    assert f"up to B = {at} they are within {100 * MEMBER_BYTES // 1024} KiB" in grows.because()


def test_a_loop_of_small_calls_reads_plain_weights() -> None:
    """Small batches run wide, and large ones loop over packed weights. Between them, the members run in a
    loop, but an op of one member is still small, and the weights stay plain.
    """
    small, plain, large = plans_of(network(48), members=100)
    assert not small.looped() and plain.looped() and large.looped()
    assert plain.batch == (small.batch[1] + 1, large.batch[0] - 1)  # type: ignore[operator]
    read = bytes_of_a_row(48, 1) * 5 / 6  # the first of three ops reads a Shared input, which is stored once
    assert large.batch[0] == math.ceil(cpu_plans.LOOP_BYTES / read)
    assert not packed(small) and not packed(plain) and packed(large) == {"one", "two"}


@pytest.mark.parametrize("requested", ["wide", "loop"])
def test_a_requested_plan_packs_nothing(requested: str) -> None:
    (plan,) = plans_of(network(8), requested=requested)
    assert not packed(plan)


def test_other_devices_pack_nothing() -> None:
    (plan,) = plans_of(network(8), device="cuda")
    assert not packed(plan)


def test_a_strategy_that_the_user_prefers_comes_first() -> None:
    small, _ = plans_of(network(8), requested="grouped")
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
