"""Losses: first the loss of every element of all members, then the mean or sum of each member.

y[i] = reduce(loss(x[i], t[i]))    x, t: [N, B, *] or [B, *]    y: [N], or [N, B, *] without a reduction
"""

from __future__ import annotations

from typing import Any

from ..ir import ops
from ..ir.ops import full_name
from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.families import broadcast, put
from ..registry.registry import register
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank, wide_items

_POINTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss margin_ranking_loss hinge_embedding_loss"
)
_CLASSES = "cross_entropy_loss nll_loss_nd nll_loss nll_loss2d"


def _reduced(w: Writer, y: Value, how: int) -> WideValue:
    """Reduces the member's dims. how: 0 not at all, 1 mean, 2 sum."""
    if not how or y.ndim == 1:
        return Stacked(y)
    # torch sums one contiguous dim in cascades, but several strided dims number by number, which rounds
    # worse.
    flat = w.call("flatten.using_ints", y, 1, -1) if y.ndim > 2 else y
    return Stacked(w.call("mean.dim" if how == 1 else "sum.dim_IntList", flat, [1]))


def _reduction(op: str, bound: dict[str, Any]) -> int:
    return int(bound.get("reduction", next(d for a, _, d in ops.arguments(op) if a == "reduction")))


def _pointwise(op: str) -> None:
    def rule(w: Writer, *args: Any, **kwargs: Any) -> WideValue:
        """the loss of every element of all members, then the mean or sum of each member"""
        bound = ops.bind(op, args, kwargs)
        how = _reduction(op, bound)
        wides = wide_items(bound)
        top = max(map(rank, wides))  # some losses do not broadcast, so operands of full rank are expanded
        wides = [Stacked(w.stack(x)) if isinstance(x, Shared) and rank(x) == top else x for x in wides]
        ready = dict(zip(map(id, wide_items(bound)), broadcast(w, wides)))
        order = [a for a, _, _ in ops.arguments(op)]
        full = {a: put(bound[a], ready) if a in bound else d for a, _, d in ops.arguments(op)} | {
            "reduction": 0
        }
        positional = [a for a in order if a != "log_target"]
        return _reduced(
            w,
            w.call(op, *(full[a] for a in positional), **{a: full[a] for a in order if a not in positional}),
            how,
        )

    register(op, "elements", rule, family="loss")


for _op in _POINTWISE.split():
    _pointwise(full_name(_op))


def _triplet(w: Writer, *args: Any, **kwargs: Any) -> WideValue:
    """the loss of every row of all members, then the mean or sum of each member"""
    bound = ops.bind(w.op, args, kwargs)
    rows = [w.stack(bound.pop(a)) for a in ("anchor", "positive", "negative")]
    how = _reduction(w.op, bound)
    rest = [bound.get(a, d) for a, _, d in ops.arguments(w.op)[3:-1]]
    return _reduced(w, w.call(w.op, *rows, *rest, 0), how)


register(
    "triplet_margin_loss",
    "rows",
    _triplet,
    family="loss",
    when=lambda w, a, p, n, *_, **__: rank(a) == rank(p) == rank(n),
)


def _cosine(w: Writer, *args: Any, **kwargs: Any) -> WideValue:
    """members folded into the batch: the loss of every row, then the mean or sum of each member"""
    bound = ops.bind(w.op, args, kwargs)
    how = _reduction(w.op, bound)
    first = Stacked(w.stack(bound["input1"]))
    rows = [w.fold(Stacked(w.stack(bound[a]))) for a in ("input1", "input2", "target")]
    return _reduced(w, w.unfold(w.call(w.op, *rows, bound.get("margin", 0.0), 0), first).value, how)


register(
    "cosine_embedding_loss",
    "fold",
    _cosine,
    family="loss",
    when=lambda w, a, b, t, *_, **__: rank(a) == rank(b) == 2 and rank(t) == 1,
)


def _classes_apply(
    w: Writer,
    x: WideValue,
    target: WideValue,
    weight: WideValue | None = None,
    reduction: int = 1,
    ignore: Any = -100,
    smoothing: float = 0.0,
) -> bool:
    fine = rank(x) >= 2 and not isinstance(weight, Stacked) and isinstance(ignore, int)
    return fine and (weight is None or smoothing == 0 or reduction != 1)


def _classes(
    w: Writer,
    x: WideValue,
    target: WideValue,
    weight: Shared | None = None,
    reduction: int = 1,
    ignore: int = -100,
    *smoothing: float,
) -> WideValue:
    """members folded into the batch: the loss of every sample, then the mean or sum of each member

    A mean leaves out the ignored labels.
    """
    logits, labels = Stacked(w.stack(x)), Stacked(w.stack(target))
    y = w.unfold(
        w.call(w.op, w.fold(logits), w.fold(labels), put_shared(weight), 0, ignore, *smoothing), logits
    ).value
    if (
        reduction != 1 or logits.value.dtype == labels.value.dtype
    ):  # the targets are probabilities: a plain mean
        return _reduced(w, y, reduction)
    kept = w.call("ne.Scalar", labels.value, ignore)
    if weight is None:
        counted = w.call("_to_copy", kept, dtype=y.dtype)
    else:
        flat = w.call(
            "flatten.using_ints", w.call("where.ScalarOther", kept, labels.value, 0), 0, -1
        )  # an ignored label may be out of range
        weights = w.call(
            "reshape", w.call("index_select", weight.value, 0, flat), [w.members, *w.sizes(labels)]
        )
        counted = w.call("where.ScalarOther", kept, weights, 0.0)
    dims = list(range(1, y.ndim))
    return Stacked(
        w.call("div.Tensor", w.call("sum.dim_IntList", y, dims), w.call("sum.dim_IntList", counted, dims))
    )


for _op in _CLASSES.split():
    register(_op, "fold", _classes, family="loss", when=_classes_apply)


def _two(draw: Draw) -> list[Sample]:
    return [call(draw.normal(B, 4), draw.normal(B, 4), r) for r in (0, 1, 2)] + [
        call(draw.normal(B, 4), draw.normal(B, 4)),
        call(draw.normal(), draw.normal()),
    ]


samples("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss hinge_embedding_loss")(
    lambda draw: _two(draw)[:3] + _two(draw)[3:4]
)
samples("kl_div")(lambda draw: [*_two(draw), call(draw.normal(B, 4), draw.normal(B, 4), 2, log_target=True)])
samples("poisson_nll_loss")(
    lambda draw: [
        call(draw.normal(B, 4), draw.uniform(0, 3, B, 4), True, f, 1e-8, r)
        for f in (True, False)
        for r in (0, 1, 2)
    ]
)
samples("margin_ranking_loss")(
    lambda draw: [call(draw.normal(B), draw.normal(B), draw.normal(B).sign(), 0.1, r) for r in (0, 1, 2)]
)


@samples("binary_cross_entropy binary_cross_entropy_with_logits")
def _binary(draw: Draw) -> list[Sample]:
    x, t = draw.uniform(0.1, 0.9, B, 4), draw.uniform(0, 1, B, 4)
    return [
        call(x, t),
        call(x, t, draw.uniform(0.5, 1, 4)),
        *(call(x, t, draw.uniform(0.5, 1, B, 4), reduction=r) for r in (0, 1, 2)),
    ]


samples("triplet_margin_loss")(
    lambda draw: (
        [
            call(*(draw.normal(B, 4) for _ in range(3)), 1.0, 2.0, 1e-6, s, r)
            for s in (False, True)
            for r in (0, 1, 2)
        ]
        + [call(*(draw.normal(B, 4) for _ in range(3)))]
    )
)
samples("cosine_embedding_loss")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(B, 4), draw.normal(B).sign(), 0.1, r) for r in (0, 1, 2)
    ]
)


def _labels(draw: Draw, shapes: list[tuple[int, ...]]) -> list[Sample]:
    samples_ = []
    for shape in shapes:
        ids = draw.ints(0, 4, shape[0], *shape[2:])
        samples_ += [
            call(draw.normal(*shape), ids),
            call(draw.normal(*shape), ids, draw.uniform(0.5, 1, 4), 1, 2),
        ]
        samples_ += [call(draw.normal(*shape), ids, None, r, 1) for r in (0, 1, 2)]
        for away in (255, -100):  # not a class; the numbers have one sign, so that their mean is not near 0
            samples_.append(
                call(
                    draw.uniform(-3, -1, *shape), ids.where(ids != 1, away), draw.uniform(0.5, 1, 4), 1, away
                )
            )
    return samples_


samples("nll_loss_nd")(lambda draw: _labels(draw, [(B, 4), (B, 4, 6)]))
samples("nll_loss")(lambda draw: _labels(draw, [(B, 4)]))
samples("nll_loss2d")(lambda draw: _labels(draw, [(B, 4, 2, 6)]))
samples("cross_entropy_loss")(
    lambda draw: [
        *_labels(draw, [(B, 4), (B, 4, 6)]),
        call(draw.normal(B, 4), draw.ints(0, 4, B), None, 1, -100, 0.1),
        call(draw.normal(B, 4), draw.uniform(0, 1, B, 4)),
        call(draw.normal(B, 4), draw.uniform(0, 1, B, 4), draw.uniform(0.5, 1, 4), 2, -100, 0.1),
    ]
)
