"""The shapes of recurrent layers by formula, compared with those of torch's own fake tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from widepack.ir import ops
from widepack.ir.fake_values import Fakes
from widepack.kernels.checks import OperandError

LAYERS = {"aten.gru.input": nn.GRU, "aten.lstm.input": nn.LSTM, "aten.rnn_tanh.input": nn.RNN}


def operands(
    op: str, fakes: Fakes, batch_first: bool, bidirectional: bool, **options: Any
) -> tuple[Any, ...]:
    layer = LAYERS[op](3, 5, 2, batch_first=batch_first, bidirectional=bidirectional, **options)
    directions = 2 if bidirectional else 1
    x = fakes.tensor("float32[B,T,3]" if batch_first else "float32[T,B,3]")
    states = [fakes.tensor(f"float32[{2 * directions},B,{options.get('proj_size', 5)}]")]
    if op == "aten.lstm.input":
        states.append(fakes.tensor(f"float32[{2 * directions},B,5]"))
    params = [fakes.mode.from_tensor(p.detach()) for p in layer.parameters()]
    hx: Any = states if op == "aten.lstm.input" else states[0]
    return x, hx, params, True, 2, 0.0, False, bidirectional, batch_first


def strides_of(values: Any) -> list[Any]:
    """The shapes and strides; a stride is the same with and without a guard against a size of 0."""
    return [(str(v.shape), re.sub(r"Max\(1, (\w+)\)", r"\1", str(v.stride())), v.dtype) for v in values]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("op", LAYERS)
def test_shapes_and_strides_are_those_of_torch(op: str, batch_first: bool, bidirectional: bool) -> None:
    fakes = Fakes({"B": 3, "T": 4})
    given = operands(op, fakes, batch_first, bidirectional)
    with fakes.on():
        expected = ops.checked(op)(*given)
    assert strides_of(fakes.run(op, given, {})) == strides_of(expected)


def test_projections_of_an_lstm() -> None:
    fakes = Fakes({"B": 3, "T": 4})
    given = operands("aten.lstm.input", fakes, True, True, proj_size=2)
    with fakes.on():
        expected = ops.checked("aten.lstm.input")(*given)
    assert strides_of(fakes.run("aten.lstm.input", given, {})) == strides_of(expected)


def test_states_of_another_size_are_refused() -> None:
    fakes = Fakes({"B": 3, "T": 4})
    x, _, *rest = operands("aten.gru.input", fakes, True, False)
    with pytest.raises(OperandError):
        fakes.run("aten.gru.input", (x, fakes.tensor("float32[2,B,4]"), *rest), {})


def test_a_long_sequence_takes_no_time_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes({"B": 3, "T": 4})
    given = operands("aten.gru.input", fakes, True, True)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the steps of the layer ran")

    monkeypatch.setattr(ops, "checked", lambda op: never)
    assert len(fakes.run("aten.gru.input", given, {})) == 2
