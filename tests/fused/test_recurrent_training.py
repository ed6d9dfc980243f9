"""Tests recurrent layers that train: the ops' derivatives, and gradients and steps of fused members."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fusing import same_gradients, trained_as_alone
from torch import Tensor, nn

import widepack
from widepack import fuse
from widepack.kernels.decompose import decompose
from widepack.runtime.executable import Executable
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

N, T, B, INPUTS, WIDTH = 3, 5, 4, 3, 6
OPS = torch.ops.widepack


def operands(gates: int, shared: bool, biases: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    states = [drawn(N, B, WIDTH) for _ in range(2 if gates == 4 else 1)]
    weights = [drawn(N, INPUTS, gates * WIDTH), drawn(N, WIDTH, gates * WIDTH)]
    bias = [drawn(N, gates * WIDTH) for _ in range(2)] if biases else [None, None]
    return [drawn(1 if shared else N, T, B, INPUTS), *states, *weights, *bias]


def answer(cell: str, *values: Any) -> Any:
    """Returns what has derivatives of a layer's results."""
    if cell == "lstm":
        return OPS.lstm_training(*values)[:2]
    if cell == "gru":
        return OPS.gru_training(*values)[0]
    return OPS.rnn_training(*values, cell.removeprefix("rnn_"))


@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shared", [False, True], ids=["own inputs", "shared inputs"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_the_derivatives_are_those_of_differences(cell: str, shared: bool, biases: bool) -> None:
    given: Any = operands({"lstm": 4, "gru": 3}.get(cell, 1), shared, biases)
    assert torch.autograd.gradcheck(partial(answer, cell), given, fast_mode=True)


@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_the_second_derivatives_are_those_of_differences(cell: str, biases: bool) -> None:
    given: Any = operands({"lstm": 4, "gru": 3}.get(cell, 1), biases, biases)
    assert torch.autograd.gradgradcheck(partial(answer, cell), given, fast_mode=True)


@pytest.mark.extended
@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN, nn.LSTM])
def test_a_gradient_penalty_is_that_of_each_member(layer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(B, T, INPUTS, dtype=torch.float64, requires_grad=True)
    fused = fuse(lambda: layer(INPUTS, WIDTH, batch_first=True).double(), x.detach(), n=N).train()
    members = fused.unfuse()

    def penalty(y: Tensor) -> Any:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # the gradient of y is a constant
        return (slope.norm(dim=-1) - 1).square().mean()

    answers = fused(x)[0]
    torch.stack([penalty(y) for y in answers]).sum().backward()  # type: ignore[no-untyped-call]
    for member in members:
        penalty(member(x)[0]).backward()
    same_gradients(fused, members)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_the_ops_equal_their_aten_form(cell: str) -> None:
    given: Any = [
        v.detach() for v in operands({"lstm": 4, "gru": 3}.get(cell, 1), False, True) if v is not None
    ]
    slots = tuple(Slot(f"v{i}", f"v{i}", "stacked", "float64") for i in range(len(given)))
    args = (*(Ref(s.name) for s in slots), *(["tanh"] if cell == "rnn_tanh" else []))
    nodes, names = [Node("out", f"widepack.{cell.partition('_')[0]}_training.default", args)], ["out"]
    if cell != "rnn_tanh":
        names = ["y", "last"][: 2 if cell == "lstm" else 1]
        nodes += [Node(n, "operator.getitem", (Ref("out"), i)) for i, n in enumerate(names)]
    outputs = tuple(Output(Ref(n), "stacked") for n in names)
    program = Program((), slots, tuple(nodes), outputs, N)
    plain = decompose(program)
    assert not any(n.op.startswith("widepack.") for n in plain.nodes)
    own, aten = (Executable(p, {}, torch.device("cpu")).run(*given) for p in (program, plain))
    for a, b in zip(own, aten, strict=True):
        torch.testing.assert_close(a, b)


class Net(nn.Module):
    """A recurrent layer and a head on the mean of its answers and on its last state."""

    def __init__(self, layer: nn.Module, directions: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(WIDTH * directions, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, last = self.layer(x)
        state = last[0] if isinstance(last, tuple) else last
        return self.head(y.mean(1)), state.sum(0)


LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gru": (nn.GRU, {}),
    "gru of two layers and directions": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru without biases": (nn.GRU, {"bias": False}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTM, {"bidirectional": True}),
}


def nets(name: str, dtype: torch.dtype, **more: Any) -> list[Net]:
    kind, options = LAYERS[name]
    found = []
    for i in range(N):
        torch.manual_seed(i)
        layer = kind(INPUTS, WIDTH, batch_first=True, **options, **more)
        found.append(Net(layer, 2 if options.get("bidirectional") else 1).to(dtype).train())
    return found


def ops_of(fused: Any) -> set[str]:
    return {n.op for r in fused.current_entry().runners for n in r.program.nodes}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_twenty_steps_are_those_of_the_members(name: str, dtype: torch.dtype) -> None:
    drawn = [torch.randn(B, T, INPUTS, dtype=dtype) for _ in range(7)]
    bound = 1e-4 if dtype == torch.float32 else 1e-12

    def loss(outputs: tuple[Tensor, Tensor], step: int) -> Tensor:
        return outputs[0].square().sum() + outputs[1].sin().sum()

    fused = trained_as_alone(
        nets(name, dtype),
        [drawn[k // 3] for k in range(20)],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss,
        bounds={"rtol": bound, "atol": bound},
    )
    trained = {f"widepack.{cell}_training.default" for cell in ("gru", "rnn", "lstm")} & ops_of(fused)
    assert bool(trained) == (name != "lstm" or dtype == torch.float64)


def test_dropout_between_layers_runs_member_by_member() -> None:
    members = nets("gru", torch.float32, num_layers=2, dropout=0.5)
    fused = fuse(members, (torch.randn(B, T, INPUTS),), validate=False).train()
    y, _ = fused(torch.randn(B, T, INPUTS))
    y.sum().backward()
    assert not any("training" in op for op in ops_of(fused))
    assert all(p.grad is not None for p in fused.parameters())


def test_a_frozen_member_keeps_its_layer() -> None:
    members = nets("gru", torch.float32)
    x = torch.randn(B, T, INPUTS)
    fused = fuse(members, (x,)).train().freeze(1)
    optimizer = widepack.optim.SGD(fused.parameters(), lr=0.1)
    before = {k: v.detach().clone() for k, v in fused.named_parameters()}
    fused(x)[0].square().sum().backward()
    optimizer.step()
    for key, value in fused.named_parameters():
        assert torch.equal(value[1], before[key][1]) and not torch.equal(value[0], before[key][0])
