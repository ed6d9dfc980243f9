"""Attention: `softmax(q k^T * scale + mask) v`, q: [N, B, H, T, D], k and v: [N, B, H, S, D]."""

from __future__ import annotations

from typing import Any

from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..ir.values import Shared, Stacked, Value, Wide
from ..registry.writer import Writer, rank


@strategy("scaled_dot_product_attention", "folded", family="attention")
def folded(w: Writer, q: Wide, k: Wide, v: Wide, mask: Wide | None = None, *rest: Any, **kwargs: Any) -> Wide:
    """members folded into the batch; a mask that is the same for the whole batch is not repeated"""
    if any(rank(t) != 4 for t in (q, k, v)) or (mask is not None and rank(mask) > 4):
        return _leading(w, q, k, v, mask, *rest, **kwargs)
    q, k, v = _batches(w, [Stacked(w.stack(t)) for t in (q, k, v)])
    y = w.call("scaled_dot_product_attention", w.fold(q), w.fold(k), w.fold(v), _mask(w, mask, q), *rest, **kwargs)
    return w.unfold(y, q)  # type: ignore[no-any-return]


def _leading(w: Writer, q: Wide, k: Wide, v: Wide, mask: Wide | None, *rest: Any, **kwargs: Any) -> Wide:
    """No heads, no batch, windows beside them, or operands that broadcast: the member axis is one more leading dim before those of the largest rank."""
    top = max(rank(t) for t in (q, k, v, mask) if t is not None)
    values = [w.align(Stacked(w.stack(t)), top) for t in (q, k, v)]
    m = None if mask is None else w.align(mask, top) if isinstance(mask, Stacked) else mask.value  # type: ignore[union-attr]
    return Stacked(w.call("scaled_dot_product_attention", *values, m, *rest, **kwargs))


def _batches(w: Writer, values: list[Stacked]) -> list[Stacked]:
    """Batches of 1 repeated where another operand has a batch: folded with the members they would broadcast no more."""
    batch = next((s for v in values if (s := w.sizes(v)[0]) != 1), 1)
    return [
        v if batch == 1 or v.value.sizes[1] != 1 else Stacked(w.call("expand", v.value, [-1, batch, *(-1 for _ in range(v.rank - 1))]))
        for v in values
    ]


def _mask(w: Writer, mask: Wide | None, q: Stacked) -> Value | None:
    """The mask for `[N*B, H, T, S]`."""
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


@samples("scaled_dot_product_attention")
def _attention(draw: Draw) -> list[Sample]:
    def qkv(*lead: int, t: int = 3, s: int = 6) -> tuple[Any, ...]:
        return draw.normal(*lead, t, 4), draw.normal(*lead, s, 4), draw.normal(*lead, s, 4)

    def mask(*shape: int) -> Any:
        allowed = draw.bools(*shape)
        allowed[..., 0] = True  # a row that sees nothing has no answer
        return allowed

    four = qkv(B, 2)
    shapes = [(3, 6), (6,), (2, 3, 6), (1, 3, 6), (B, 1, 1, 6), (B, 2, 3, 6), (1, 1, 3, 6), (1, 2, 1, 6)]
    return [
        call(*four),
        call(*four, None, 0.0, False, scale=0.3),
        call(*qkv(B, 2, t=6), None, 0.0, True),
        *(call(*four, mask(*s)) for s in shapes if len(s) > 1),
        *(call(*four, draw.normal(*s)) for s in shapes if len(s) > 1),
        call(draw.normal(B, 6, 3, 4), draw.normal(B, 2, 6, 4), draw.normal(B, 2, 6, 4), enable_gqa=True),
        call(draw.normal(B, 6, 6, 4), draw.normal(B, 2, 6, 4), draw.normal(B, 2, 6, 4), None, 0.0, True, enable_gqa=True),
        call(*qkv(B)),
        call(*qkv(B), mask(3, 6)),
        call(*qkv(B), draw.normal(B, 3, 6)),
        call(*qkv(B, t=6), None, 0.0, True),
        call(*qkv()),
        call(*qkv(), mask(3, 6)),
        call(draw.normal(B, 2, 3, 4), draw.normal(1, 2, 6, 4), draw.normal(1, 2, 6, 4)),
        call(draw.normal(B, 2, 3, 4), draw.normal(6, 4), draw.normal(6, 4)),
        call(draw.normal(B, 2, 3, 4), draw.normal(2, 6, 4), draw.normal(2, 6, 4), draw.normal(3, 6)),
        call(draw.normal(B, 2, 3, 4), draw.normal(2, 6, 4), draw.normal(6, 4), draw.normal(B, 1, 3, 6), scale=0.3),
        call(draw.normal(3, 4), draw.normal(2, 6, 4), draw.normal(2, 6, 4)),
        call(draw.normal(3, 4), draw.normal(B, 2, 6, 4), draw.normal(2, 6, 4), draw.normal(2, 1, 6)),
        *(call(*qkv(B, 2, 7), *m) for m in ((), (mask(2, 1, 3, 6),), (draw.normal(1, 1, 3, 6),), (draw.normal(B, 1, 7, 3, 6),))),
        call(*qkv(B, 2, 7, t=6), None, 0.0, True),
    ]
