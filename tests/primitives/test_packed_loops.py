"""Tests linear layers over packed weights inside loops: the op, drawn programs, isolation, memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import small
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import OWN, chosen, needs_onednn, rand
from small import all_kinds, node, program

from widepack.kernels import packed
from widepack.kernels.checks.require import OperandError
from widepack.lowering.lower import Lowered, lower
from widepack.planning.plan import Region
from widepack.runtime.executable import Executable
from widepack.runtime.prologue import split
from widepack_artifacts.program import Kind, Node, Program, Ref

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PACKS = "widepack.pack_inner_products.default", "widepack.pack_inner_product.default"


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 16), (0, 16), (2, 3, 7), (64, 20), (2, 0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_equals_its_decomposition(
    shape: tuple[int, ...], dtype: torch.dtype, bias: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(packed, "packed_dtype", lambda weight, inputs: None)
    x, w = rand(*shape, dtype=dtype), rand(6, shape[-1], dtype=dtype)
    b = rand(6, dtype=dtype) if bias else None
    weight = OWN.pack_inner_product(w)
    want = x.double() @ w.double().T + (0 if b is None else b.double())
    size = float(want.abs().max()) if want.numel() else 0.0
    forms = (x, torch.cat([x, x], -1)[..., : shape[-1]], x.movedim(0, -1).contiguous().movedim(-1, 0))
    for rows in forms:  # contiguous, with gaps, and in another memory order
        for _ in range(2):
            y = OWN.inner_product(rows, weight, b)
            assert y.dtype is dtype and y.is_contiguous()
            torch.testing.assert_close(y.double(), want, rtol=0, atol=64 * torch.finfo(dtype).eps * size)
    assert torch.equal(OWN.inner_product(x, weight, b, "relu"), OWN.inner_product(x, weight, b).relu())


@needs_onednn
def test_one_packed_weight_serves_every_number_of_rows() -> None:
    w = rand(96, 80)
    weight = OWN.pack_inner_product(w)
    assert weight.is_mkldnn
    for rows in (1, 2, 7, 33, 500):
        x = rand(rows, 80)
        torch.testing.assert_close(OWN.inner_product(x, weight, None), x @ w.T, rtol=1e-5, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize(
    ("x", "bias", "act"),
    [
        (rand(5, 3), None, "inputs; 4 are needed"),
        (rand(5, 4, dtype=torch.float64), None, "x is not torch.float32"),
        (rand(5, 4), rand(2), r"bias is \[2\]; \[6\] is needed"),
        (rand(5, 4), rand(6, dtype=torch.float64), "bias is torch.float64"),
    ],
)
def test_other_operands_are_refused(x: Any, bias: Any, act: str) -> None:
    weight = OWN.pack_inner_product(rand(6, 4))
    OWN.inner_product(rand(5, 4), weight, rand(6))  # what it remembers does not let others pass
    with pytest.raises(OperandError, match=act):
        OWN.inner_product(x, weight, bias)


@needs_onednn
def test_a_weight_that_was_packed_for_another_op_is_refused() -> None:
    other = OWN.pack_convolution(rand(6, 4, 1, 1), [1, 1], [0, 0], [1, 1], 1, [1, 4, 5, 5])
    with pytest.raises(OperandError, match="was packed for"):
        OWN.inner_product(rand(5, 4), other, None)
    with pytest.raises(OperandError, match="was packed for"):
        OWN.linear(rand(1, 5, 4), OWN.pack_inner_product(rand(6, 4)), None)


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_of_a_row_reaches_no_other(inputs: int, dtype: torch.dtype) -> None:
    """Kernels of 16 bits read inputs in pairs: the last of an odd number with the first of the next row."""
    x = torch.ones(6, inputs, dtype=dtype)
    x[2] = float("nan")
    y = OWN.inner_product(x, OWN.pack_inner_product(torch.ones(5, inputs, dtype=dtype)), None, "relu")
    assert y.isnan().all(1).tolist() == [i == 2 for i in range(6)]
    assert y.isfinite().all(1).tolist() == [i != 2 for i in range(6)]


def in_loop(member_program: Program, slots: dict[str, Kind], wide: tuple[str, ...] = ()) -> Lowered:
    """Lowers a program whose nodes run in one loop, over packed weights, except those in `wide`."""
    names = tuple(n.name for n in member_program.nodes if n.name not in wide)
    plan = replace(chosen(member_program, "packed"), regions=(Region("members", "loop", names, "requested"),))
    return lower([member_program], [0, 0, 0], slots, plan, small.SIZES)


@st.composite
def networks(draw: st.DrawFn) -> tuple[Program, dict[str, Kind]]:
    """Draws layers one after another: biases or none, weights that are stored turned or that two layers read,
    Shared and Stacked values, rows of one to three dims, and activations.
    """
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    batch = draw(st.sampled_from(["", "B,", "B,3,"]))
    widths = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    if draw(st.booleans()):
        widths += [widths[-1], widths[-1]]  # two layers that may read one weight
    weights: dict[str, str] = {}
    nodes: list[Node] = []
    x, last = "x", ""
    for k, (i, o) in enumerate(pairwise(widths)):
        if last and i == o and weights[last] == f"{dtype}[{o},{i}]":
            name = last
        elif draw(st.booleans()):
            weights[f"w{k}"], name = f"{dtype}[{i},{o}]", f"t{k}"
            nodes.append(node(name, "t", Ref(f"w{k}"), out=f"{dtype}[{o},{i}]"))
        else:
            name = last = f"w{k}"
            weights[name] = f"{dtype}[{o},{i}]"
        bias = [Ref(f"b{k}")] if draw(st.booleans()) else []
        weights |= {f"b{k}": f"{dtype}[{o}]"} if bias else {}
        nodes.append(node(f"l{k}", "linear", Ref(x), Ref(name), *bias, out=f"{dtype}[{batch}{o}]"))
        x = f"l{k}"
        if draw(st.booleans()):
            nodes.append(node(f"a{k}", "relu", Ref(x), out=f"{dtype}[{batch}{o}]"))
            x = f"a{k}"
    made = program(weights, {"x": f"{dtype}[{batch}{widths[0]}]"}, nodes, [x])
    kinds: dict[str, Kind] = {n: draw(st.sampled_from(["stacked", "stacked", "shared"])) for n in weights}
    kinds |= {
        "x": draw(st.sampled_from(["stacked", "shared"])),
        draw(st.sampled_from(list(weights))): "stacked",
    }
    return made, all_kinds(made, **kinds)


@settings(max_examples=20)
@given(networks())
def test_drawn_layers_give_each_members_answer(drawn: tuple[Program, dict[str, Kind]]) -> None:
    member_program, slots = drawn
    early = tuple(n.name for n in member_program.nodes if n.name.startswith("t"))
    found = in_loop(member_program, slots, early)
    (body,) = (n.body for n in found.program.nodes if n.body is not None)
    layers = [n for n in body.nodes if n.op == "widepack.inner_product.default"]
    assert len(layers) == sum(n.op == "aten.linear.default" for n in member_program.nodes)
    read = {n.args[1].name for n in layers}
    assert len([n for n in found.program.nodes if n.op in PACKS]) == len(read)
    small.check_forms(member_program, found.program, slots, sizes=({"B": 1}, {"B": 5}))


def two_layers(dtype: str = "float32") -> Program:
    weights = {"w": f"{dtype}[8,6]", "b": f"{dtype}[8]", "v": f"{dtype}[3,8]"}
    return program(weights, {"x": f"{dtype}[B,6]"}, [
        node("l", "linear", Ref("x"), Ref("w"), Ref("b"), out=f"{dtype}[B,8]"),
        node("g", "gelu", Ref("l"), out=f"{dtype}[B,8]"),
        node("y", "linear", Ref("g"), Ref("v"), out=f"{dtype}[B,3]"),
    ], ["y"])  # fmt: skip


@needs_onednn
def test_weights_are_packed_once_and_not_kept_twice() -> None:
    member_program = two_layers()
    slots = small.stacked_weights(member_program)
    wide = in_loop(member_program, slots).program
    assert not [n for n in split(wide).main.nodes if n.op in PACKS]
    weights = {
        s.source: small.of_kind(w, slots[s.name])
        for s, w in zip(member_program.weights, small.values(member_program.weights, slots, 3))
    }
    run = Executable(wide, weights, small.CPU)
    kept = [t for value in run.weights for t in (value if isinstance(value, list) else [value])]
    assert [t.is_mkldnn for t in kept].count(True) == 6
    assert not [t for t in kept if not t.is_mkldnn and t.ndim == 3]


def test_a_member_of_nan_changes_no_other() -> None:
    member_program = two_layers()
    slots = small.stacked_weights(member_program)
    wide = in_loop(member_program, slots).program
    drawn = small.values(member_program.weights, slots, 3)
    x = rand(4, 6)

    def answers() -> torch.Tensor:
        weights = {s.source: torch.stack(w) for s, w in zip(member_program.weights, drawn)}
        y: torch.Tensor = Executable(wide, weights, small.CPU).run(x)[0]
        return y

    before = answers()
    drawn[0][1] = drawn[0][1] * float("nan")
    after = answers()
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and after[1].isnan().all()


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_other_dtypes_stay_as_they_are(dtype: str) -> None:
    member_program = program({"w": f"{dtype}[8,6]"}, {"x": f"{dtype}[B,6]"}, [
        node("y", "linear", Ref("x"), Ref("w"), out=f"{dtype}[B,8]"),
    ], ["y"])  # fmt: skip
    wide = in_loop(member_program, small.stacked_weights(member_program)).program
    assert not [n for n in wide.nodes if n.op in PACKS]


def test_a_weight_that_is_computed_in_every_call_is_not_packed() -> None:
    member_program = program({"w": "float32[8,6]"}, {"x": "float32[B,6]", "s": "float32[1,6]"}, [
        node("own", "mul.Tensor", Ref("w"), Ref("s"), out="float32[8,6]"),
        node("y", "linear", Ref("x"), Ref("own"), out="float32[B,8]"),
    ], ["y"])  # fmt: skip
    slots = all_kinds(member_program, w="stacked")
    wide = in_loop(member_program, slots).program
    assert not [n for n in wide.nodes if n.op.startswith("widepack.")]
    small.check(member_program, wide, slots)


def test_a_bias_of_one_number_stays_as_it_is() -> None:
    member_program = program({"w": "float32[8,6]", "b": "float32[1]"}, {"x": "float32[B,6]"}, [
        node("y", "linear", Ref("x"), Ref("w"), Ref("b"), out="float32[B,8]"),
    ], ["y"])  # fmt: skip
    slots = small.stacked_weights(member_program)
    wide = in_loop(member_program, slots).program
    assert not [n for n in wide.nodes if n.op in PACKS]
    small.check(member_program, wide, slots)
