"""Tests that an export computes the shapes of recurrent layers at once, and as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table, decompositions

from widepack.capture.patches.recurrent_shapes import recurrent_shapes

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(5, 4, 2, batch_first=True),
    "both directions": lambda: nn.GRU(5, 4, bidirectional=True),
    "lstm": lambda: nn.LSTM(5, 4, 2, batch_first=True),
    "projected": lambda: nn.LSTM(5, 4, proj_size=3),
    "tanh": lambda: nn.RNN(5, 4),
    "relu": lambda: nn.RNN(5, 4, nonlinearity="relu", batch_first=True),
}


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def exported(module: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the ops and the results of a program: shape, stride, dtype."""
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    layer = module.layer
    dims.pop(1 if getattr(layer, "batch_first", False) else 0)  # the steps are fixed
    program = torch.export.export(module, (torch.randn(3, 3, 5),), strict=False, dynamic_shapes=(dims,))
    found = []
    for node in program.run_decompositions({}).graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        shapes = [(str(v.shape), str(v.stride()), v.dtype) for v in values if isinstance(v, Tensor)]
        found.append((str(node.target), shapes))
    return found


@pytest.mark.filterwarnings("ignore")  # torch.export warns of its own code
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Last(LAYERS[name]()).eval()
    own = exported(module)
    with recurrent_shapes():
        monkeypatch.setattr(decompositions, "one_layer_rnn", None)  # what runs the steps
        monkeypatch.setattr(decompositions, "one_layer_lstm", None)
        assert exported(module) == own


def test_torch_is_as_before() -> None:
    op = torch.ops.aten.gru.input
    before = decomposition_table[op], dict(op.py_kernels)
    with pytest.raises(KeyboardInterrupt), recurrent_shapes():
        assert decomposition_table[op] is not before[0]
        raise KeyboardInterrupt
    assert (decomposition_table[op], dict(op.py_kernels)) == before


def test_tensors_with_numbers_run_the_steps() -> None:
    layer, x = nn.GRU(5, 4), torch.randn(3, 2, 5)
    with recurrent_shapes(), torch.no_grad():
        weights = [p.detach() for p in layer.parameters()]
        found = decomposition_table[torch.ops.aten.gru.input](
            x, x.new_zeros(1, 2, 4), weights, True, 1, 0.0, False, False, False
        )
        torch.testing.assert_close(found[0], layer(x)[0])
