"""Recurrent cells: one step of an LSTM, a GRU or a plain RNN, as two linear layers and gates.

gates[i] = x[i] Wx[i]^T + bx[i], h[i] Wh[i]^T + bh[i]
x: [N, B, I] or [B, I]    h: [N, B, H] or [B, H]    Wx: [N, G*H, I]    Wh: [N, G*H, H]
G gates: 1, of a GRU 3, of an LSTM 4
"""

from __future__ import annotations

from typing import Any

from ..ir.ops import full_name
from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.registry import strategies_of, strategy
from ..registry.samples import B, Draw, Make, Sample, call, samples
from ..registry.writer import Writer, put_shared


def _linear(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None) -> Value:
    """Computes `[N, B, G*H]` with the first strategy of `linear` that applies."""
    if not any(isinstance(v, Stacked) for v in (x, weight, bias)):
        return w.stack(Shared(w.call("linear", put_shared(x), put_shared(weight), put_shared(bias))))
    for s in strategies_of(full_name("linear")).values():
        if s.when(w, x, weight, bias):
            return w.stack(s.rule(w, x, weight, bias))
    raise TypeError("no strategy of linear applies to these arguments")


def _gates(w: Writer, y: Value, count: int) -> list[Value]:
    parts = w.call("chunk", y, count, -1)
    return [w.call("operator.getitem", parts, i) for i in range(count)]


@strategy("lstm_cell", "linear", family="recurrent")
def lstm_cell(
    w: Writer,
    x: WideValue,
    hx: list[WideValue],
    w_ih: WideValue,
    w_hh: WideValue,
    b_ih: WideValue | None = None,
    b_hh: WideValue | None = None,
) -> Any:
    """two linear layers for all members, then the gates"""
    i, f, g, o = _gates(w, w.call("add.Tensor", _linear(w, x, w_ih, b_ih), _linear(w, hx[0], w_hh, b_hh)), 4)
    kept = w.call("mul.Tensor", w.call("sigmoid", f), w.stack(hx[1]))
    c = w.call("add.Tensor", kept, w.call("mul.Tensor", w.call("sigmoid", i), w.call("tanh", g)))
    return Stacked(w.call("mul.Tensor", w.call("sigmoid", o), w.call("tanh", c))), Stacked(c)


@strategy("gru_cell", "linear", family="recurrent")
def gru_cell(
    w: Writer,
    x: WideValue,
    hx: WideValue,
    w_ih: WideValue,
    w_hh: WideValue,
    b_ih: WideValue | None = None,
    b_hh: WideValue | None = None,
) -> WideValue:
    """two linear layers for all members, then the gates"""
    xr, xz, xn = _gates(w, _linear(w, x, w_ih, b_ih), 3)
    hr, hz, hn = _gates(w, _linear(w, hx, w_hh, b_hh), 3)
    r, z = (w.call("sigmoid", w.call("add.Tensor", a, b)) for a, b in ((xr, hr), (xz, hz)))
    n = w.call("tanh", w.call("add.Tensor", xn, w.call("mul.Tensor", r, hn)))
    return Stacked(w.call("add.Tensor", n, w.call("mul.Tensor", z, w.call("sub.Tensor", w.stack(hx), n))))


@strategy("rnn_tanh_cell rnn_relu_cell", "linear", family="recurrent")
def rnn_cell(
    w: Writer,
    x: WideValue,
    hx: WideValue,
    w_ih: WideValue,
    w_hh: WideValue,
    b_ih: WideValue | None = None,
    b_hh: WideValue | None = None,
) -> WideValue:
    """two linear layers for all members, then tanh or relu"""
    y = w.call("add.Tensor", _linear(w, x, w_ih, b_ih), _linear(w, hx, w_hh, b_hh))
    return Stacked(w.call("tanh" if "tanh" in w.op else "relu", y))


def _cells(gates: int, states: int) -> Make:
    def make(draw: Draw) -> list[Sample]:
        h = [draw.normal(B, 6) for _ in range(states)]
        weights = draw.normal(gates * 6, 4), draw.normal(gates * 6, 6)
        biases = draw.normal(gates * 6), draw.normal(gates * 6)
        return [call(draw.normal(B, 4), h if states > 1 else h[0], *weights, *b) for b in ((), biases)]

    return make


samples("lstm_cell")(_cells(4, 2))
samples("gru_cell")(_cells(3, 1))
samples("rnn_tanh_cell rnn_relu_cell")(_cells(1, 1))
