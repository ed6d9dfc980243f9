"""Attention: scaled_dot_product_attention.

    y[i] = softmax(q[i] k[i]^T * scale + mask[i]) v[i]
    q, y: [N, B, H, T, D]    k, v: [N, B, H, S, D]    mask: [N, B, H, T, S], or a shape that broadcasts

| strategy | when | how |
|---|---|---|
| `blocks` | on a CPU, with a Shared mask or `is_causal` | as `folded`; skips keys that the mask forbids |
| `folded` | always | puts the members into the batch |

`blocks` calls widepack's op `masked_attention` (kernels/masked.py). A mask of each member does not run in it,
since the keys that one member reads would depend on the masks of others. `folded` gives operands of other
ranks the member axis as one more leading dim.
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Shared, Stacked, Value, WideValue
from ..kernels.masked import LEAST
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, rank


def _may_skip(
    w: Writer,
    q: WideValue,
    k: WideValue,
    v: WideValue,
    mask: WideValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> bool:
    """Whether the op that skips keys may save work."""
    if w.device != "cpu" or dropout_p or not (is_causal if mask is None else isinstance(mask, Shared)):
        return False
    if not _folds(q, k, v, mask) or (mask is not None and rank(mask) < 2):
        return False
    fewest = [n for t in (q, k) if (n := t.value.sizes[-2]) is not None]  # type: ignore[union-attr]
    return all(n >= LEAST for n in fewest) and q.value.dtype.is_floating_point  # type: ignore[union-attr]


@strategy("scaled_dot_product_attention", "blocks", family="attention", when=_may_skip, derivative=False)
def blocks(
    w: Writer,
    q: WideValue,
    k: WideValue,
    v: WideValue,
    mask: WideValue | None = None,
    *rest: Any,
    **kwargs: Any,
) -> WideValue:
    """folds members into the batch; of long sequences, skips keys that the mask forbids"""
    q, k, v = (Stacked(w.stack(t)) for t in (q, k, v))
    operands = w.fold(q), w.fold(k), w.fold(v), _mask(w, mask, q)
    return w.unfold(w.call("widepack.masked_attention.default", *operands, *rest, **kwargs), q)  # type: ignore[no-any-return]


@strategy("scaled_dot_product_attention", "folded", family="attention")
def folded(
    w: Writer,
    q: WideValue,
    k: WideValue,
    v: WideValue,
    mask: WideValue | None = None,
    *rest: Any,
    **kwargs: Any,
) -> WideValue:
    """folds members into the batch; a mask that all samples share is not repeated"""
    if not _folds(q, k, v, mask):
        return _leading(w, q, k, v, mask, *rest, **kwargs)
    q, k, v = (Stacked(w.stack(t)) for t in (q, k, v))
    y = w.call(
        "scaled_dot_product_attention", w.fold(q), w.fold(k), w.fold(v), _mask(w, mask, q), *rest, **kwargs
    )
    return w.unfold(y, q)  # type: ignore[no-any-return]


def _leading(
    w: Writer, q: WideValue, k: WideValue, v: WideValue, mask: WideValue | None, *rest: Any, **kwargs: Any
) -> WideValue:
    """Runs operands of any rank, with the member axis as one more leading dim.

    It serves operands without heads or batch, operands with windows beside them, and operands that broadcast:
    all are raised to the largest rank first. The result has no four dims: for a query with NaN, torch's
    kernel for four dims answers 0, and the one that such members run answers NaN.
    """
    top = max(rank(t) for t in (q, k, v, mask) if t is not None)
    raised = top + (top == 3)
    values = [w.align(Stacked(w.stack(t)), raised) for t in (q, k, v)]
    m = None if mask is None else w.align(mask, raised) if isinstance(mask, Stacked) else mask.value  # type: ignore[union-attr]
    y = w.call("scaled_dot_product_attention", *values, m, *rest, **kwargs)
    return Stacked(y if raised == top else w.call("squeeze.dim", y, 1))


def _folds(q: WideValue, k: WideValue, v: WideValue, mask: WideValue | None) -> bool:
    """Whether members can be folded into the batch: all have one batch and heads, and no batch broadcasts."""
    if any(rank(t) != 4 for t in (q, k, v)) or (mask is not None and rank(mask) > 4):
        return False
    alone = {t.value.sizes[-4] == 1 for t in (q, k, v)}  # type: ignore[union-attr]
    return len(alone) == 1


def _mask(w: Writer, mask: WideValue | None, q: Stacked) -> Value | None:
    """Returns the mask for scores of shape `[N*B, H, T, S]`."""
    if mask is None:
        return None
    value: Value = mask.value  # type: ignore[union-attr]
    if isinstance(mask, Shared) and (value.ndim < 4 or value.sizes[0] == 1):
        return value
    value = w.align(mask, 4) if isinstance(mask, Stacked) else w.stack(mask)  # [N, B or 1, H or 1, T, S]
    if value.sizes[1] == 1:
        batch = w.sizes(q)[0]
        value = w.call("expand", value, [w.members, batch, *(-1 for _ in range(value.ndim - 2))])
    return w.call("flatten.using_ints", value, 0, 1)


def _allowed(draw: Draw, *shape: int) -> Any:
    """Returns a mask with a true position in each row: a row with all positions masked gives NaN."""
    allowed = draw.bools(*shape)
    allowed[..., 0] = True
    return allowed


@samples("scaled_dot_product_attention")
def _attention(draw: Draw) -> list[Sample]:
    def qkv(*lead: int, t: int = 3, s: int = 6) -> tuple[Any, ...]:
        return draw.normal(*lead, t, 4), draw.normal(*lead, s, 4), draw.normal(*lead, s, 4)

    def mask(*shape: int) -> Any:
        return _allowed(draw, *shape)

    four = qkv(B, 2)
    shapes = [(3, 6), (6,), (2, 3, 6), (1, 3, 6), (B, 1, 1, 6), (B, 2, 3, 6), (1, 1, 3, 6), (1, 2, 1, 6)]
    return [
        call(*four),
        call(*four, None, 0.0, False, scale=0.3),
        call(*qkv(B, 2, t=6), None, 0.0, True),
        *(call(*four, mask(*s)) for s in shapes if len(s) > 1),
        *(call(*four, draw.normal(*s)) for s in shapes if len(s) > 1),
        call(draw.normal(B, 6, 3, 4), draw.normal(B, 2, 6, 4), draw.normal(B, 2, 6, 4), enable_gqa=True),
        call(
            draw.normal(B, 6, 6, 4),
            draw.normal(B, 2, 6, 4),
            draw.normal(B, 2, 6, 4),
            None,
            0.0,
            True,
            enable_gqa=True,
        ),
        *(call(*qkv(B, 2, t=LEAST, s=LEAST), m) for m in (mask(LEAST, LEAST), draw.normal(LEAST, LEAST))),
        call(*qkv(B, 2, t=LEAST, s=LEAST), None, 0.0, True, scale=0.3),
        call(*qkv(B)),
        call(*qkv(B), mask(3, 6)),
        call(*qkv(B), draw.normal(B, 3, 6)),
        call(*qkv(B, t=6), None, 0.0, True),
        call(*qkv()),
        call(*qkv(), mask(3, 6)),
        call(draw.normal(B, 2, 3, 4), draw.normal(1, 2, 6, 4), draw.normal(1, 2, 6, 4)),
        call(draw.normal(B, 2, 3, 4), draw.normal(6, 4), draw.normal(6, 4)),
        call(draw.normal(B, 2, 3, 4), draw.normal(2, 6, 4), draw.normal(2, 6, 4), draw.normal(3, 6)),
        call(
            draw.normal(B, 2, 3, 4),
            draw.normal(2, 6, 4),
            draw.normal(6, 4),
            draw.normal(B, 1, 3, 6),
            scale=0.3,
        ),
        call(draw.normal(3, 4), draw.normal(2, 6, 4), draw.normal(2, 6, 4)),
        call(draw.normal(3, 4), draw.normal(B, 2, 6, 4), draw.normal(2, 6, 4), draw.normal(2, 1, 6)),
        *(
            call(*qkv(B, 2, 7), *m)
            for m in ((), (mask(2, 1, 3, 6),), (draw.normal(1, 1, 3, 6),), (draw.normal(B, 1, 7, 3, 6),))
        ),
        call(*qkv(B, 2, 7, t=6), None, 0.0, True),
    ]
