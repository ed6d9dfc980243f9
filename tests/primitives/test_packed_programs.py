"""Tests programs with prepacked weights: layers, fused activations, and loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from packed_cases import OWN, chosen, needs_onednn, rand
from small import all_kinds, node, program, stacked_weights

from widepack.ir.values import Shared, Stacked, Value
from widepack.kernels import packed
from widepack.kernels.decompose import decompose
from widepack.lowering.lower import lower
from widepack.planning.plan import Region
from widepack.registry.registry import REGISTRY
from widepack.registry.writer import EagerWriter
from widepack.runtime.executable import Executable
from widepack.runtime.prologue import split
from widepack.runtime.unroll import unroll
from widepack_artifacts.program import Program, Ref


def net() -> Program:
    """Returns a convolution, a relu, a pool, and two layers, one over a value that all members may share."""
    weights = {"wc": "float32[6,4,3,3]", "bc": "float32[6]", "w": "float32[5,6]", "b": "float32[5]"}
    return program(weights | {"v": "float32[3,5]"}, {"x": "float32[B,4,6,5]"}, [
        node("c", "conv2d", Ref("x"), Ref("wc"), Ref("bc"), [1, 1], [1, 1], out="float32[B,6,6,5]"),
        node("r", "relu", Ref("c"), out="float32[B,6,6,5]"),
        node("p", "max_pool2d", Ref("r"), [2, 2], out="float32[B,6,3,2]"),
        node("m", "mean.dim", Ref("p"), [2, 3], out="float32[B,6]"),
        node("l", "linear", Ref("m"), Ref("w"), Ref("b"), out="float32[B,5]"),
        node("g", "gelu", Ref("l"), out="float32[B,5]"),
        node("y", "linear", Ref("g"), Ref("v"), out="float32[B,3]"),
    ], ["y"])  # fmt: skip


BATCHES = ({"B": 1}, {"B": 4}, {"B": 7})


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("name", ["packed", "turned", "streamed"])
@pytest.mark.parametrize("chosen_kinds", [{"x": "stacked"}, {}, {"wc": "shared", "bc": "shared"}])
def test_a_program_of_packed_layers_gives_each_members_answer(
    name: str, chosen_kinds: dict[str, Any]
) -> None:
    member_program = net()
    slots = stacked_weights(member_program, **chosen_kinds)
    wide = lower([member_program], [0, 0, 0], slots, chosen(member_program, name), small.SIZES).program
    packed_ops = [n.op for n in wide.nodes if n.op.startswith("widepack.")]
    assert bool(packed_ops) is (name != "turned")
    small.check_forms(member_program, wide, slots, sizes=BATCHES)


def with_activation(act: str, more: tuple[Any, ...] = (), **options: Any) -> Program:
    return program({"w": "float32[5,6]", "b": "float32[5]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), Ref("b"), out="float32[B,5]"),
        node("a", act, Ref("l"), *more, out="float32[B,5]", **options),
        node("y", "add.Tensor", Ref("a"), Ref("a"), out="float32[B,5]"),
    ], ["y"])  # fmt: skip


@pytest.mark.parametrize("act", [a for a in packed.ACTIVATIONS if a])
@pytest.mark.parametrize("x", ["shared", "stacked"])
def test_an_activation_is_computed_in_place_in_the_layer(act: str, x: Any) -> None:
    member_program = with_activation(act)
    slots = all_kinds(member_program, w="stacked", b="stacked", x=x)
    lowered = lower([member_program], [0, 0, 0], slots, chosen(member_program, "packed"), small.SIZES)
    (layer,) = (n for n in lowered.program.nodes if n.op == "widepack.linear.default")
    assert layer.args[3:] == (act,)
    assert f"aten.{act}.default" not in [n.op for n in lowered.program.nodes]
    assert "l" not in lowered.values and lowered.values["a"] in {n.name for n in lowered.program.nodes}
    small.check_forms(member_program, lowered.program, slots)


def test_an_activation_is_not_fused_if_it_is_unknown_or_the_layers_answer_is_read_elsewhere() -> None:
    other = with_activation("gelu", approximate="tanh")
    read = with_activation("relu")
    read = replace(read, outputs=(*read.outputs, replace(read.outputs[0], value=Ref("l"))))
    twice = program({"w": "float32[5,6]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), out="float32[B,5]"),
        node("a", "relu", Ref("l"), out="float32[B,5]"),
        node("y", "tanh", Ref("l"), out="float32[B,5]"),
    ], ["y", "a"])  # fmt: skip
    for member_program in (other, read, twice):
        slots = all_kinds(member_program, w="stacked")
        lowered = lower([member_program], [0, 0, 0], slots, chosen(member_program, "packed"), small.SIZES)
        assert [n.args[3:] for n in lowered.program.nodes if n.op == "widepack.linear.default"] == [()]
        small.check(member_program, lowered.program, slots)


def test_of_two_activations_only_the_first_is_fused() -> None:
    member_program = program({"w": "float32[5,6]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), out="float32[B,5]"),
        node("a", "tanh", Ref("l"), out="float32[B,5]"),
        node("y", "relu", Ref("a"), out="float32[B,5]"),
    ], ["y"])  # fmt: skip
    slots = all_kinds(member_program, w="stacked", x="stacked")
    wide = lower([member_program], [0, 0, 0], slots, chosen(member_program, "packed"), small.SIZES).program
    assert [n.op.split(".")[1] for n in wide.nodes][-2:] == ["linear", "relu"]
    small.check(member_program, wide, slots)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'selu' is unknown; known: gelu, relu"):
        OWN.linear(rand(2, 5, 4), OWN.pack_linear(rand(2, 3, 4), 5), None, "selu")


@pytest.mark.parametrize(
    "chosen_kinds", [{"x": "stacked"}, {}, {"wc": "shared", "bc": "shared", "x": "stacked"}]
)
def test_a_loop_over_packed_weights_gives_each_members_answer(chosen_kinds: dict[str, Any]) -> None:
    member_program = net()
    slots = stacked_weights(member_program, **chosen_kinds)
    region = Region("members", "loop", tuple(n.name for n in member_program.nodes), "requested")
    plan = replace(chosen(member_program, "packed"), regions=(region,))
    lowered = lower([member_program], [0, 0, 0], slots, plan, small.SIZES)
    assert set(lowered.used.values()) == {"loop"}
    (body,) = (n.body for n in lowered.program.nodes if n.body is not None)
    assert [n.op for n in body.nodes][:2] == ["widepack.convolution.default", "aten.max_pool2d.default"]
    assert len([n for n in lowered.program.nodes if ".pack_" in n.op]) == 3
    small.check_forms(member_program, lowered.program, slots, sizes=BATCHES)
    small.check(member_program, decompose(unroll(lowered.program)), slots)


def test_a_loop_packs_no_weight_that_is_computed_in_every_call() -> None:
    member_program = program({"w": "float32[6,4,3,3]"}, {"x": "float32[B,4,6,5]", "s": "float32[6,1,1,1]"}, [
        node("own", "mul.Tensor", Ref("w"), Ref("s"), out="float32[6,4,3,3]"),
        node("c", "conv2d", Ref("x"), Ref("own"), out="float32[B,6,4,3]"),
    ], ["c"])  # fmt: skip
    slots = all_kinds(member_program, w="stacked")
    plan = replace(
        chosen(member_program, "packed"), regions=(Region("members", "loop", ("own", "c"), "requested"),)
    )
    wide = lower([member_program], [0, 0, 0], slots, plan, small.SIZES).program
    assert not [n for n in wide.nodes if n.op.startswith("widepack.")]
    small.check(member_program, wide, slots)


@needs_onednn
def test_weights_are_packed_once_and_never_read_again() -> None:
    member_program = net()
    slots = stacked_weights(member_program)
    wide = lower([member_program], [0, 0, 0], slots, chosen(member_program, "packed"), small.SIZES).program
    parts = split(wide)
    assert not [n for n in parts.main.nodes if ".pack_" in n.op]
    weights = {
        s.source: small.of_kind(w, slots[s.name])
        for s, w in zip(member_program.weights, small.values(member_program.weights, slots, 3))
    }
    run = Executable(wide, weights, small.CPU)
    assert sum(w.is_mkldnn for w in run.weights) == 3
    assert not [w for w in run.weights if w.layout is torch.strided and w.ndim == 5], (
        "the weight in its original order is not stored"
    )


def test_packed_applies_to_float32_and_16_bits_on_a_cpu() -> None:
    def value(*shape: int, dtype: torch.dtype = torch.float32) -> Value:
        return Value(None, torch.zeros(shape, dtype=dtype))

    layer, image = (REGISTRY[f"aten.{op}.default"].strategies["packed"] for op in ("linear", "conv2d"))

    def applies(strategy: Any, *args: Any, device: str = "cpu") -> bool:
        w = EagerWriter(3, device)
        w.op = "aten.linear.default" if strategy is layer else "aten.conv2d.default"
        return bool(strategy.when(w, *args))

    for device, dtype, expected in (
        ("cpu", torch.float32, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.float64, False),
        ("cpu", torch.bfloat16, True),
        ("cpu", torch.float16, True),
    ):
        rows, matrix = (Stacked(value(*s, dtype=dtype)) for s in ((3, 5, 4), (3, 6, 4)))
        assert applies(layer, rows, matrix, device=device) is expected
        pixels, filters = (Stacked(value(*s, dtype=dtype)) for s in ((3, 5, 4, 6, 6), (3, 6, 4, 3, 3)))
        assert applies(image, pixels, filters, device=device) is expected
    pixels = Stacked(value(3, 5, 4, 6, 6))
    assert not applies(image, pixels, Shared(value(6, 4, 3, 3))), "a Shared weight runs in the strategy fold"
    grouped = Shared(value(5, 4, 6, 6)), Stacked(value(3, 6, 2, 3, 3)), None, [1], [0], [1], 2
    assert not applies(image, *grouped), "a Shared input of groups would be copied"
    assert not applies(image, pixels, Stacked(value(3, 6, 4, 0, 3)))
    assert not applies(layer, Stacked(value(3, 5, 0)), Stacked(value(3, 6, 0))), "nothing to pack"
