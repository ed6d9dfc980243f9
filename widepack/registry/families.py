"""Families: most ops are one line, because most ops batch in one of five ways.

| family | what it does with the member axis |
|---|---|
| `pointwise` | broadcasts: shorter Stacked operands get size-1 dims behind the member axis |
| `dim` | shifts by one the dims that the schema names; `None` (all dims) becomes all but the member axis |
| `fold` | members go into the batch: `[N, B, ...] -> [N*B, ...]` and back; into the channels where memory is channel-packed |
| `shape` | sizes get N in front (primitives/shape.py) |
| `identity` | gives its input |

An op belongs to a family only when the oracle test proves it: every op registered here is run against `sequential`.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from ..ir import ops
from .registry import full_name, register
from ..ir.values import Shared, Stacked, Value, Wide
from .writer import Writer, category, is_tensor, put_shared, rank, wide_items


def broadcast(w: Writer, values: list[Wide]) -> list[Any]:
    """Values made ready to broadcast behind the member axis; type promotion stays the member's own.

    A Stacked 0-dim operand would promote like a tensor with dims, where the member's own did not: it is cast to the dtype of the operands with dims. Where
    it does promote (of a higher category than they), a Shared 0-dim operand gets a dim too, so that they promote each other as in the member.
    """
    tensors = [v for v in values if is_tensor(v)]
    out = max([0, *map(rank, tensors)])
    dims = [v.value.dtype for v in tensors if rank(v) > 0]  # type: ignore[union-attr]  # is_tensor leaves Shared and Stacked
    top = max(map(category, dims), default=-1)
    made: list[Any] = []
    for v in values:
        if isinstance(v, Stacked):
            value = w.align(v, out)
            dtype = promoted(value.dtype, dims) if v.rank == 0 and dims else value.dtype
            made.append(value if dtype == value.dtype else w.call("_to_copy", value, dtype=dtype))
        elif is_tensor(v) and rank(v) == 0 and category(v.value.dtype) > top:  # type: ignore[union-attr]  # a Ragged value never reaches a rule
            made.append(w.call("unsqueeze", v.value, 0))  # type: ignore[union-attr]
        else:
            made.append(v.value)  # type: ignore[union-attr]
    return made


def promoted(zero: torch.dtype, dims: list[torch.dtype]) -> torch.dtype:
    """What a 0-dim operand may be cast to, so that with dims it promotes the operands with dims no more than without."""
    top = max(map(category, dims))
    among = reduce(torch.promote_types, [d for d in dims if category(d) == top])
    if category(zero) == top:
        return among
    return among.to_real() if among.is_complex and zero.is_floating_point else zero


def put(arg: Any, ready: dict[int, Any]) -> Any:
    """An argument with its wide values replaced by the values made ready for them."""
    if isinstance(arg, (Shared, Stacked)):
        return ready[id(arg)]
    if isinstance(arg, (list, tuple)):
        return [put(a, ready) for a in arg]
    return arg


def pointwise(names: str, family: str = "pointwise") -> None:
    """Register ops that broadcast their tensor arguments and give one tensor, or several of that shape."""
    for op in names.split():
        _pointwise(full_name(op), family)


def _pointwise(name: str, family: str) -> None:
    def rule(w: Writer, *args: Any, **kwargs: Any) -> Any:
        """broadcasts behind the member axis"""
        wides = wide_items([args, kwargs])
        ready = dict(zip(map(id, wides), broadcast(w, wides)))
        given = w.call(name, *(put(a, ready) for a in args), **{k: put(v, ready) for k, v in kwargs.items() if k != "memory_format"})
        return w.stacked(given)

    register(name, "pointwise", rule, family=family)


def shift(dim: Any) -> Any:
    """A dim, or dims, of the member as dims of the stacked value; negative ones stay."""
    if isinstance(dim, (list, tuple)):
        return [shift(d) for d in dim]
    return dim + 1 if isinstance(dim, int) and dim >= 0 else dim


def along(names: str, *, all_dims: str | None = None, empty: bool = True, needs: str | None = None, mixed: bool = False, family: str = "dim") -> None:
    """Register ops that work along the dims that their schemas name.

    all_dims: the argument that means every dim when it is None, or empty unless `empty` is False. needs: an argument without which the op flattens, and the
    family does not apply. mixed: tensor arguments may differ in rank.
    """
    for op in names.split():
        _along(full_name(op), all_dims, (None, [], ()) if empty else (None,), needs, mixed, family)


def _along(name: str, all_dims: str | None, every: tuple[Any, ...], needs: str | None, mixed: bool, family: str) -> None:
    def applies(w: Writer, *args: Any, **kwargs: Any) -> bool:
        ranks = {rank(t) for t in wide_items([args, kwargs]) if is_tensor(t)}
        given = needs is None or ops.bind(name, args, kwargs).get(needs) not in (None, [], ())
        return given and 0 not in ranks and (mixed or len(ranks) == 1)

    def rule(w: Writer, *args: Any, **kwargs: Any) -> Any:
        """the schema's dims shifted by the member axis"""
        given = ops.bind(name, args, kwargs)
        wides = wide_items(given)
        ready = {id(t): w.stack(t) if is_tensor(t) else t.value for t in wides}  # type: ignore[union-attr]
        defaults = {a: d for a, _, d in ops.arguments(name)}
        for d in ops.dim_arguments(name):
            if d == all_dims and given.get(d) in every:
                given[d] = list(range(1, 1 + max(map(rank, wides))))
            elif given.get(d, defaults[d]) is not None:
                given[d] = shift(given.get(d, defaults[d]))
        # positional stays positional: the first argument is often called `self`, which no keyword can be, and some may be given by keyword only
        positional = [put(given.pop(a), ready) for a, _, _ in ops.arguments(name)[: len(args)]]
        return w.stacked(w.call(name, *positional, **{k: put(v, ready) for k, v in given.items()}))

    register(name, "dim", rule, family=family, when=applies)


def fold(names: str, spatial: int, *, channels: bool = False, family: str = "fold") -> None:
    """Register ops over `[B, C, *spatial]` or `[C, *spatial]` that treat every sample alike.

    spatial: the number of spatial dims. channels: every channel is treated alike too, so that channel-packed memory is taken as it is.
    """
    for op in names.split():
        _fold(full_name(op), spatial, channels, family)


def _fold(name: str, spatial: int, channels: bool, family: str) -> None:
    def applies(w: Writer, x: Wide, *args: Any, **kwargs: Any) -> bool:
        return isinstance(x, Stacked) and not any(isinstance(a, Stacked) for a in wide_items([args, kwargs]))

    def rule(w: Writer, x: Stacked, *args: Any, **kwargs: Any) -> Any:
        """members folded into the batch, or into the channels where memory is channel-packed"""
        rest, named = put_shared(args), put_shared(kwargs)
        if x.rank == spatial + 1:  # no batch: the members are the batch
            return w.stacked(w.call(name, x.value, *rest, **named))
        if channels and x.packed:
            return w.unpack(w.call(name, w.pack(x), *rest, **named))
        return w.unfold(w.call(name, w.fold(x), *rest, **named), x)

    register(name, "fold", rule, family=family, when=applies)


def leading(names: str, family: str = "leading") -> None:
    """Register ops that work on trailing dims and take any dims before them; only the first argument is a tensor."""
    for op in names.split():
        _leading(full_name(op), family)


def _leading(name: str, family: str) -> None:
    def rule(w: Writer, x: Stacked, *args: Any, **kwargs: Any) -> Any:
        """works on trailing dims: the member axis is one more leading dim"""
        return w.stacked(w.call(name, x.value, *put_shared(args), **put_shared(kwargs)))

    def applies(w: Writer, x: Wide, *args: Any, **kwargs: Any) -> bool:
        return isinstance(x, Stacked) and not any(isinstance(a, Stacked) for a in wide_items([args, kwargs]))

    register(name, "leading", rule, family=family, when=applies)


def identity(names: str) -> None:
    """Register ops that give their input: in a functional program a copy or an alias means nothing."""
    for op in names.split():
        register(op, "identity", _identity, family="identity")


def _identity(w: Writer, x: Wide, *_: Any, **__: Any) -> Wide:
    """gives its input"""
    return x


def value_of(x: Wide) -> Value:
    """What a Shared or Stacked value holds."""
    return x.value  # type: ignore[union-attr]
