"""Tests programs with prepacked weights: layers, fused activations, and loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from packed_cases import OWN, rand
from small import all_kinds, node, program

from widepack.ir.values import Shared, Stacked, Value
from widepack.kernels import packed
from widepack.kernels.decompose import decompose
from widepack.lowering.lower import lower
from widepack.planning.plan import NodeChoice, Plan, Region
from widepack.registry.registry import REGISTRY
from widepack.registry.writer import EagerWriter
from widepack.runtime.executable import Executable
from widepack.runtime.graph_module import graph_module
from widepack.runtime.prologue import split
from widepack.runtime.unroll import unroll
from widepack_artifacts.program import Program, Ref

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")  # type: ignore[no-untyped-call]


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


def agree(
    member_program: Program, wide: Program, kinds: dict[str, Any], sizes: dict[str, int], prologue: bool
) -> None:
    """Compares the wide program with each member, with the bound of test_oracle.py: 32 ulp of the largest
    number.
    """
    weights, inputs = (
        small.values(member_program.weights, kinds, 3, sizes),
        small.values(member_program.inputs, kinds, 3, sizes),
    )
    run = Executable(
        wide,
        {s.source: small.of_kind(w, kinds[s.name]) for s, w in zip(member_program.weights, weights)},
        small.CPU,
        prologue=prologue,
    )
    got = run.run(*(small.of_kind(x, kinds[s.name]) for s, x in zip(member_program.inputs, inputs)))
    member = graph_module(member_program, small.CPU)
    for i in range(3):
        with torch.inference_mode():
            want = member(*(w[i] for w in weights), *(x[i] for x in inputs))
        for g, member_answer, o in zip(got, want, wide.outputs, strict=True):
            answer = g if o.kind == "shared" else g[i]
            assert answer.shape == member_answer.shape
            assert float((answer - member_answer).abs().max()) <= 32 * torch.finfo(
                member_answer.dtype
            ).eps * float(member_answer.abs().max())


def chosen(member_program: Program, name: str) -> Plan:
    choices = {
        n.name: NodeChoice(name, "requested")
        for n in member_program.nodes
        if n.op in REGISTRY and name in REGISTRY[n.op].strategies
    }
    return Plan("cpu", "shared", (1, None), (), choices)


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("name", ["packed", "turned", "streamed"])
@pytest.mark.parametrize("chosen_kinds", [{"x": "stacked"}, {}, {"wc": "shared", "bc": "shared"}])
def test_a_program_of_packed_layers_gives_each_members_answer(
    name: str, chosen_kinds: dict[str, Any]
) -> None:
    member_program = net()
    slots = all_kinds(
        member_program,
        **{**dict.fromkeys((s.name for s in member_program.weights), "stacked"), **chosen_kinds},
    )
    wide = lower([member_program], [0, 0, 0], slots, chosen(member_program, name), small.SIZES).program
    packed_ops = [n.op for n in wide.nodes if n.op.startswith("widepack.")]
    assert bool(packed_ops) is (name != "turned")
    again = Program.from_json(wide.to_json())
    again.check()
    for form in (wide, again, decompose(wide)):
        for prologue in (True, False):
            for sizes in ({"B": 1}, {"B": 4}, {"B": 7}):
                agree(member_program, form, slots, sizes, prologue)
    assert not [n.op for n in decompose(wide).nodes if n.op.startswith("widepack.")]


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
    for form in (lowered.program, decompose(lowered.program)):
        agree(member_program, form, slots, {"B": 4}, True)


def test_an_activation_is_not_fused_if_it_is_unknown_or_the_layers_answer_is_read_elsewhere() -> None:
    other = with_activation("gelu", approximate="tanh")
    read = replace(
        with_activation("relu"),
        outputs=(
            *with_activation("relu").outputs,
            replace(with_activation("relu").outputs[0], value=Ref("l")),
        ),
    )
    twice = program({"w": "float32[5,6]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), out="float32[B,5]"),
        node("a", "relu", Ref("l"), out="float32[B,5]"),
        node("y", "tanh", Ref("l"), out="float32[B,5]"),
    ], ["y", "a"])  # fmt: skip
    for member_program in (other, read, twice):
        slots = all_kinds(member_program, w="stacked")
        lowered = lower([member_program], [0, 0, 0], slots, chosen(member_program, "packed"), small.SIZES)
        assert [n.args[3:] for n in lowered.program.nodes if n.op == "widepack.linear.default"] == [()]
        agree(member_program, lowered.program, slots, {"B": 4}, True)


def test_of_two_activations_only_the_first_is_fused() -> None:
    member_program = program({"w": "float32[5,6]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), out="float32[B,5]"),
        node("a", "tanh", Ref("l"), out="float32[B,5]"),
        node("y", "relu", Ref("a"), out="float32[B,5]"),
    ], ["y"])  # fmt: skip
    slots = all_kinds(member_program, w="stacked", x="stacked")
    wide = lower([member_program], [0, 0, 0], slots, chosen(member_program, "packed"), small.SIZES).program
    assert [n.op.split(".")[1] for n in wide.nodes][-2:] == ["linear", "relu"]
    agree(member_program, wide, slots, {"B": 4}, True)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'selu' is unknown; known: gelu, relu"):
        OWN.linear(rand(2, 5, 4), OWN.pack_linear(rand(2, 3, 4), 5), None, "selu")


@pytest.mark.parametrize(
    "chosen_kinds", [{"x": "stacked"}, {}, {"wc": "shared", "bc": "shared", "x": "stacked"}]
)
def test_a_loop_over_packed_weights_gives_each_members_answer(chosen_kinds: dict[str, Any]) -> None:
    member_program = net()
    slots = all_kinds(
        member_program,
        **{**dict.fromkeys((s.name for s in member_program.weights), "stacked"), **chosen_kinds},
    )
    region = Region("members", "loop", tuple(n.name for n in member_program.nodes), "requested")
    plan = replace(chosen(member_program, "packed"), regions=(region,))
    lowered = lower([member_program], [0, 0, 0], slots, plan, small.SIZES)
    assert set(lowered.used.values()) == {"loop"}
    (body,) = (n.body for n in lowered.program.nodes if n.body is not None)
    assert [n.op for n in body.nodes][:2] == ["widepack.convolution.default", "aten.max_pool2d.default"]
    assert len([n for n in lowered.program.nodes if ".pack_" in n.op]) == 1
    again = Program.from_json(lowered.program.to_json())
    again.check()
    plain = decompose(lowered.program)
    assert not [
        n.op
        for p in (plain, *(n.body for n in plain.nodes if n.body))
        for n in p.nodes
        if n.op.startswith("widepack.")
    ]
    for form in (lowered.program, again, plain, decompose(unroll(lowered.program))):
        for prologue in (True, False):
            for sizes in ({"B": 1}, {"B": 4}, {"B": 7}):
                agree(member_program, form, slots, sizes, prologue)


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
    slots = all_kinds(member_program, **dict.fromkeys((s.name for s in member_program.weights), "stacked"))  # type: ignore[arg-type]
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

    layer, image = (
        REGISTRY["aten.linear.default"].strategies["packed"],
        REGISTRY["aten.conv2d.default"].strategies["packed"],
    )
    for device, dtype, applies in (
        ("cpu", torch.float32, True),
        ("cuda", torch.float32, False),
        ("cpu", torch.float64, False),
        ("cpu", torch.bfloat16, True),
        ("cpu", torch.float16, True),
    ):
        w = EagerWriter(3, device)
        w.op = "aten.linear.default"
        assert (
            layer.when(w, Stacked(value(3, 5, 4, dtype=dtype)), Stacked(value(3, 6, 4, dtype=dtype)))
            is applies
        )
        w.op = "aten.conv2d.default"
        assert (
            image.when(
                w, Stacked(value(3, 5, 4, 6, 6, dtype=dtype)), Stacked(value(3, 6, 4, 3, 3, dtype=dtype))
            )
            is applies
        )
    w = EagerWriter(3)
    w.op = "aten.conv2d.default"
    assert not image.when(w, Stacked(value(3, 5, 4, 6, 6)), Shared(value(6, 4, 3, 3))), (
        "a Shared weight runs in the strategy fold"
    )
    assert not image.when(
        w, Shared(value(5, 4, 6, 6)), Stacked(value(3, 6, 2, 3, 3)), None, [1], [0], [1], 2
    ), "a Shared input of groups would be copied"
    assert not image.when(w, Stacked(value(3, 5, 4, 6, 6)), Stacked(value(3, 6, 4, 0, 3)))
    w.op = "aten.linear.default"
    assert not layer.when(w, Stacked(value(3, 5, 0)), Stacked(value(3, 6, 0))), "nothing to pack"
