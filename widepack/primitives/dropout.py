"""Dropout and random draws: the ops that read torch's random generator.

    y[i] = x[i] * mask[i] / (1 - p)    x: [N, B, *] or [B, *]    mask: [N, B, *] or [N, B, C, 1, ...]

| strategy | when | how |
|---|---|---|
| `rest` | not training, or p = 0 | returns its input |
| `independent` | otherwise | one draw of N times as many numbers: each member gets other numbers |
| `shared` | only if the user requests it | one draw for all members: they get the same mask |

Members that run one after the other draw in another order. So equal seeds give other numbers, of the same
distribution.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir import ops
from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.families import broadcast
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Make, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank

_PLAIN = "dropout alpha_dropout"
_FEATURES = "feature_dropout feature_alpha_dropout"
# ops that read only the sizes of their argument
_LIKE = (
    "bernoulli.p rand_like randn_like randint_like randint_like.low_dtype "
    "uniform exponential cauchy geometric log_normal"
)
_NORMAL = "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor"
_SIZED = {
    "rand": 0,
    "randn": 0,
    "randint": 1,
    "randint.low": 2,
}  # op: the index of the sizes among its arguments
_ALPHA = 1.7580993408473766  # scale times alpha of SELU: alpha dropout replaces a dropped number by -_ALPHA


def _rests(w: Writer, *args: Any, **kwargs: Any) -> bool:
    return ops.pure(w.op, args, kwargs)


def _drops(w: Writer, *args: Any, **kwargs: Any) -> bool:
    return not ops.pure(w.op, args, kwargs)


@strategy(f"{_PLAIN} {_FEATURES}", "rest", family="dropout", when=_rests)
def rest(w: Writer, x: WideValue, p: float, train: bool) -> WideValue:
    """not training: returns its input"""
    return x


@strategy("native_dropout", "rest", family="dropout", when=_rests)
def native_rest(w: Writer, x: WideValue, p: float, train: bool | None) -> Any:
    """not training: returns its input, and a mask of ones"""
    return x, w.stacked(w.call("ones_like", w.stack(x), dtype=torch.bool))


@strategy(f"{_PLAIN} native_dropout", "independent", family="dropout", when=_drops)
def independent(w: Writer, x: WideValue, p: float, train: bool | None) -> Any:
    """one draw for all members; each member gets another mask"""
    return w.stacked(w.call(w.op, w.stack(x), p, train))


@strategy(_FEATURES, "independent", family="dropout", when=_drops)
def independent_features(w: Writer, x: WideValue, p: float, train: bool) -> Any:
    """one draw for all members, folded into batch or channels; each member gets another mask"""
    stacked = Stacked(w.stack(x))
    if stacked.packed:
        return w.unpack(w.call(w.op, w.pack(stacked), p, train))
    return w.unfold(w.call(w.op, w.fold(stacked), p, train), stacked)


@strategy(f"{_PLAIN} {_FEATURES} native_dropout", "shared", family="dropout", when=_drops, on_request=True)
def shared(w: Writer, x: WideValue, p: float, train: bool | None) -> Any:
    """one mask for all members"""
    value, sizes = w.stack(x), w.sizes(x)
    if "feature" in w.op:
        sizes = [*sizes[:2], *(1 for _ in sizes[2:])]
    if "alpha" not in w.op or p == 1:
        factor = w.call(
            "dropout", w.call("new_ones", value, sizes), p, True
        )  # ones where dropout is off, and then the result is x
        y = Stacked(w.call("mul.Tensor", value, factor))
        return (
            (y, Stacked(w.stack(Shared(w.call("_to_copy", factor, dtype=torch.bool)))))
            if "native" in w.op
            else y
        )
    # A kept number becomes x * scale + shift, with shift > 0. A dropped number becomes shift, with shift < 0.
    # Where dropout is off, shift is 0 and the factor has to be 1.
    shift = w.call("alpha_dropout", w.call("new_zeros", value, sizes), p, True)
    scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    factor = w.call("masked_fill.Scalar", w.call("ones_like", shift), w.call("gt.Scalar", shift, 0), scale)
    factor = w.call("masked_fill.Scalar", factor, w.call("lt.Scalar", shift, 0), 0)
    return Stacked(w.call("add.Tensor", w.call("mul.Tensor", value, factor), shift))


def _new(w: Writer, x: WideValue, sizes: list[Any]) -> Value:
    """Returns uninitialized memory of these sizes, for a draw that reads only the sizes."""
    return w.call("new_empty", x.value, sizes)  # type: ignore[union-attr]


def _like(w: Writer, args: tuple[Any, ...], kwargs: dict[str, Any], x: Value) -> Value:
    return w.call(
        w.op, x, *put_shared(args), **{k: put_shared(v) for k, v in kwargs.items() if k != "memory_format"}
    )


@strategy(f"{_LIKE} bernoulli poisson", "independent", family="random")
def drawn(w: Writer, x: WideValue, *args: Any, **kwargs: Any) -> Any:
    """one draw for all members; each member gets other numbers"""
    return w.stacked(_like(w, args, kwargs, w.stack(x)))


@strategy("rrelu", "independent", family="pointwise")
def rrelu(
    w: Writer,
    x: WideValue,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,
) -> WideValue:
    """draws a slope for every number, also for the positive ones

    The op itself draws one only for numbers that are not positive. Then the numbers of one member would
    change the draws of another.
    """
    value = w.stack(x)
    if not training:
        return Stacked(w.call("rrelu", value, lower, upper, False))
    slopes = w.call("uniform", value, lower, upper)
    return Stacked(
        w.call("where.self", w.call("le.Scalar", value, 0), w.call("mul.Tensor", value, slopes), value)
    )


@strategy(_LIKE, "shared", family="random", on_request=True)
def drawn_once(w: Writer, x: WideValue, *args: Any, **kwargs: Any) -> Any:
    """one draw for all members; they get the same numbers"""
    return Stacked(w.stack(Shared(_like(w, args, kwargs, _new(w, x, w.sizes(x))))))


@strategy(
    "bernoulli poisson",
    "shared",
    family="random",
    when=lambda w, x, *_, **__: isinstance(x, Shared),
    on_request=True,
)
def thrown_once(w: Writer, x: Shared, generator: None = None) -> WideValue:
    """one draw for all members; they get the same numbers"""
    return Stacked(w.stack(Shared(w.call(w.op, x.value))))


@strategy(_NORMAL, "independent", family="random")
def normal(w: Writer, mean: Any, std: Any = 1.0, generator: None = None) -> Any:
    """one draw for all members; each member gets other numbers"""
    ready = iter(broadcast(w, [Stacked(w.stack(v)) for v in (mean, std) if isinstance(v, (Shared, Stacked))]))
    return w.stacked(
        w.call(w.op, *(next(ready) if isinstance(v, (Shared, Stacked)) else v for v in (mean, std)))
    )


@strategy("multinomial", "independent", family="random")
def multinomial(
    w: Writer, x: WideValue, count: int, replacement: bool = False, *, generator: None = None
) -> Any:
    """one draw for all members; each row gets other numbers"""
    stacked = Stacked(w.stack(x))
    if rank(x) == 1:
        return Stacked(w.call("multinomial", stacked.value, count, replacement))
    return w.unfold(w.call("multinomial", w.fold(stacked), count, replacement), stacked)


@strategy(_SIZED, "independent", family="random")
def sized(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """one draw for all members; each member gets other numbers"""
    at = _SIZED[w.op.removeprefix("aten.").removesuffix(".default")]
    arguments = put_shared(list(args))
    return Stacked(
        w.call(w.op, *arguments[:at], [w.members, *arguments[at]], *arguments[at + 1 :], **put_shared(kwargs))
    )


@strategy(_SIZED, "shared", family="random", on_request=True)
def sized_once(w: Writer, *args: Any, **kwargs: Any) -> Any:
    """one draw for all members; they get the same numbers"""
    return Stacked(w.stack(Shared(w.call(w.op, *put_shared(args), **put_shared(kwargs)))))


def _dropouts(ranks: tuple[int, ...]) -> Make:
    def make(draw: Draw) -> list[Sample]:
        shapes = [(B, 4, 3, 2)[:r] for r in ranks]
        return [
            call(draw.normal(*s), p, train)
            for s in shapes
            for p, train in ((0.5, False), (0.0, True), (0.4, True), (1.0, True))
        ]

    return make


samples(f"{_PLAIN} native_dropout")(_dropouts((1, 2, 4)))
samples(_FEATURES)(_dropouts((2, 3, 4)))
samples("bernoulli")(
    lambda draw: [
        call(draw.uniform(0, 1, B, 3)),
        call(draw.uniform(0, 1)),
        call(draw.ints(0, 2, B, 2).float()),
    ]
)
samples("bernoulli.p uniform cauchy log_normal geometric exponential")(
    lambda draw: [call(draw.normal(B, 3), 0.4), call(draw.normal(), 0.4), call(draw.normal(2, B, 3), 0.4)]
)
samples("rand_like randn_like")(
    lambda draw: [
        call(draw.normal(B, 3)),
        call(draw.normal(), pin_memory=False),
        call(draw.normal(B, 3), dtype=torch.float64),
    ]
)
samples("randint_like")(lambda draw: [call(draw.normal(B, 3), 7), call(draw.ints(0, 4), 7)])
samples("randint_like.low_dtype")(lambda draw: [call(draw.normal(B, 3), 2, 7, dtype=torch.int64)])
samples("poisson")(lambda draw: [call(draw.uniform(0, 5, B, 3)), call(draw.uniform(0, 5))])
samples("normal.Tensor_Tensor")(
    lambda draw: [
        call(draw.normal(B, 3), draw.uniform(0, 2, B, 3)),
        call(draw.normal(B, 3), draw.uniform(0, 2, 3)),
    ]
)
samples("normal.Tensor_float")(lambda draw: [call(draw.normal(B, 3), 0.4), call(draw.normal())])
samples("normal.float_Tensor")(lambda draw: [call(0.4, draw.uniform(0, 2, B, 3))])
samples("multinomial")(
    lambda draw: [call(draw.uniform(0.1, 1, *s), 3, r) for s in ((4,), (B, 4)) for r in (False, True)]
)
samples("rrelu")(
    lambda draw: [call(draw.normal(*s), 0.1, 0.3, train) for s in ((B, 3, 4), ()) for train in (False, True)]
)
samples("rand randn")(
    lambda draw: [
        call([B, 3]),
        call([]),
        call([2], dtype=torch.float64, device=torch.device("cpu"), pin_memory=False),
    ]
)
samples("randint")(lambda draw: [call(7, [B, 3])])
samples("randint.low")(lambda draw: [call(2, 7, [B, 3], dtype=torch.int32)])
