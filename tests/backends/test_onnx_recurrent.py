"""Tests that recurrent layers become one ONNX op each, with torch's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack

onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
N = 3

LAYERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "gru": (nn.GRU, "GRU", {}),
    "gru of two layers and directions": (nn.GRU, "GRU", {"num_layers": 2, "bidirectional": True}),
    "gru without biases": (nn.GRU, "GRU", {"bias": False}),
    "lstm": (nn.LSTM, "LSTM", {}),
    "lstm of two layers and directions": (nn.LSTM, "LSTM", {"num_layers": 2, "bidirectional": True}),
    "rnn of tanh": (nn.RNN, "RNN", {}),
    "rnn of relu, two directions": (nn.RNN, "RNN", {"nonlinearity": "relu", "bidirectional": True}),
}


class Steps(nn.Module):
    def __init__(self, name: str, first: bool) -> None:
        super().__init__()
        kind, _, options = LAYERS[name]
        self.layer = kind(4, 5, batch_first=first, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.layer(x)
        return y, state[1] if isinstance(state, tuple) else state


@pytest.mark.extended(keep=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_is_one_op(name: str, tmp_path: Path) -> None:
    first = "two" not in name
    modules = [Steps(name, first) for _ in range(N)]
    path = built(tmp_path, lambda: Steps(name, first), modules, f"x=float32[{'B,7,4' if first else '7,B,4'}]")
    cache = tmp_path / "cache"
    ens = widepack.load(path, backend="onnxruntime", strategies="loop", compile="now", cache=cache)
    for batch in (1, 3):
        x = torch.randn((batch, 7, 4) if first else (7, batch, 4))
        for k, found in enumerate(ens(x)):
            torch.testing.assert_close(found, torch.stack([m(x)[k] for m in modules]))
    (file,) = cache.glob("*/member.onnx")
    ops = [n.op_type for n in onnx_ir.load(file).graph.all_nodes()]
    ops += [n.op_type for f in onnx_ir.load(file).functions.values() for n in f]
    _, op, options = LAYERS[name]
    assert ops.count(op) == options.get("num_layers", 1) and len(ops) < 80
