"""Tests the Triton kernels under Triton's interpreter, which runs them on a CPU. It also runs the tests of
`tests/gpu/test_device_triton.py`, which compare their answers with the members'.

`test_triton_kernels.py` runs this file in a process of its own, because Triton reads TRITON_INTERPRET when a
kernel is defined: TRITON_INTERPRET=1 pytest tests/kernels/interpreted_kernels.py
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import small
import torch
from chain_cases import Chain, closeness
from kernel_runs import recorded_kernels
from recurrent_cases import GATES, Layer, rand

from widepack.ir import ops as ops  # defines the ops
from widepack.kernels.projections import projected_parts
from widepack.kernels.triton_kernels import available, launches
from widepack.lowering.lower import lower
from widepack.planning.heuristics import plans
from widepack.planning.request import StrategyRequest
from widepack_artifacts.program import Kind, Node, Program, Ref

assert os.environ["TRITON_INTERPRET"] == "1", "run this file with TRITON_INTERPRET=1"

# NumPy, which computes the kernels here, warns of NaN, inf and 1 / inf; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the ops whose kernels ran, in order."""
    return recorded_kernels(monkeypatch)


def op_of(cell: str) -> str:
    return f"{cell.partition('_')[0]}_steps"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell", GATES)
def test_steps_in_several_parts_equal_the_members(
    cell: str, reverse: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, starts = Layer(cell), []
    of_two_steps = 2 * layer.x[:, 0, :, 0].numel() * GATES[cell] * 7 * 4
    monkeypatch.setattr(launches, "PROJECTED_BYTES", of_two_steps)

    def counted(*args: Any) -> Iterator[Any]:
        for first, products in projected_parts(*args):
            starts.append(first)
            yield first, products

    monkeypatch.setattr("widepack.kernels.triton_kernels.launches.projected_parts", counted)
    layer.same(layer.run(reverse), layer.members(reverse))
    assert starts == ([4, 2, 0] if reverse else [0, 2, 4])
    assert ran == [op_of(cell)]


@pytest.mark.parametrize("cell", GATES)
def test_states_may_be_parts_of_other_tensors(cell: str, ran: list[str]) -> None:
    layer = Layer(cell)
    layer.states = [torch.stack([s, s + 1], 1).select(1, 0) for s in layer.states]
    assert not layer.states[0].is_contiguous()
    before = [s.clone() for s in layer.states]
    layer.same(layer.run(False), layer.members(False))
    assert all(torch.equal(s, b) for s, b in zip(layer.states, before)), "the op wrote into its operands"
    assert ran


@pytest.mark.parametrize("cell", GATES)
def test_a_weight_may_be_one_for_all_members(cell: str, ran: list[str]) -> None:
    layer = Layer(cell)
    layer.weights[1] = layer.weights[1][:1].expand(3, -1, -1)
    w_x, w_h = layer.weights[0].mT.contiguous(), layer.weights[1][0].t().contiguous().expand(3, -1, -1)
    biases = (layer.biases[0], layer.biases[1])
    last: tuple[Any, ...] = (
        (None, False) if cell == "lstm" else (False,) if cell == "gru" else (False, cell[4:])
    )
    op = getattr(torch.ops.widepack, op_of(cell))
    found = op(layer.x, *layer.states, w_x, w_h, *biases, *last)
    layer.same(found if cell == "lstm" else (found,), layer.members(False))
    assert ran == [op_of(cell)]


@pytest.mark.parametrize("cell", GATES)
def test_nan_of_a_member_and_of_a_row_stays_there(cell: str, ran: list[str]) -> None:
    layer = Layer(cell)
    clean = layer.run(False)[0]
    layer.x[2, 2, 1] = float("nan")
    layer.weights[1][1] = float("nan")
    y = layer.run(False)[0]
    assert torch.isnan(y[1]).all() and torch.isnan(y[2, 2:, 1]).all()
    y[1] = clean[1]
    y[2, 2:, 1] = clean[2, 2:, 1]
    assert torch.equal(y, clean)
    assert len(ran) == 2


def test_nan_of_a_member_stays_there_in_a_chain(ran: list[str]) -> None:
    chain = Chain(3, 4, (6, 20, 4), ("relu", ""))
    clean = chain.run()
    chain.weights[1][1, 0, 0] = float("nan")
    y = chain.run()
    assert torch.isnan(y[1, :, 0]).all()
    y[1, :, 0] = clean[1, :, 0]
    assert torch.equal(y, clean)
    assert len(ran) == 2


def test_the_plan_of_a_gpu_runs_its_chain_by_the_kernel(ran: list[str]) -> None:
    """A program that was planned and lowered for a GPU runs on the CPU here."""
    widths, nodes, last, weights = (6, 20, 16, 16, 16, 16, 3), list[Node](), "x", dict[str, str]()
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        weights |= {f"w{i}": f"float32[{outputs},{inputs}]", f"b{i}": f"float32[{outputs}]"}
        nodes.append(small.node(f"l{i}", "linear", Ref(last), Ref(f"w{i}"), Ref(f"b{i}")))
        nodes.append(small.node(f"a{i}", "gelu", Ref(f"l{i}")))
        last = f"a{i}"
    member = small.program(weights, {"x": "float32[B,T,6]"}, nodes, [last])
    check_on_gpu_plan(member, weights)
    assert ran == ["mlp_chain"]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_plan_of_a_gpu_runs_recurrent_layers_by_the_kernel(cell: str, ran: list[str]) -> None:
    rows = GATES[cell] * 5
    weights: dict[str, str] = {}
    for at in ("0", "0r", "1", "1r"):
        weights |= {f"wx{at}": f"float32[{rows},{10 if '1' in at else 6}]", f"wh{at}": f"float32[{rows},5]"}
        weights |= {f"bx{at}": f"float32[{rows}]", f"bh{at}": f"float32[{rows}]"}
    inputs = {"x": "float32[B,3,6]", "h": "float32[4,B,5]"} | (
        {"c": "float32[4,B,5]"} if cell == "lstm" else {}
    )
    states = [Ref("h"), Ref("c")] if cell == "lstm" else Ref("h")
    options = (True, 2, 0.0, False, True, True)
    nodes = [
        small.node("r", f"{cell}.input", Ref("x"), states, [Ref(w) for w in weights], *options),
        *(small.node(f"o{i}", "operator.getitem", Ref("r"), i) for i in range(len(inputs))),
    ]
    member = small.program(weights, inputs, nodes, [n.name for n in nodes[1:]])
    check_on_gpu_plan(member, weights)
    assert ran == [op_of(cell)] * 4


def check_on_gpu_plan(member: Program, stacked: Iterable[str]) -> None:
    own: dict[str, Kind] = dict.fromkeys(stacked, "stacked")
    slots = {**small.all_kinds(member), **own}
    plan, *_ = plans(member, slots, 3, small.SIZES, "B", "cuda", "shared", StrategyRequest())
    wide = lower([member], [0, 0, 0], slots, plan, small.SIZES).program
    small.check(member, wide, slots)


@pytest.mark.parametrize(
    "reason", ["switched off", "other dtype", "too wide", "too many layers", "a gradient is needed"]
)
def test_other_calls_run_in_plain_torch(reason: str, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    widths: tuple[int, ...] = (4, 8, 4)
    if reason == "switched off":
        monkeypatch.setenv(available.SWITCH, "0")
    if reason == "too wide":
        widths = (4, launches.WIDEST + 1, 4)
    if reason == "too many layers":
        widths = (4,) * (launches.MOST_LAYERS + 2)
    dtype = torch.float64 if reason == "other dtype" else torch.float32
    chain = Chain(2, 3, widths, ("relu",) * (len(widths) - 1), dtype=dtype)
    if reason == "a gradient is needed":
        chain.x.requires_grad_()
    y = launches.mlp_chain(chain.x, chain.weights, chain.biases, chain.activations)
    assert y is None and ran == []
    closeness(chain.run().detach(), chain.members(), chain.members(dtype))


def test_a_kernel_that_fails_is_replaced_with_one_warning(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.kernels.triton_kernels import chain as kernels

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise ValueError("out of resource: shared memory\nand more lines")

    monkeypatch.setattr(kernels, "chain_kernel", Broken())
    chain = Chain(2, 3, (5, 9, 3), ("relu", ""))
    with pytest.warns(UserWarning, match="mlp_chain does not run here") as warned:
        closeness(chain.run(), chain.members(), chain.members(torch.float32))
    assert len(warned) == 1 and "shared memory)" in str(warned[0].message)
    chain.run()
    with pytest.warns(UserWarning, match="for torch.float32 and width 10"):
        Chain(2, 3, (5, 10, 3), ("relu", "")).run()
    with pytest.warns(UserWarning, match="for torch.float16 and width 9"):
        Chain(2, 3, (5, 9, 3), ("relu", ""), dtype=torch.float16).run()
    layer = Layer("gru")
    layer.same(layer.run(False), layer.members(False))
    assert ran == ["gru_steps"], "another op's kernel runs"


def test_a_lack_of_memory_is_raised_and_the_next_call_runs_the_kernel(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.kernels.triton_kernels import chain as kernels

    class Lacking:
        def __getitem__(self, grid: Any) -> Any:
            raise torch.OutOfMemoryError("no memory")

    chain = Chain(2, 3, (5, 11, 3), ("relu", ""))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "chain_kernel", Lacking())
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            chain.run()
    chain.run()
    assert ran == ["mlp_chain"]


def negative(t: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(t)  # noqa: SLF001  # torch makes such views of conjugates


@pytest.mark.parametrize("at", ["x", "weights", "biases"])
def test_operands_of_a_chain_with_the_negative_bit_run_in_plain_torch(at: str, ran: list[str]) -> None:
    """Their memory has the numbers with the other sign. A program calls an op without torch's dispatcher,
    which would write them anew.
    """
    chain = Chain(2, 3, (4, 8, 4), ("relu", ""))
    given: Any = getattr(chain, at)
    setattr(chain, at, negative(given) if at == "x" else [given[0], negative(given[1])])
    run = ops.function("widepack.mlp_chain.default")
    y = run(chain.x, chain.weights, chain.biases, chain.activations)
    closeness(y, chain.members(), chain.members(torch.float32))
    assert ran == []


@pytest.mark.parametrize("at", range(4))
def test_operands_of_steps_with_the_negative_bit_run_in_plain_torch(at: int, ran: list[str]) -> None:
    given = [rand(k, 2, *sizes) for k, sizes in enumerate([(3, 4, 5), (4, 6), (5, 6), (6, 6)])]
    given[at] = negative(given[at])
    run = ops.function("widepack.rnn_steps.default")
    y = run(*given, None, None, False, "relu")
    torch.testing.assert_close(y, run(*(t.resolve_neg() for t in given), None, None, False, "relu"))
    assert ran == ["rnn_steps"], "the second call runs the kernel"


def test_operands_whose_places_need_more_than_32_bits_run_in_plain_torch() -> None:
    """The operands repeat one number, and take no memory."""
    one, few = torch.zeros(1, 1, 1), torch.zeros(2, 4, 4)
    for op in ("mlp_chain", "gru_steps"):
        assert available.usable(op, 4, one.expand(1, 1 << 15, (1 << 16) - 1), few)
        assert available.usable(op, 4, one.expand(1 << 20, 1 << 15, 4), few), (
            "members have places of their own"
        )
        assert not available.usable(op, 4, one.expand(1, 1 << 15, 1 << 16), few)
        assert not available.usable(op, 4, few, None, one.expand(2, 256, 1 << 23))
    x, w = one.expand(1, 1, 1 << 31), one.expand(2, 4, 1 << 31)
    assert launches.mlp_chain(x, [w, few], [None, None], ["relu", ""]) is None


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of this test is no GPU, so the test states what `run` asks torch."""
    started: list[int] = []
    capturing = True
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    like: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    assert not available.run("a", 1, like, "key of the test", lambda: started.append(1))
    capturing = False
    assert available.run("a", 1, like, "key of the test", lambda: started.append(2))
    capturing = True
    assert available.run("a", 1, like, "key of the test", lambda: started.append(3))
    assert started == [2, 3]


def test_half_precision_is_rounded_to_the_nearest(ran: list[str]) -> None:
    """An identity layer of numbers between two of bfloat16 gives torch's rounding."""
    x = rand(1, 1, 40, 16, dtype=torch.bfloat16)
    scale = torch.full((1, 16), 1.0).diag_embed().to(torch.bfloat16) * 1.0078125
    y = torch.ops.widepack.mlp_chain(x, [scale, scale], [None, None], ["", ""])
    want = (((x.float() @ scale.float()).bfloat16()).float() @ scale.float()).bfloat16()
    assert torch.equal(y, want)
    assert ran == ["mlp_chain"]
