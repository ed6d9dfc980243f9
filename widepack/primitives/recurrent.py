"""Recurrent layers over all steps: LSTM, GRU and plain RNN, of several layers and directions.

    h[i, t] = cell(x[i, t] Wx[i]^T + bx[i], h[i, t-1] Wh[i]^T + bh[i])
    x: [N, T, B, I] or [T, B, I]; with batch_first B comes before T    y: [N, T, B, D*P]
    h: [N, L*D, B, P]    c: [N, L*D, B, H]    L layers, D directions
    Wx: [N, G*H, I]    Wh: [N, G*H, P]    Wp: [N, P, H] of an LSTM with projections, else P = H
    G gates: 1, of a GRU 3, of an LSTM 4

| strategy | when | how |
|---|---|---|
| `fold` | all weights Shared | one op over all members' rows |
| `packed` | LSTM on a CPU, float32, W Stacked, no Wp | a oneDNN call per member, over prepacked weights |
| `fused` | some weight Stacked | one batched product per step, over weights transposed at load |
| `trained` | train mode, W Stacked, no Wp, no dropout; not oneDNN's LSTM | as `fused`, with a derivative |

`fused` computes the products with x for many steps at once (widepack.kernels). For an LSTM `packed` is
registered first: the steps of oneDNN are fast at every size; `fused` is faster only where the state of a
member is small (B*H).

No strategy applies to dropout between layers that train, or to packed sequences (`lstm.data`, ...), where the
number of rows differs between steps: they run member after member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ir.values import Shared, Stacked, Value, WideValue, hint
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Make, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank

_PLAIN = "gru.input rnn_tanh.input rnn_relu.input"


def _states(hx: WideValue | Sequence[WideValue]) -> list[WideValue]:
    """Returns the initial states of an op: h, and for an LSTM also c."""
    return list(hx) if isinstance(hx, Sequence) else [hx]


def _known(
    x: WideValue,
    hx: WideValue | Sequence[WideValue],
    params: Sequence[WideValue],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    first: bool,
) -> bool:
    """Whether these strategies can run the layer: batched, not training, one float dtype, all weights."""
    values: list[WideValue] = [x, *_states(hx), *params]
    if (
        train
        or not all(isinstance(v, (Shared, Stacked)) for v in values)
        or rank(x) != 3
        or any(rank(s) != 3 for s in _states(hx))
    ):
        return False
    dtypes = {v.value.dtype for v in values}  # type: ignore[union-attr]
    return (
        len(dtypes) == 1
        and all(d.is_floating_point for d in dtypes)
        and len(params) % (layers * (2 if both else 1)) == 0
    )


def _all_shared(w: Writer, x: WideValue, hx: Any, params: Sequence[WideValue], *rest: Any) -> bool:
    return _known(x, hx, params, *rest) and all(isinstance(p, Shared) for p in params)


def _some_stacked(w: Writer, x: WideValue, hx: Any, params: Sequence[WideValue], *rest: Any) -> bool:
    return _known(x, hx, params, *rest) and any(isinstance(p, Stacked) for p in params)


def _packable(
    w: Writer, x: WideValue, hx: Any, params: Sequence[WideValue], biases: bool, *rest: Any
) -> bool:
    """Whether oneDNN can run it: CPU, float32, all matrices Stacked, no projections, static sizes."""
    if w.device != "cpu" or not _some_stacked(w, x, hx, params, biases, *rest):
        return False
    groups = _groups(params, biases, *rest)
    matrices = [p for group in groups for p in group[:2]]
    if len(groups[0]) != (4 if biases else 2) or not all(isinstance(p, Stacked) for p in matrices):
        return False
    return all(p.value.dtype == torch.float32 and all(p.value.sizes) for p in matrices)  # type: ignore[union-attr]


def _groups(
    params: Sequence[WideValue],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    first: bool,
) -> list[list[WideValue]]:
    """Returns the weights of each layer and direction: Wx, Wh, and if present bx and bh, then Wp."""
    size = len(params) // (layers * (2 if both else 1))
    return [list(params[i : i + size]) for i in range(0, len(params), size)]


@strategy(f"{_PLAIN} lstm.input", "fold", family="recurrent", when=_all_shared)
def fold(
    w: Writer,
    x: WideValue,
    hx: Any,
    params: Sequence[WideValue],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    first: bool,
) -> Any:
    """for Shared weights: one op over all members' rows"""

    def folded(v: WideValue, at: int) -> Value:
        """Folds members into the batch, which is dim `at` of the member."""
        return w.call("flatten.using_ints", w.call("movedim.int", w.stack(v), 0, at), at, at + 1)

    states = [folded(s, 1) for s in _states(hx)]
    value = states if isinstance(hx, (list, tuple)) else states[0]
    out = w.call(
        w.op,
        folded(x, 0 if first else 1),
        value,
        put_shared(list(params)),
        biases,
        layers,
        dropout,
        train,
        both,
        first,
    )

    def parted(i: int, at: int) -> Stacked:
        y = w.call("unflatten.int", w.call("operator.getitem", out, i), at, [w.members, -1])
        return Stacked(w.call("movedim.int", y, at, 0))

    return (parted(0, 0 if first else 1), *(parted(1 + i, 1) for i in range(len(states))))


@strategy("lstm.input", "packed", family="recurrent", when=_packable, derivative=False)
def packed(w: Writer, x: WideValue, hx: Any, params: Sequence[WideValue], *rest: Any) -> Any:
    """a oneDNN call for each member over weights that were prepacked at load"""

    def layer(
        value: Value, states: list[Value], group: list[WideValue], reverse: bool
    ) -> tuple[Value, list[Value]]:
        w_x, w_h, *biases = group
        sizes = [hint(s) for s in value.fake.shape[1:]]  # only a hint for oneDNN
        weights = w.call("widepack.pack_lstm.default", _turned(w, w_x), _turned(w, w_h), reverse, sizes)
        out = w.call("widepack.packed_lstm.default", value, *states, weights, *_biases(w, biases), reverse)
        y, c = (w.call("operator.getitem", out, i) for i in range(2))
        return y, [_last(w, y, reverse), c]

    return _layered(w, layer, x, hx, params, *rest)


@strategy(f"{_PLAIN} lstm.input", "fused", family="recurrent", when=_some_stacked, derivative=False)
def fused(w: Writer, x: WideValue, hx: Any, params: Sequence[WideValue], *rest: Any) -> Any:
    """one batched product per step for all members; one op loops over the steps of a layer and direction"""
    cell = w.op.split(".")[1]

    def layer(
        value: Value, states: list[Value], group: list[WideValue], reverse: bool
    ) -> tuple[Value, list[Value]]:
        w_x, w_h = (_turned(w, m, copy=True) for m in group[:2])
        few = group[2:4] if rest[0] else []
        b_x, b_h = _biases(w, few)
        if cell == "lstm":
            project = _turned(w, group[-1], copy=True) if len(group) > 2 + len(few) else None
            out = w.call("widepack.lstm_steps.default", value, *states, w_x, w_h, b_x, b_h, project, reverse)
            y, c = (w.call("operator.getitem", out, i) for i in range(2))
            return y, [_last(w, y, reverse), c]
        if cell == "gru":
            y = w.call("widepack.gru_steps.default", value, *states, w_x, w_h, b_x, b_h, reverse)
        else:
            y = w.call(
                "widepack.rnn_steps.default",
                value,
                *states,
                w_x,
                w_h,
                b_x,
                b_h,
                reverse,
                cell.removeprefix("rnn_"),
            )
        return y, [_last(w, y, reverse)]

    return _layered(w, layer, x, hx, params, *rest)


def _trains(
    w: Writer,
    x: WideValue,
    hx: Any,
    params: Sequence[WideValue],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    *rest: Any,
) -> bool:
    """Whether members in train mode can run the layer wide: no dropout between layers, no projections.

    An LSTM in float32 on a CPU is left to oneDNN, whose training of one member after the other is faster.
    """
    if not train or (dropout and layers > 1):
        return False
    if w.op == "aten.lstm.input" and w.device == "cpu" and x.value.dtype == torch.float32:  # type: ignore[union-attr]
        return False
    options = (biases, layers, dropout, False, *rest)
    if not _some_stacked(w, x, hx, params, *options):
        return False
    return all(len(group) == (4 if biases else 2) for group in _groups(params, *options))


@strategy(f"{_PLAIN} lstm.input", "trained", family="recurrent", when=_trains)
def trained(w: Writer, x: WideValue, hx: Any, params: Sequence[WideValue], *rest: Any) -> Any:
    """one batched product per step for all members, in the backward pass too"""
    cell = w.op.split(".")[1]

    def layer(
        value: Value, states: list[Value], group: list[WideValue], reverse: bool
    ) -> tuple[Value, list[Value]]:
        weights = [*(_turned(w, m) for m in group[:2]), *_biases(w, group[2:4])]
        value = w.call("flip", value, [1]) if reverse else value
        if cell.startswith("rnn_"):
            y = w.call("widepack.rnn_training.default", value, *states, *weights, cell.removeprefix("rnn_"))
            last = []
        else:
            out = w.call(f"widepack.{cell}_training.default", value, *states, *weights)
            y = w.call("operator.getitem", out, 0)
            last = [w.call("operator.getitem", out, 1)] if cell == "lstm" else []
        y = w.call("flip", y, [1]) if reverse else y
        return y, [_last(w, y, reverse), *last]

    return _layered(w, layer, x, hx, params, *rest)


def _layered(w: Writer, layer: Any, x: WideValue, hx: Any, params: Sequence[WideValue], *rest: Any) -> Any:
    """Runs all layers and directions.

    layer: runs one of them. It takes x `[N or 1, T, B, I]`, initial states `[N, B, *]`, its weights and
    whether to go backwards, and returns y `[N, T, B, P]` and the last states.
    """
    *_, both, first = rest
    directions = 2 if both else 1
    value: Value = x.value if isinstance(x, Stacked) else w.call("unsqueeze", put_shared(x), 0)
    if first:
        value = w.call("transpose.int", value, 1, 2)
    states, groups = _states(hx), _groups(params, *rest)
    ends: list[list[Value]] = [[] for _ in states]
    for start in range(0, len(groups), directions):
        out = []
        for i in range(start, start + directions):
            y, last = layer(value, [_state(w, s, i) for s in states], groups[i], i > start)
            out.append(y)
            for all_, one in zip(ends, last):
                all_.append(one)
        value = out[0] if len(out) == 1 else w.call("cat", out, -1)
    y = w.call("transpose.int", value, 1, 2) if first else value
    return (Stacked(y), *(Stacked(w.call("stack", e, 1)) for e in ends))


def _state(w: Writer, s: WideValue, i: int) -> Value:
    """Returns the initial state `[N, B, *]` of the i-th layer and direction."""
    return (
        w.call("select.int", s.value, 1, i)
        if isinstance(s, Stacked)
        else w.stack(Shared(w.call("select.int", put_shared(s), 0, i)))
    )


def _last(w: Writer, y: Value, reverse: bool) -> Value:
    return w.call("select.int", y, 1, 0 if reverse else -1)


def _turned(w: Writer, weight: WideValue, copy: bool = False) -> Value:
    """Transposes weights `[N, O, I] -> [N, I, O]`; a Shared weight is stored once.

    copy: whether to reorder the memory too.
    """
    if isinstance(weight, Stacked):
        out = w.call("transpose.int", weight.value, 1, 2)
        return w.call("clone", out, memory_format=torch.contiguous_format) if copy else out
    out = w.call("transpose.int", put_shared(weight), 0, 1)
    return w.stack(Shared(w.call("clone", out, memory_format=torch.contiguous_format) if copy else out))


def _biases(w: Writer, biases: Sequence[WideValue]) -> tuple[Value | None, Value | None]:
    return (w.stack(biases[0]), w.stack(biases[1])) if biases else (None, None)


def _layer_call(
    draw: Draw,
    gates: int,
    layers: int,
    biases: bool,
    both: bool,
    first: bool,
    project: int = 0,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
) -> Sample:
    """Returns one call of an op: width 6, inputs 4, 3 steps."""
    width, inputs, steps, directions = 6, 4, 3, 2 if both else 1
    out = project or width
    x = draw.normal(*((B, steps) if first else (steps, B)), inputs, dtype=dtype)
    states = [draw.normal(layers * directions, B, out, dtype=dtype)]
    if gates == 4:
        states.append(draw.normal(layers * directions, B, width, dtype=dtype))
    params = []
    for i in range(layers):
        for _ in range(directions):
            sizes: list[tuple[int, ...]] = [
                (gates * width, out * directions if i else inputs),
                (gates * width, out),
            ]
            sizes += [(gates * width,)] * 2 if biases else []
            sizes += [(project, width)] if project else []
            params += [draw.normal(*s, dtype=dtype) / 2 for s in sizes]
    return call(x, states if gates == 4 else states[0], params, biases, layers, dropout, train, both, first)


def _layers(gates: int) -> Make:
    """Returns the samples of an op.

    They are with and without biases, of one and several layers and directions, with the batch first or not,
    and of an LSTM with projections.
    """

    def make(draw: Draw) -> list[Sample]:
        calls = [
            _layer_call(draw, gates, 1, True, False, True),
            _layer_call(draw, gates, 1, False, False, False),
            _layer_call(draw, gates, 2, True, True, True),
            _layer_call(draw, gates, 2, False, True, False),
            _layer_call(draw, gates, 2, True, False, True, dropout=0.3, dtype=torch.float64),
            _layer_call(draw, gates, 2, True, True, True, train=True),
            _layer_call(draw, gates, 1, False, False, False, dtype=torch.float64, train=True),
        ]
        if gates == 4:
            calls += [
                _layer_call(draw, gates, 2, True, True, True, project=2),
                _layer_call(draw, gates, 1, False, False, False, project=2),
            ]
        return calls

    return make


samples("lstm.input")(_layers(4))
samples("gru.input")(_layers(3))
samples("rnn_tanh.input rnn_relu.input")(_layers(1))
