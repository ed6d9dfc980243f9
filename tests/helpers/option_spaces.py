"""Option spaces: draw any call of a layer's op, option by option. (Samples are a few fixed calls.)

    @options("linear")
    def _linear(draw: Draw, pick: Pick, batch: int) -> Sample: ...

`pick(a, b, c)` chooses a literal, `draw` makes tensors, `batch` is the batch size. A pick never depends on
the batch size or on the numbers in tensors, so that the same picks give N members, each batch size and each
dtype. Two draws differ in the numbers in tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from widepack.ir.ops import full_name
from widepack.registry.samples import Draw, Sample, call


class Pick:
    """Chooses among options. choose: takes the number of options and returns the index of one."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._picks: list[int] = []
        self._at: int | None = None

    def __call__(self, *among: Any) -> Any:
        if self._at is None:
            self._picks.append(self._choose(len(among)))
            return among[self._picks[-1]]
        self._at += 1
        return among[self._picks[self._at - 1]]

    def again(self) -> Pick:
        """Returns a `Pick` that repeats the earlier choices in order."""
        self._at = 0
        return self


Space = Callable[[Draw, Pick, int], Sample]
OPTIONS: dict[str, Space] = {}


def options(names: str) -> Callable[[Space], Space]:
    """Registers the decorated function as the option space of these ops."""

    def add(make: Space) -> Space:
        for name in names.split():
            OPTIONS[full_name(name)] = make
        return make

    return add


def _lead(pick: Pick, batch: int, *, none: bool = True) -> tuple[int, ...]:
    """Picks the leading dims: none, a batch, or a batch among others."""
    return pick(*([()] if none else []), (batch,), (batch, 3), (2, batch, 3))  # type: ignore[no-any-return]


def _maybe(pick: Pick, value: Any) -> Any:
    return pick(value, None)


@options("linear")
def _linear(draw: Draw, pick: Pick, batch: int) -> Sample:
    inputs, outputs = pick(1, 4, 7), pick(1, 3, 16)
    bias = pick((outputs,), None, (outputs,), (1,), ())
    return call(
        draw.normal(*_lead(pick, batch), inputs),
        draw.normal(outputs, inputs),
        None if bias is None else draw.normal(*bias),
    )


@options("bilinear")
def _bilinear(draw: Draw, pick: Pick, batch: int) -> Sample:
    lead, a, b, outputs = _lead(pick, batch), pick(1, 4), pick(1, 3), pick(1, 6)
    return call(
        draw.normal(*lead, a),
        draw.normal(*lead, b),
        draw.normal(outputs, a, b),
        _maybe(pick, draw.normal(outputs)),
    )


@options("embedding")
def _embedding(draw: Draw, pick: Pick, batch: int) -> Sample:
    rows, dtype = pick(1, 7), pick(torch.int64, torch.int32)
    return call(
        draw.normal(rows, pick(1, 4)),
        draw.ints(0, rows, *_lead(pick, batch), dtype=dtype),
        pick(-1, 0, rows - 1),
        pick(False, True),
    )


def _bags(padded: bool) -> Space:
    """Returns a space of bags of one length, of several lengths, and empty bags; with and without a last
    offset.
    """

    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        lengths, last, mode, dtype = (
            pick((1,), (3,), (2, 0, 1), (0, 4)),
            pick(False, True),
            pick(0, 1, 2),
            pick(torch.int64, torch.int32),
        )
        starts = list(itertools.accumulate((lengths[i % len(lengths)] for i in range(batch)), initial=0))
        size = starts[-1] + (pick(0, 0, 2) if last else 0) * bool(
            batch
        )  # torch crashes on numbers without a bag
        weights = draw.normal(size) if pick(False, True) and mode == 0 else None
        given = (
            draw.normal(7, 4),
            draw.ints(0, 7, size, dtype=dtype),
            torch.tensor(starts[: batch + last], dtype=dtype),
        )
        return call(
            *given,
            pick(False, False, True),
            mode,
            False,
            weights,
            last,
            *([pick(None, 0, -1, 6)] if padded else []),
        )

    return make


options("embedding_bag")(_bags(False))
options("embedding_bag.padding_idx")(_bags(True))


def _window(pick: Pick, spatial: int, *choices: int) -> list[int]:
    """Picks one number for each dim, or one for all dims."""
    return [pick(*choices)] if pick(False, False, True) else [pick(*choices) for _ in range(spatial)]


def _image(draw: Draw, pick: Pick, batch: int, channels: int, spatial: int, *sizes: int) -> torch.Tensor:
    lead = pick((batch,), (batch,), ())
    return draw.normal(*lead, channels, *(pick(*sizes) for _ in range(spatial)))


def _conv(spatial: int, named: bool) -> Space:
    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        groups = pick(1, 1, 2, 4)
        outputs, plain = pick(4, 8), pick(False, False, True)  # a kernel of one pixel
        kernel = [1] * spatial if plain else [pick(1, 2, 3) for _ in range(spatial)]
        x, weight = _image(draw, pick, batch, 4, spatial, 5, 6), draw.normal(outputs, 4 // groups, *kernel)
        bias, dilation = _maybe(pick, draw.normal(outputs)), _window(pick, spatial, 1, 2)
        if named:
            padding = pick("same", "valid")
            return call(
                x,
                weight,
                bias,
                [1] if padding == "same" else _window(pick, spatial, 1, 2),
                padding,
                dilation,
                groups,
            )
        padding = [0] if plain and pick(True, False) else _window(pick, spatial, 0, 1, 2)
        return call(x, weight, bias, _window(pick, spatial, 1, 2), padding, dilation, groups)

    return make


def _transposed(spatial: int) -> Space:
    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        groups, outputs, kernel = pick(1, 2, 4), pick(1, 3), [pick(1, 2, 3) for _ in range(spatial)]
        x, weight = _image(draw, pick, batch, 4, spatial, 3, 4), draw.normal(4, outputs, *kernel)
        bias, stride = _maybe(pick, draw.normal(outputs * groups)), [pick(1, 2) for _ in range(spatial)]
        more = [pick(0, s - 1) for s in stride]
        return call(
            x, weight, bias, stride, _window(pick, spatial, 0, 1), more, groups, _window(pick, spatial, 1, 2)
        )

    return make


for _n in (1, 2, 3):
    options(f"conv{_n}d")(_conv(_n, False))
    options(f"conv{_n}d.padding")(_conv(_n, True))
    options(f"conv_transpose{_n}d{'' if _n == 1 else '.input'}")(_transposed(_n))


def _channels(draw: Draw, pick: Pick, batch: int, least: int) -> tuple[torch.Tensor, int]:
    """Returns an input `[B, C, *]` of rank `least` to 5, and C."""
    channels, rank = pick(1, 4, 6), pick(*range(least, 6))
    return draw.normal(batch, channels, *(3, 2, 2)[: rank - 2]), channels


@options("_native_batch_norm_legit_no_training")
def _batch_norm(draw: Draw, pick: Pick, batch: int) -> Sample:
    x, c = _channels(draw, pick, batch, 2)
    return call(
        x,
        _maybe(pick, draw.normal(c)),
        _maybe(pick, draw.normal(c)),
        draw.normal(c),
        draw.uniform(0.5, 2, c),
        0.1,
        pick(1e-5, 1e-2),
    )


@options("_native_batch_norm_legit_functional")
def _batch_norm_training(draw: Draw, pick: Pick, batch: int) -> Sample:
    x, c = _channels(draw, pick, batch, 2)
    affine, mean, var = (
        [_maybe(pick, draw.normal(c)) for _ in range(2)],
        draw.normal(c),
        draw.uniform(0.5, 2, c),
    )
    return call(x, *affine, mean, var, True, pick(0.1, 1.0, 0.0), pick(1e-5, 1e-2))


@options("_native_batch_norm_legit.no_stats")
def _batch_norm_of_batch(draw: Draw, pick: Pick, batch: int) -> Sample:
    x, c = _channels(draw, pick, batch, 2)
    return call(x, _maybe(pick, draw.normal(c)), _maybe(pick, draw.normal(c)), True, 0.1, pick(1e-5, 1e-2))


def _trailing(pick: Pick) -> list[int]:
    return pick([4], [1], [3, 4], [2, 3, 4])  # type: ignore[no-any-return]


@options("layer_norm")
def _layer_norm(draw: Draw, pick: Pick, batch: int) -> Sample:
    lead, shape = _lead(pick, batch), _trailing(pick)
    return call(
        draw.normal(*lead, *shape),
        shape,
        _maybe(pick, draw.normal(*shape)),
        _maybe(pick, draw.normal(*shape)),
        pick(1e-5, 1e-2),
    )


@options("rms_norm")
def _rms_norm(draw: Draw, pick: Pick, batch: int) -> Sample:
    lead, shape = _lead(pick, batch), _trailing(pick)
    return call(draw.normal(*lead, *shape), shape, _maybe(pick, draw.normal(*shape)), pick(None, 1e-2))


@options("group_norm")
def _group_norm(draw: Draw, pick: Pick, batch: int) -> Sample:
    rank, groups = pick(2, 3, 4, 5), pick(1, 2, 6)
    channels = 12 if rank == 2 else 6  # the norm of one number is rounding only
    x = draw.normal(batch, channels, *(3, 2, 2)[: rank - 2])
    return call(
        x, groups, _maybe(pick, draw.normal(channels)), _maybe(pick, draw.normal(channels)), pick(1e-5, 1e-2)
    )


@options("instance_norm")
def _instance_norm(draw: Draw, pick: Pick, batch: int) -> Sample:
    x, c = _channels(draw, pick, batch, 3)
    affine, still = [_maybe(pick, draw.normal(c)) for _ in range(2)], pick(False, True)
    statistics = (draw.normal(c), draw.uniform(0.5, 2, c)) if still else (None, None)
    return call(x, *affine, *statistics, not still, 0.1, pick(1e-5, 1e-2), False)


@options("scaled_dot_product_attention")
def _attention(draw: Draw, pick: Pick, batch: int) -> Sample:
    heads, each, queries, keys, width, values = (
        pick(1, 2),
        pick(1, 1, 3),
        pick(1, 3),
        pick(2, 6),
        pick(1, 4),
        pick(4, 5),
    )
    few, more = pick(
        ((batch, heads),) * 2,
        ((batch, heads), (batch, heads * each)),
        ((batch,),) * 2,
        ((), ()),
        ((batch, heads, 2),) * 2,
    )
    lead = more  # the dims of queries: several heads of queries use one head of keys
    q, k, v = (
        draw.normal(*lead, queries, width),
        draw.normal(*few, keys, width),
        draw.normal(*few, keys, values),
    )
    shapes = [
        (queries, keys),
        (*lead, queries, keys),
        (*(1 for _ in lead), queries, keys),
        (*lead[:1], *(1 for _ in lead[1:]), 1, keys),
    ]
    kind, shape = pick("none", "causal", "bool", "float"), pick(*shapes)
    mask = None
    if kind == "bool":
        mask = draw.bools(*shape)
        mask[..., 0] = True  # a row with all positions masked gives NaN
    elif kind == "float":
        mask = draw.normal(*shape)
    return call(
        q,
        k,
        v,
        mask,
        0.0,
        kind == "causal",
        scale=pick(None, 0.3),
        **({"enable_gqa": True} if few != more else {}),
    )


def _layers(gates: int) -> Space:
    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        layers, biases, both, first = pick(1, 2, 3), pick(True, False), pick(False, True), pick(False, True)
        steps, inputs, width = pick(1, 4), pick(1, 4), pick(1, 6)
        project = pick(0, 0, 2) if gates == 4 and width > 2 else 0
        out, directions = project or width, 2 if both else 1
        x = draw.normal(batch, steps, inputs) if first else draw.normal(steps, batch, inputs)
        states = [
            draw.normal(layers * directions, batch, out),
            draw.normal(layers * directions, batch, width),
        ]
        params = []
        for i in range(layers):
            for _ in range(directions):
                sizes: list[tuple[int, ...]] = [
                    (gates * width, out * directions if i else inputs),
                    (gates * width, out),
                ]
                sizes += [(gates * width,)] * 2 if biases else []
                sizes += [(project, width)] if project else []
                params += [draw.normal(*s) / 2 for s in sizes]
        train = pick(False, True)
        return call(x, states if gates == 4 else states[0], params, biases, layers, 0.0, train, both, first)

    return make


def _cells(gates: int) -> Space:
    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        inputs, width, lead = pick(1, 4), pick(1, 6), (batch,)
        states = [draw.normal(*lead, width) for _ in range(2)]
        weights = draw.normal(gates * width, inputs), draw.normal(gates * width, width)
        biases = (draw.normal(gates * width), draw.normal(gates * width)) if pick(True, False) else ()
        return call(draw.normal(*lead, inputs), states if gates == 4 else states[0], *weights, *biases)

    return make


for _gates, _layer, _cell in (
    (4, "lstm.input", "lstm_cell"),
    (3, "gru.input", "gru_cell"),
    (1, "rnn_tanh.input rnn_relu.input", "rnn_tanh_cell rnn_relu_cell"),
):
    options(_layer)(_layers(_gates))
    options(_cell)(_cells(_gates))


@options("dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout")
def _dropout(draw: Draw, pick: Pick, batch: int) -> Sample:
    p, train = pick(
        (0.5, False), (0.0, True), (1.0, False)
    )  # random results are compared with their distribution instead (test_options.py)
    return call(draw.normal(batch, *pick((4,), (4, 3), (4, 3, 2))), p, train)


@options("prelu")
def _prelu(draw: Draw, pick: Pick, batch: int) -> Sample:
    channels = pick(1, 4)
    return call(draw.normal(batch, channels, *pick((), (3,), (3, 2))), draw.normal(pick(1, channels)))


def _pool(kind: str, spatial: int) -> Space:
    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        x, kernel = _image(draw, pick, batch, 4, spatial, 6, 7), [pick(2, 3) for _ in range(spatial)]
        stride, padding, ceil = (
            pick([], [1] * spatial, [2] * spatial),
            [pick(0, 1) for _ in range(spatial)],
            pick(False, True),
        )
        if kind == "max":
            return call(x, kernel, stride, padding, [pick(1, 2) for _ in range(spatial)], ceil)
        return call(
            x, kernel, stride, padding, ceil, pick(True, False), *([pick(None, 3)] if spatial > 1 else [])
        )

    return make


def _adaptive(spatial: int) -> Space:
    def make(draw: Draw, pick: Pick, batch: int) -> Sample:
        return call(_image(draw, pick, batch, 4, spatial, 6, 7), [pick(1, 2, 3, 6) for _ in range(spatial)])

    return make


for _n in (1, 2, 3):
    options(f"max_pool{_n}d max_pool{_n}d_with_indices")(_pool("max", _n))
    options(f"avg_pool{_n}d")(_pool("avg", _n))
    options(f"adaptive_avg_pool{_n}d adaptive_max_pool{_n}d")(_adaptive(_n))


@options("pad")
def _pad(draw: Draw, pick: Pick, batch: int) -> Sample:
    """Pads images. Constant padding may also pad some dims only, and have negative sizes."""
    spatial, mode = pick(1, 2, 3), pick("constant", "reflect", "replicate", "circular")
    x = _image(draw, pick, batch, 3, spatial, 4, 5)
    if mode != "constant":
        return call(x, [pick(0, 1, 2) for _ in range(2 * spatial)], mode)
    return call(
        x, [pick(0, 1, 2, -1) for _ in range(2 * pick(*range(1, spatial + 1)))], mode, pick(None, 0.0, -1.5)
    )


def arguments(sample: Sample) -> Sequence[Any]:
    """Returns the arguments whose kinds the tests vary: each tensor, and each list of tensors."""
    args, kwargs = sample
    return [
        a
        for a in (*args, *kwargs.values())
        if isinstance(a, torch.Tensor)
        or (isinstance(a, list) and any(isinstance(t, torch.Tensor) for t in a))
    ]
