"""Programs with prepacked weights: layers, activations in the layer, and loops."""

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
    """A convolution, a relu, a pool, two layers: one over a value that all members may share."""
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


def agree(made: Program, wide: Program, kinds: dict[str, Any], sizes: dict[str, int], prologue: bool) -> None:
    """Checks the wide program against each member: within 32 ulp of the largest number, as test_oracle.py."""
    weights, inputs = small.values(made.weights, kinds, 3, sizes), small.values(made.inputs, kinds, 3, sizes)
    run = Executable(
        wide,
        {s.source: small.held(w, kinds[s.name]) for s, w in zip(made.weights, weights)},
        small.CPU,
        prologue=prologue,
    )
    got = run.run(*(small.held(x, kinds[s.name]) for s, x in zip(made.inputs, inputs)))
    member = graph_module(made, small.CPU)
    for i in range(3):
        with torch.inference_mode():
            want = member(*(w[i] for w in weights), *(x[i] for x in inputs))
        for g, own, o in zip(got, want, wide.outputs, strict=True):
            mine = g if o.kind == "shared" else g[i]
            assert mine.shape == own.shape
            assert float((mine - own).abs().max()) <= 32 * torch.finfo(own.dtype).eps * float(own.abs().max())


def chosen(made: Program, name: str) -> Plan:
    choices = {
        n.name: NodeChoice(name, "requested")
        for n in made.nodes
        if n.op in REGISTRY and name in REGISTRY[n.op].strategies
    }
    return Plan("cpu", "shared", (1, None), (), choices)


@pytest.mark.parametrize("name", ["packed", "turned", "streamed"])
@pytest.mark.parametrize("own", [{"x": "stacked"}, {}, {"wc": "shared", "bc": "shared"}])
def test_a_program_of_packed_layers_gives_each_members_answer(name: str, own: dict[str, Any]) -> None:
    made = net()
    slots = all_kinds(made, **{**dict.fromkeys((s.name for s in made.weights), "stacked"), **own})
    wide = lower([made], [0, 0, 0], slots, chosen(made, name), small.SIZES).program
    held = [n.op for n in wide.nodes if n.op.startswith("widepack.")]
    assert bool(held) is (name != "turned")
    again = Program.from_json(wide.to_json())
    again.check()
    for form in (wide, again, decompose(wide)):
        for prologue in (True, False):
            for sizes in ({"B": 1}, {"B": 4}, {"B": 7}):
                agree(made, form, slots, sizes, prologue)
    assert not [n.op for n in decompose(wide).nodes if n.op.startswith("widepack.")]


def acted(act: str, more: tuple[Any, ...] = (), **options: Any) -> Program:
    return program({"w": "float32[5,6]", "b": "float32[5]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), Ref("b"), out="float32[B,5]"),
        node("a", act, Ref("l"), *more, out="float32[B,5]", **options),
        node("y", "add.Tensor", Ref("a"), Ref("a"), out="float32[B,5]"),
    ], ["y"])  # fmt: skip


@pytest.mark.parametrize("act", [a for a in packed.ACTIVATIONS if a])
@pytest.mark.parametrize("x", ["shared", "stacked"])
def test_an_activation_is_computed_in_the_layers_own_memory(act: str, x: Any) -> None:
    made = acted(act)
    slots = all_kinds(made, w="stacked", b="stacked", x=x)
    lowered = lower([made], [0, 0, 0], slots, chosen(made, "packed"), small.SIZES)
    (layer,) = (n for n in lowered.program.nodes if n.op == "widepack.linear.default")
    assert layer.args[3:] == (act,)
    assert f"aten.{act}.default" not in [n.op for n in lowered.program.nodes]
    assert "l" not in lowered.values and lowered.values["a"] in {n.name for n in lowered.program.nodes}
    for form in (lowered.program, decompose(lowered.program)):
        agree(made, form, slots, {"B": 4}, True)


def test_an_activation_stays_where_the_layers_answer_is_read_by_something_else_or_it_is_another_one() -> None:
    other = acted("gelu", approximate="tanh")
    read = replace(
        acted("relu"), outputs=(*acted("relu").outputs, replace(acted("relu").outputs[0], value=Ref("l")))
    )
    twice = program({"w": "float32[5,6]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), out="float32[B,5]"),
        node("a", "relu", Ref("l"), out="float32[B,5]"),
        node("y", "tanh", Ref("l"), out="float32[B,5]"),
    ], ["y", "a"])  # fmt: skip
    for made in (other, read, twice):
        slots = all_kinds(made, w="stacked")
        lowered = lower([made], [0, 0, 0], slots, chosen(made, "packed"), small.SIZES)
        assert [n.args[3:] for n in lowered.program.nodes if n.op == "widepack.linear.default"] == [()]
        agree(made, lowered.program, slots, {"B": 4}, True)


def test_two_activations_in_a_row_are_one_in_the_layer_and_one_behind_it() -> None:
    made = program({"w": "float32[5,6]"}, {"x": "float32[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), out="float32[B,5]"),
        node("a", "tanh", Ref("l"), out="float32[B,5]"),
        node("y", "relu", Ref("a"), out="float32[B,5]"),
    ], ["y"])  # fmt: skip
    slots = all_kinds(made, w="stacked", x="stacked")
    wide = lower([made], [0, 0, 0], slots, chosen(made, "packed"), small.SIZES).program
    assert [n.op.split(".")[1] for n in wide.nodes][-2:] == ["linear", "relu"]
    agree(made, wide, slots, {"B": 4}, True)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'selu' is unknown; known: gelu, relu"):
        OWN.linear(rand(2, 5, 4), OWN.pack_linear(rand(2, 3, 4), 5), None, "selu")


@pytest.mark.parametrize("own", [{"x": "stacked"}, {}, {"wc": "shared", "bc": "shared", "x": "stacked"}])
def test_a_loop_over_packed_weights_gives_each_members_answer(own: dict[str, Any]) -> None:
    made = net()
    slots = all_kinds(made, **{**dict.fromkeys((s.name for s in made.weights), "stacked"), **own})
    region = Region("members", "loop", tuple(n.name for n in made.nodes), "requested")
    plan = replace(chosen(made, "packed"), regions=(region,))
    lowered = lower([made], [0, 0, 0], slots, plan, small.SIZES)
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
                agree(made, form, slots, sizes, prologue)


def test_a_loop_packs_no_weight_that_is_made_at_every_call() -> None:
    made = program({"w": "float32[6,4,3,3]"}, {"x": "float32[B,4,6,5]", "s": "float32[6,1,1,1]"}, [
        node("own", "mul.Tensor", Ref("w"), Ref("s"), out="float32[6,4,3,3]"),
        node("c", "conv2d", Ref("x"), Ref("own"), out="float32[B,6,4,3]"),
    ], ["c"])  # fmt: skip
    slots = all_kinds(made, w="stacked")
    plan = replace(chosen(made, "packed"), regions=(Region("members", "loop", ("own", "c"), "requested"),))
    wide = lower([made], [0, 0, 0], slots, plan, small.SIZES).program
    assert not [n for n in wide.nodes if n.op.startswith("widepack.")]
    small.check(made, wide, slots)


@needs_onednn
def test_weights_are_packed_once_and_never_read_again() -> None:
    made = net()
    slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
    wide = lower([made], [0, 0, 0], slots, chosen(made, "packed"), small.SIZES).program
    parts = split(wide)
    assert not [n for n in parts.main.nodes if ".pack_" in n.op]
    weights = {
        s.source: small.held(w, slots[s.name])
        for s, w in zip(made.weights, small.values(made.weights, slots, 3))
    }
    run = Executable(wide, weights, small.CPU)
    assert sum(w.is_mkldnn for w in run.weights) == 3
    assert not [w for w in run.weights if w.layout is torch.strided and w.ndim == 5], (
        "the weight in its first order is not held"
    )


def test_packed_is_for_float32_on_a_cpu() -> None:
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
        ("cpu", torch.bfloat16, False),
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
        "a Shared weight runs folded"
    )
    assert not image.when(
        w, Shared(value(5, 4, 6, 6)), Stacked(value(3, 6, 2, 3, 3)), None, [1], [0], [1], 2
    ), "a Shared input of groups would be copied"
    assert not image.when(w, Stacked(value(3, 5, 4, 6, 6)), Stacked(value(3, 6, 4, 0, 3)))
    w.op = "aten.linear.default"
    assert not layer.when(w, Stacked(value(3, 5, 0)), Stacked(value(3, 6, 0))), "nothing to pack"
