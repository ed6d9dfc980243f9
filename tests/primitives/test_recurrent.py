"""Tests recurrent layers over all steps: ops, decompositions, memory, programs and artifacts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from recurrent_cases import GATES, B, H, Layer, N, T
from small import all_kinds, node, program, stacked_weights

from widepack.ir.fake_values import Fakes
from widepack.ir.values import Shared, Stacked, Value
from widepack.kernels import recurrent
from widepack.lowering.interpreter import applicable
from widepack.lowering.lower import lower
from widepack.planning.plan import NodeChoice, Plan
from widepack.registry.registry import REGISTRY
from widepack.registry.writer import EagerWriter
from widepack.runtime.executable import Executable
from widepack.runtime.prologue import split
from widepack_artifacts.program import Program, Ref


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("memory", ["whole", "parts"])
@pytest.mark.parametrize("cell", GATES)
def test_steps_equal_the_members(
    cell: str, memory: str, one: bool, biases: bool, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps run in one block and in several, with products of all steps and of two steps at a time (the
    last of one step).
    """
    layer = Layer(cell, biases, one=one)
    if memory == "parts":
        monkeypatch.setattr(recurrent, "BLOCK_BYTES", 2 * 4 * (GATES[cell] * H * (H + 2 * B) + 3 * B * H))
        assert [
            (s.start, s.stop)
            for s in recurrent.step_blocks(layer.states[0], layer.weights[1].transpose(1, 2))
        ] == [(0, 1), (1, 3)]
        monkeypatch.setattr(recurrent, "PROJECTED_BYTES", 2 * 4 * 2 * B * GATES[cell] * H)
    layer.same(layer.run(reverse), layer.members(reverse))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_an_lstm_with_projections_equals_the_members(biases: bool, reverse: bool) -> None:
    layer = Layer("lstm", biases, project=2)
    layer.same(layer.run(reverse), layer.members(reverse))


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("one", [False, True])
def test_a_packed_lstm_equals_the_members(
    one: bool, biases: bool, reverse: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(recurrent, "usable", lambda weight: False)
    layer = Layer("lstm", biases, one=one)
    layer.same(layer.run(reverse, packed=True), layer.members(reverse))


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floating_point_dtypes(cell: str, dtype: torch.dtype) -> None:
    """Errors of bfloat16 against float64 are as small as those of the members, which also round after each
    op.
    """
    layer = Layer(cell, dtype=dtype)
    found, truth = layer.run(False), layer.members(False)
    if dtype == torch.float64:
        return layer.same(found, truth)
    member_answers = layer.members(False, dtype)
    for f, o, t in zip(found, member_answers, truth):
        assert f.dtype == dtype
        assert float((f.double() - t).pow(2).mean().sqrt()) <= 2 * float(
            (o.double() - t).pow(2).mean().sqrt()
        )
    return None


@pytest.mark.parametrize("cell", GATES)
def test_fake_tensors_have_the_sizes_of_real_answers(cell: str) -> None:
    fakes = Fakes({"B": 4}, static=True)
    for packed in (False, True) if cell == "lstm" else (False,):
        real = Layer(cell).run(False, packed)
        with fakes.on():
            fake = Layer.run(_like(Layer(cell)), False, packed)
        assert [(f.shape, f.dtype, f.stride()) for f in fake] == [
            (r.shape, r.dtype, r.stride()) for r in real
        ]


def _like(layer: Layer) -> Layer:
    layer.x = torch.empty(layer.x.shape)
    layer.states, layer.weights, layer.biases = (
        [torch.empty(t.shape) for t in ts] for ts in (layer.states, layer.weights, layer.biases)
    )
    return layer


@pytest.mark.parametrize("cell", GATES)
def test_an_empty_batch_gives_an_empty_answer_and_an_empty_sequence_is_refused(cell: str) -> None:
    layer = Layer(cell, batch=0)
    for packed in (False, True) if cell == "lstm" else (False,):
        assert layer.run(False, packed)[0].shape == (N, T, 0, H)
    none = Layer(cell)
    none.x = none.x[:, :0]
    for packed in (False, True) if cell == "lstm" else (False,):
        with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
            none.run(False, packed)


@pytest.mark.parametrize("cell", GATES)
def test_nan_stays_in_its_member_and_is_not_lost(cell: str) -> None:
    for packed in (False, True) if cell == "lstm" else (False,):
        layer = Layer(cell)
        clean = layer.run(False, packed)[0]
        layer.weights[1][1] = float("nan")
        y = layer.run(False, packed)[0]
        assert torch.isnan(y[1]).all()
        assert torch.equal(y[0], clean[0]) and torch.equal(y[2], clean[2])


def test_an_unknown_activation_is_refused() -> None:
    layer = Layer("rnn_tanh")
    layer.cell = "rnn_gelu"
    with pytest.raises(
        ValueError, match="activation 'gelu' of a recurrent layer is unknown; known: tanh, relu"
    ):
        layer.run(False)


def net(
    cell: str,
    layers: int = 2,
    both: bool = True,
    first: bool = True,
    biases: bool = True,
    project: int = 0,
    dtype: str = "float32",
) -> Program:
    """Returns a layer with all its results, a dynamic batch, and dynamic steps where torch keeps them."""
    ways, out, weights = 2 if both else 1, project or 5, {}
    steps = "T" if (cell, project, dtype) == ("lstm", 0, "float32") else "6"
    for i in range(layers):
        for way in range(ways):
            at = f"{i}_{way}"
            weights[f"wx{at}"] = f"{dtype}[{GATES[cell] * 5},{out * ways if i else 6}]"
            weights[f"wh{at}"] = f"{dtype}[{GATES[cell] * 5},{out}]"
            weights |= {f"{b}{at}": f"{dtype}[{GATES[cell] * 5}]" for b in ("bx", "bh") if biases}
            weights |= {f"wp{at}": f"{dtype}[{project},5]"} if project else {}
    inputs = {
        "x": f"{dtype}[B,{steps},6]" if first else f"{dtype}[{steps},B,6]",
        "h": f"{dtype}[{layers * ways},B,{out}]",
    }
    inputs |= {"c": f"{dtype}[{layers * ways},B,5]"} if cell == "lstm" else {}
    states = [Ref("h"), Ref("c")] if cell == "lstm" else Ref("h")
    call = node(
        "r",
        f"{cell}.input",
        Ref("x"),
        states,
        [Ref(n) for n in weights],
        biases,
        layers,
        0.0,
        False,
        both,
        first,
    )
    parts = [node(f"o{i}", "operator.getitem", Ref("r"), i) for i in range(3 if cell == "lstm" else 2)]
    return program(weights, inputs, [call, *parts], [p.name for p in parts])


def chosen(name: str) -> Plan:
    return Plan("cpu", "shared", (1, None), (), {"r": NodeChoice(name, "requested")})


CASES = [
    (cell, name)
    for cell in GATES
    for name in (("packed", "fused", "fold") if cell == "lstm" else ("fused", "fold"))
]


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize(("cell", "name"), CASES)
@pytest.mark.parametrize("options", [{}, {"first": False, "both": False, "biases": False}])
@pytest.mark.parametrize("x", [pytest.param("shared", marks=pytest.mark.slow), "stacked"])
def test_a_program_gives_each_members_answer(cell: str, name: str, options: dict[str, Any], x: Any) -> None:
    """The program is checked as lowered, after a round trip and as ATen ops, with weights that are computed
    at load or in each call, and at several sizes.
    """
    member_program = net(
        cell, **options, dtype="float32" if name == "packed" else "float64"
    )  # larger weights make a plain RNN amplify rounding
    stacked = {} if name == "fold" else dict.fromkeys((s.name for s in member_program.weights), "stacked")
    slots = all_kinds(member_program, **{**stacked, "x": x, "h": "stacked"})
    lowered = lower([member_program], [0, 0, 0], slots, chosen(name), small.SIZES)
    assert lowered.used["r"] == name
    small.check_forms(member_program, lowered.program, slots, sizes=({"B": 1, "T": 1}, {"B": 7, "T": 3}))


def test_projections_run_as_steps_and_as_their_decomposition() -> None:
    member_program = net("lstm", project=3)
    assert len(member_program.weights) == 4 * 5
    slots = stacked_weights(member_program)
    lowered = lower([member_program], [0, 0, 0], slots, chosen("packed"), small.SIZES)
    assert lowered.used["r"] == "fused", "oneDNN has no projections"
    small.check_forms(member_program, lowered.program, slots)


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(("cell", "name"), [c for c in CASES if c[1] != "fold"])
def test_weights_are_transposed_once_and_a_shared_one_is_stored_once(cell: str, name: str) -> None:
    member_program = net(cell)
    kinds = {s.name: "stacked" for s in member_program.weights if name == "packed" or s.name != "wh0_0"}
    slots = all_kinds(member_program, **kinds)  # type: ignore[arg-type]
    wide = lower([member_program], [0, 0, 0], slots, chosen(name), small.SIZES).program
    parts = split(wide)
    assert not [n.op for n in parts.main.nodes if n.op.startswith("aten.clone") or ".pack_" in n.op]
    weights = {
        s.source: small.of_kind(w, slots[s.name])
        for s, w in zip(member_program.weights, small.values(member_program.weights, slots, 3))
    }
    run = Executable(wide, weights, small.CPU)
    stored = [t for w in run.weights for t in (w if isinstance(w, list) else [w])]
    matrices = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in stored
        if not t.is_mkldnn and t.ndim >= 3
    }
    if name == "packed":
        assert not matrices, "the weights in their original order are not stored"
        assert not torch.backends.mkldnn.is_available() or sum(t.is_mkldnn for t in stored) == 2 * 4 * 3  # type: ignore[no-untyped-call]
    else:
        assert sum(matrices.values()) == sum(w.nbytes for n, w in weights.items() if n.startswith("w"))


def test_which_strategies_apply() -> None:
    def names(
        member_program: Program, kinds: dict[str, Any], device: str = "cpu", train: bool = False
    ) -> list[str]:
        slots = all_kinds(member_program, **kinds)
        values = {
            s.name: small.of_kind(v, slots[s.name])
            for s, v in zip(
                (*member_program.weights, *member_program.inputs),
                small.values((*member_program.weights, *member_program.inputs), slots, 3),
            )
        }
        put = {n: (Stacked if slots[n] == "stacked" else Shared)(Value(None, t)) for n, t in values.items()}
        call = member_program.nodes[0]
        args = [
            put[call.args[0].name],
            [put[r.name] for r in call.args[1]],
            [put[r.name] for r in call.args[2]],
            *call.args[3:],
        ]
        args[6] = train
        w = EagerWriter(3, device)
        w.op = call.op
        return [s.name for s in applicable(w, call.op, args, {})]

    member_program = net("lstm")
    stacked = dict.fromkeys((s.name for s in member_program.weights), "stacked")
    assert names(member_program, stacked) == ["packed", "fused"]
    assert names(member_program, stacked, device="cuda") == ["fused"]
    assert names(member_program, {**stacked, "wh0_1": "shared"}) == ["fused"], (
        "a Shared weight would be packed once for each member"
    )
    assert names(member_program, {**stacked, "bx0_1": "shared"}) == ["packed", "fused"]
    assert names(member_program, {"x": "stacked"}) == names(member_program, {"h": "stacked"}) == ["fold"]
    assert (
        names(member_program, stacked, train=True)
        == names(member_program, {"x": "stacked"}, train=True)
        == []
    ), "dropout draws once for each member"
    assert (
        names(net("lstm", dtype="float64"), stacked)
        == names(net("lstm", dtype="bfloat16"), stacked)
        == ["fused"]
    )
    assert names(net("lstm", project=3), {**stacked, "wp0_0": "stacked"}) == ["fused"]
    mixed = replace(
        member_program,
        inputs=(replace(member_program.inputs[0], type="float64[B,T,6]"), *member_program.inputs[1:]),
    )
    assert names(mixed, stacked) == [], "the member refuses it too"
    assert set(REGISTRY["aten.gru.input"].strategies) == {"fold", "fused", "trained"}
