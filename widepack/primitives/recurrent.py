"""Recurrent layers over all steps: LSTM, GRU and plain RNN, of any number of layers, in one direction or both.

h[i, t] = cell(x[i, t] Wx[i]^T + bx[i], h[i, t-1] Wh[i]^T + bh[i])   x: [N, T, B, I] or [T, B, I], B before T with batch_first   h: [N, L*D, B, P]   c: [N, L*D, B, H]
Wx: [N, G*H, I]   Wh: [N, G*H, P]   Wp: [N, P, H] of an LSTM with projections, else P = H   y: [N, T, B, D*P]   gates G: 1, GRU 3, LSTM 4

| strategy | when | how |
|---|---|---|
| `fold` | all weights Shared | one op over all members' rows |
| `packed` | LSTM on a CPU, float32, W Stacked, no projections | a oneDNN call a member, over weights in its own order, packed once at load |
| `fused` | some weight Stacked | the products with x of many steps at once, then one batched product a step for all members (recurrent.py), over weights turned once at load |

An LSTM's `packed` comes first: oneDNN's steps are fast at every size, those of `fused` are faster only where a member's state has few numbers (B*H).

Members that train (dropout between layers) run once a member, and so do packed sequences (`lstm.data`, ...): each step has a number of rows of its own there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..registry.registry import strategy
from ..registry.samples import B, Draw, Make, Sample, call, samples
from ..ir.values import Shared, Stacked, Value, Wide, hint
from ..registry.writer import Writer, put_shared, rank

_PLAIN = "gru.input rnn_tanh.input rnn_relu.input"


def _states(hx: Wide | Sequence[Wide]) -> list[Wide]:
    """The initial states of an op: h, of an LSTM h and c."""
    return list(hx) if isinstance(hx, Sequence) else [hx]


def _known(
    x: Wide, hx: Wide | Sequence[Wide], params: Sequence[Wide], biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
) -> bool:
    """Whether the layer runs as it is defined here: batched, not training, floats of one dtype, every weight there."""
    values: list[Wide] = [x, *_states(hx), *params]
    if train or not all(isinstance(v, (Shared, Stacked)) for v in values) or rank(x) != 3 or any(rank(s) != 3 for s in _states(hx)):
        return False
    dtypes = {v.value.dtype for v in values}  # type: ignore[union-attr]
    return len(dtypes) == 1 and all(d.is_floating_point for d in dtypes) and len(params) % (layers * (2 if both else 1)) == 0


def _all_shared(w: Writer, x: Wide, hx: Any, params: Sequence[Wide], *rest: Any) -> bool:
    return _known(x, hx, params, *rest) and all(isinstance(p, Shared) for p in params)


def _some_stacked(w: Writer, x: Wide, hx: Any, params: Sequence[Wide], *rest: Any) -> bool:
    return _known(x, hx, params, *rest) and any(isinstance(p, Stacked) for p in params)


def _packable(w: Writer, x: Wide, hx: Any, params: Sequence[Wide], biases: bool, *rest: Any) -> bool:
    """On a CPU, float32, every matrix a member's own and no projections; sizes that are there."""
    if w.device != "cpu" or not _some_stacked(w, x, hx, params, biases, *rest):
        return False
    matrices = [p for group in _groups(params, biases, *rest) for p in group[:2]]
    if len(_groups(params, biases, *rest)[0]) != (4 if biases else 2) or not all(isinstance(p, Stacked) for p in matrices):
        return False
    return all(p.value.dtype == torch.float32 and all(p.value.sizes) for p in matrices)  # type: ignore[union-attr]


def _groups(params: Sequence[Wide], biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool) -> list[list[Wide]]:
    """The weights of each layer and direction, in their order: Wx, Wh, then bx, bh if there are any, then Wp if there is one."""
    size = len(params) // (layers * (2 if both else 1))
    return [list(params[i : i + size]) for i in range(0, len(params), size)]


@strategy(f"{_PLAIN} lstm.input", "fold", family="recurrent", when=_all_shared)
def fold(w: Writer, x: Wide, hx: Any, params: Sequence[Wide], biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool) -> Any:
    """Shared weights: one op over all members' rows"""

    def folded(v: Wide, at: int) -> Value:
        """Members in the dim of the batch, which is `at` in the member."""
        return w.call("flatten.using_ints", w.call("movedim.int", w.stack(v), 0, at), at, at + 1)

    states = [folded(s, 1) for s in _states(hx)]
    given = states if isinstance(hx, (list, tuple)) else states[0]
    made = w.call(w.op, folded(x, 0 if first else 1), given, put_shared(list(params)), biases, layers, dropout, train, both, first)

    def parted(i: int, at: int) -> Stacked:
        y = w.call("unflatten.int", w.call("operator.getitem", made, i), at, [w.members, -1])
        return Stacked(w.call("movedim.int", y, at, 0))

    return (parted(0, 0 if first else 1), *(parted(1 + i, 1) for i in range(len(states))))


@strategy("lstm.input", "packed", family="recurrent", when=_packable, derivative=False)
def packed(w: Writer, x: Wide, hx: Any, params: Sequence[Wide], *rest: Any) -> Any:
    """a oneDNN call a member over weights that were packed at load"""

    def layer(given: Value, states: list[Value], group: list[Wide], reverse: bool) -> tuple[Value, list[Value]]:
        w_x, w_h, *biases = group
        sizes = [max(1, hint(s)) for s in given.held.shape[1:]]  # a hint alone: an empty batch is none
        weights = w.call("widepack.pack_lstm.default", _turned(w, w_x), _turned(w, w_h), reverse, sizes)
        made = w.call("widepack.packed_lstm.default", given, *states, weights, *_biases(w, biases), reverse)
        y, c = (w.call("operator.getitem", made, i) for i in range(2))
        return y, [_last(w, y, reverse), c]

    return _layered(w, layer, x, hx, params, *rest)


@strategy(f"{_PLAIN} lstm.input", "fused", family="recurrent", when=_some_stacked, derivative=False)
def fused(w: Writer, x: Wide, hx: Any, params: Sequence[Wide], *rest: Any) -> Any:
    """one batched product a step for all members, the time loop inside one op a layer and direction"""
    cell = w.op.split(".")[1]

    def layer(given: Value, states: list[Value], group: list[Wide], reverse: bool) -> tuple[Value, list[Value]]:
        w_x, w_h = (_turned(w, m, own=True) for m in group[:2])
        few = group[2:4] if rest[0] else []
        b_x, b_h = _biases(w, few)
        if cell == "lstm":
            project = _turned(w, group[-1], own=True) if len(group) > 2 + len(few) else None
            made = w.call("widepack.lstm_steps.default", given, *states, w_x, w_h, b_x, b_h, project, reverse)
            y, c = (w.call("operator.getitem", made, i) for i in range(2))
            return y, [_last(w, y, reverse), c]
        if cell == "gru":
            y = w.call("widepack.gru_steps.default", given, *states, w_x, w_h, b_x, b_h, reverse)
        else:
            y = w.call("widepack.rnn_steps.default", given, *states, w_x, w_h, b_x, b_h, reverse, cell.removeprefix("rnn_"))
        return y, [_last(w, y, reverse)]

    return _layered(w, layer, x, hx, params, *rest)


def _layered(w: Writer, layer: Any, x: Wide, hx: Any, params: Sequence[Wide], *rest: Any) -> Any:
    """All layers and directions. layer: (x [N or 1, T, B, I], initial states [N, B, *], the weights of one, reverse) -> (y [N, T, B, P], last states)."""
    *_, both, first = rest
    directions = 2 if both else 1
    given: Value = x.value if isinstance(x, Stacked) else w.call("unsqueeze", put_shared(x), 0)
    if first:
        given = w.call("transpose.int", given, 1, 2)
    states, groups = _states(hx), _groups(params, *rest)
    ends: list[list[Value]] = [[] for _ in states]
    for start in range(0, len(groups), directions):
        made = []
        for i in range(start, start + directions):
            y, last = layer(given, [_state(w, s, i) for s in states], groups[i], i > start)
            made.append(y)
            for all_, one in zip(ends, last):
                all_.append(one)
        given = made[0] if len(made) == 1 else w.call("cat", made, -1)
    y = w.call("transpose.int", given, 1, 2) if first else given
    return (Stacked(y), *(Stacked(w.call("stack", e, 1)) for e in ends))


def _state(w: Writer, s: Wide, i: int) -> Value:
    """`[N, B, *]`: the initial state of the i-th layer and direction."""
    return w.call("select.int", s.value, 1, i) if isinstance(s, Stacked) else w.stack(Shared(w.call("select.int", put_shared(s), 0, i)))


def _last(w: Writer, y: Value, reverse: bool) -> Value:
    return w.call("select.int", y, 1, 0 if reverse else -1)


def _turned(w: Writer, weight: Wide, own: bool = False) -> Value:
    """`[N, O, I] -> [N, I, O]`; a Shared one is held once. own: in memory of that order."""
    if isinstance(weight, Stacked):
        made = w.call("transpose.int", weight.value, 1, 2)
        return w.call("clone", made, memory_format=torch.contiguous_format) if own else made
    made = w.call("transpose.int", put_shared(weight), 0, 1)
    return w.stack(Shared(w.call("clone", made, memory_format=torch.contiguous_format) if own else made))


def _biases(w: Writer, biases: Sequence[Wide]) -> tuple[Value | None, Value | None]:
    return (w.stack(biases[0]), w.stack(biases[1])) if biases else (None, None)


def _layers(gates: int) -> Make:
    """An op's samples: without biases, with them; several layers and directions; the batch first; an LSTM with projections."""

    def make(draw: Draw) -> list[Sample]:
        def one(
            layers: int, biases: bool, both: bool, first: bool, project: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32
        ) -> Sample:
            width, inputs, steps, directions = 6, 4, 3, 2 if both else 1
            out = project or width
            x = draw.normal(B, steps, inputs, dtype=dtype) if first else draw.normal(steps, B, inputs, dtype=dtype)
            states = [draw.normal(layers * directions, B, out, dtype=dtype)]
            if gates == 4:
                states.append(draw.normal(layers * directions, B, width, dtype=dtype))
            params = []
            for i in range(layers):
                for _ in range(directions):
                    sizes: list[tuple[int, ...]] = [(gates * width, out * directions if i else inputs), (gates * width, out)]
                    sizes += [(gates * width,)] * 2 if biases else []
                    sizes += [(project, width)] if project else []
                    params += [draw.normal(*s, dtype=dtype) / 2 for s in sizes]
            return call(x, states if gates == 4 else states[0], params, biases, layers, dropout, False, both, first)

        made = [
            one(1, True, False, True),
            one(1, False, False, False),
            one(2, True, True, True),
            one(2, False, True, False),
            one(2, True, False, True, dropout=0.3, dtype=torch.float64),
        ]
        if gates == 4:
            made += [one(2, True, True, True, project=2), one(1, False, False, False, project=2)]
        return made

    return make


samples("lstm.input")(_layers(4))
samples("gru.input")(_layers(3))
samples("rnn_tanh.input rnn_relu.input")(_layers(1))
