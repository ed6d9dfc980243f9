"""Translates recurrent layers of torch into ONNX's own GRU, LSTM and RNN.

torch's exporter writes some of them as their steps, and runs the steps of all of them several times to find
shapes, which takes seconds. Here a layer is an op without steps for the exporter, and its translation is one
ONNX op for each layer. ONNX has the gates in another order:

| | torch | ONNX |
|---|---|---|
| LSTM | input, forget, cell, output | input, output, forget, cell |
| GRU | reset, update, new | update, reset, new |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

_GATES = {"gru": (1, 0, 2), "lstm": (0, 3, 1, 2), "rnn_tanh": (0,), "rnn_relu": (0,)}
_REST = "bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"


def recurrent_layers(graph: fx.Graph) -> dict[Any, Callable[..., Any]]:
    """Replaces the recurrent layers of a graph that ONNX has. Returns: the translation of each new op."""
    table: dict[Any, Callable[..., Any]] = {}
    for kind in _GATES:
        for node in graph.find_nodes(op="call_function", target=getattr(torch.ops.aten, kind).input):
            params, has_biases, layers, bidirectional = node.args[2], node.args[3], node.args[4], node.args[7]
            if len(params) != (4 if has_biases else 2) * layers * (2 if bidirectional else 1):
                continue  # with projections
            node.target = _op(kind)
            table[node.target] = _TRANSLATIONS[kind]
    return table


@cache
def _library() -> Any:
    return torch.library.Library("widepack_onnx", "DEF")  # type: ignore[no-untyped-call]


@cache
def _op(kind: str) -> Any:
    """A recurrent layer as an op that has shapes and no steps."""
    state, results = ("Tensor[]", 3) if kind == "lstm" else ("Tensor", 2)
    returns = ", ".join(["Tensor"] * results)
    _library().define(f"{kind}(Tensor input, {state} hx, Tensor[] params, {_REST}) -> ({returns})")

    def shapes(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states = list(hx) if kind == "lstm" else [hx]
        width = states[0].shape[-1] * (2 if bidirectional else 1)
        return (x.new_empty([*x.shape[:-1], width]), *(torch.empty_like(s) for s in states))

    torch.library.register_fake(f"widepack_onnx::{kind}", shapes, lib=_library())
    return getattr(torch.ops.widepack_onnx, kind).default


def _layers(kind: str, x: Any, states: Sequence[Any], params: Sequence[Any], rest: Sequence[Any]) -> Any:
    """Adds the ONNX ops of a layer, and returns its results."""
    from onnxscript import onnx_opset

    op: Any = onnx_opset.opset18  # whose annotations do not allow lists of numbers

    has_biases, num_layers, _, _, bidirectional, batch_first = rest
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    hidden = int(params[1].shape[1])
    gates = [g * hidden + i for g in _GATES[kind] for i in range(hidden)]
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    finals: list[list[Any]] = [[] for _ in states]

    def stacked(layer: int, part: int) -> Any:
        rows = [params[(layer * directions + d) * each + part] for d in range(directions)]
        rows = (
            [op.Gather(r, op.Constant(value_ints=gates), axis=0) for r in rows]
            if len(_GATES[kind]) > 1
            else rows
        )
        rows = [op.Unsqueeze(r, [0]) for r in rows]
        return rows[0] if directions == 1 else op.Concat(*rows, axis=0)

    for layer in range(num_layers):
        bias = op.Concat(stacked(layer, 2), stacked(layer, 3), axis=1) if has_biases else None
        begin, end = [layer * directions], [(layer + 1) * directions]
        start = [op.Slice(s, begin, end, [0]) for s in states] if num_layers > 1 else list(states)
        options: dict[str, Any] = {
            "hidden_size": hidden,
            "direction": "bidirectional" if bidirectional else "forward",
        }
        read = (x, stacked(layer, 0), stacked(layer, 1), bias, None, *start)
        if kind == "gru":
            y, *final = op.GRU(*read, linear_before_reset=1, **options)
        elif kind == "lstm":
            y, *final = op.LSTM(*read, **options)
        else:
            y, *final = op.RNN(
                *read, activations=[kind.removeprefix("rnn_").capitalize()] * directions, **options
            )
        for k, value in enumerate(final[: len(states)]):
            finals[k].append(value)
        if directions == 1:  # [T, 1, B, H] -> [T, B, H]
            x = op.Squeeze(y, [1])
        else:
            x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, directions * hidden])
    x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
    return (x, *(f[0] if num_layers == 1 else op.Concat(*f, axis=0) for f in finals))


def _translation(kind: str) -> Callable[..., Any]:
    def translate(input, hx, params, *rest):  # type: ignore[no-untyped-def]  # torch reads annotations as types of ONNX
        return _layers(kind, input, list(hx) if kind == "lstm" else [hx], params, rest)

    return translate


_TRANSLATIONS = {kind: _translation(kind) for kind in _GATES}
