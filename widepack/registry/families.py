"""Registers whole families of ops in one line, because most ops treat the member axis in one of these ways.

| family | what it does with the member axis |
|---|---|
| `pointwise` | broadcasts: Stacked operands of lower rank get dims of size 1 after the member axis |
| `along` | moves the dims of the schema by one; `None` (all dims) becomes all dims but the member axis |
| `fold` | folds members into the batch, or into the channels where memory is channel-packed |
| `leading` | leaves it: the op works on trailing dims, and the member axis is one more leading dim |
| `identity` | leaves it: the op returns its input |

The oracle test runs every op that is registered here against `sequential`.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from ..ir import ops
from ..ir.encoding import map_arguments
from ..ir.ops import full_name
from ..ir.values import Shared, Stacked, Value, WideValue
from .registry import register
from .writer import Writer, category, is_tensor, put_shared, rank, wide_items


def broadcast(w: Writer, values: list[WideValue]) -> list[Any]:
    """Prepares values to broadcast after the member axis, with the type promotion of the member.

    A 0-dim operand of the member has a dim when it is Stacked, and would then promote like a tensor with
    dims. So it is cast to the dtype of the operands with dims. If it has a higher category than they have, it
    does promote them. Then a Shared 0-dim operand of that category gets a dim too, so that both promote each
    other as in the member.
    """
    tensors = [v for v in values if is_tensor(v)]
    out = max([0, *map(rank, tensors)])
    dims = [v.value.dtype for v in tensors if rank(v) > 0]  # type: ignore[union-attr]
    top = max(map(category, dims), default=-1)
    prepared: list[Any] = []
    for v in values:
        if isinstance(v, Stacked):
            value = w.align(v, out)
            dtype = promoted(value.dtype, dims) if v.rank == 0 and dims else value.dtype
            prepared.append(value if dtype == value.dtype else w.call("_to_copy", value, dtype=dtype))
        elif is_tensor(v) and rank(v) == 0 and category(v.value.dtype) > top:  # type: ignore[union-attr]
            prepared.append(w.call("unsqueeze", v.value, 0))  # type: ignore[union-attr]
        else:
            prepared.append(v.value)  # type: ignore[union-attr]
    return prepared


def promoted(zero: torch.dtype, dims: list[torch.dtype]) -> torch.dtype:
    """Returns the dtype that a 0-dim operand is cast to before it gets a dim.

    With that dtype it promotes the operands with dims exactly as it does without a dim.
    """
    top = max(map(category, dims))
    among = reduce(torch.promote_types, [d for d in dims if category(d) == top])
    if category(zero) == top:
        return among
    if zero.is_complex and among.is_floating_point:  # it has the precision of the operands with dims
        return among.to_complex()
    return among.to_real() if among.is_complex and zero.is_floating_point else zero


def put(arg: Any, ready: dict[int, Any]) -> Any:
    """Replaces the wide values of an argument by the prepared values."""
    return map_arguments(
        arg, lambda a: ready[id(a)] if isinstance(a, (Shared, Stacked)) else a, as_lists=True
    )


def pointwise(names: str, family: str = "pointwise") -> None:
    """Registers ops that broadcast their tensor arguments and return one or several tensors of that shape."""
    for op in names.split():
        _pointwise(full_name(op), family)


def _pointwise(name: str, family: str) -> None:
    def rule(w: Writer, *args: Any, **kwargs: Any) -> Any:
        """broadcasts after the member axis"""
        wides = wide_items([args, kwargs])
        ready = dict(zip(map(id, wides), broadcast(w, wides)))
        result = w.call(
            name,
            *(put(a, ready) for a in args),
            **{k: put(v, ready) for k, v in kwargs.items() if k != "memory_format"},
        )
        return w.stacked(result)

    register(name, "pointwise", rule, family=family)


def shift(dim: Any) -> Any:
    """Returns dims of the member as dims of the stacked value; negative dims stay."""
    if isinstance(dim, (list, tuple)):
        return [shift(d) for d in dim]
    return dim + 1 if isinstance(dim, int) and dim >= 0 else dim


def along(
    names: str,
    *,
    all_dims: str | None = None,
    empty: bool = True,
    needs: str | None = None,
    mixed: bool = False,
    family: str = "dim",
) -> None:
    """Registers ops that work along the dims of their schemas.

    all_dims: the argument that means all dims when it is None or empty.
    empty: whether an empty list means all dims too.
    needs: an argument without which the op flattens its input; the family does not apply then.
    mixed: whether tensor arguments may differ in rank.
    """
    for op in names.split():
        _along(full_name(op), all_dims, (None, [], ()) if empty else (None,), needs, mixed, family)


def _along(
    name: str, all_dims: str | None, every: tuple[Any, ...], needs: str | None, mixed: bool, family: str
) -> None:
    def applies(w: Writer, *args: Any, **kwargs: Any) -> bool:
        ranks = {rank(t) for t in wide_items([args, kwargs]) if is_tensor(t)}
        present = needs is None or ops.bind(name, args, kwargs).get(needs) not in (None, [], ())
        return present and 0 not in ranks and (mixed or len(ranks) == 1)

    def rule(w: Writer, *args: Any, **kwargs: Any) -> Any:
        """moves the dims of the schema by one, for the member axis"""
        bound = ops.bind(name, args, kwargs)
        wides = wide_items(bound)
        ready = {id(t): w.stack(t) if is_tensor(t) else t.value for t in wides}  # type: ignore[union-attr]
        if "scatter" in name:  # it writes to a copy of its first argument
            ready[id(args[0])] = w.own_memory(args[0])
        defaults = {a: d for a, _, d in ops.arguments(name)}
        for d in ops.dim_arguments(name):
            if d == all_dims and bound.get(d) in every:
                bound[d] = list(range(1, 1 + max(map(rank, wides))))
            elif bound.get(d, defaults[d]) is not None:
                bound[d] = shift(bound.get(d, defaults[d]))
        # Positional arguments stay positional, because torch takes `self` only so; keyword-only ones stay
        # keywords.
        positional = [put(bound.pop(a), ready) for a, _, _ in ops.arguments(name)[: len(args)]]
        return w.stacked(w.call(name, *positional, **{k: put(v, ready) for k, v in bound.items()}))

    register(name, "dim", rule, family=family, when=applies)


def fold(names: str, spatial: int, *, channels: bool = False, family: str = "fold") -> None:
    """Registers ops over `[B, C, *spatial]` or `[C, *spatial]` that treat every sample alike.

    spatial: the number of spatial dims.
    channels: whether the op treats every channel alike too; it then uses channel-packed memory as it is.
    """
    for op in names.split():
        _fold(full_name(op), spatial, channels, family)


def _fold(name: str, spatial: int, channels: bool, family: str) -> None:
    def applies(w: Writer, x: WideValue, *args: Any, **kwargs: Any) -> bool:
        return isinstance(x, Stacked) and not any(isinstance(a, Stacked) for a in wide_items([args, kwargs]))

    def rule(w: Writer, x: Stacked, *args: Any, **kwargs: Any) -> Any:
        """folds members into the batch, or into the channels where memory is channel-packed"""
        rest, named = put_shared(args), put_shared(kwargs)
        if x.rank == spatial + 1:  # without a batch the members are the batch
            return w.stacked(w.call(name, x.value, *rest, **named))
        if channels and x.packed:
            return w.unpack(w.call(name, w.pack(x), *rest, **named))
        return w.unfold(w.call(name, w.fold(x), *rest, **named), x)

    register(name, "fold", rule, family=family, when=applies)


def leading(names: str, family: str = "leading") -> None:
    """Registers ops over trailing dims with any leading dims; only the first argument is a tensor."""
    for op in names.split():
        _leading(full_name(op), family)


def _leading(name: str, family: str) -> None:
    def rule(w: Writer, x: Stacked, *args: Any, **kwargs: Any) -> Any:
        """works on trailing dims: the member axis is one more leading dim"""
        return w.stacked(w.call(name, x.value, *put_shared(args), **put_shared(kwargs)))

    def applies(w: Writer, x: WideValue, *args: Any, **kwargs: Any) -> bool:
        return isinstance(x, Stacked) and not any(isinstance(a, Stacked) for a in wide_items([args, kwargs]))

    register(name, "leading", rule, family=family, when=applies)


def identity(names: str) -> None:
    """Registers ops that return their input: in a functional program a copy or an alias has no effect."""
    for op in names.split():
        register(op, "identity", _identity, family="identity")


def _identity(w: Writer, x: WideValue, *_: Any, **__: Any) -> WideValue:
    """returns its input"""
    return x


def flat_member(w: Writer, x: Stacked) -> Value:
    """Flattens the member's dims into one: `[N, *s] -> [N, numbers]`."""
    if x.rank == 0:
        return w.call("unsqueeze", x.value, 1)
    return x.value if x.rank == 1 else w.call("flatten.using_ints", x.value, 1, -1)


def whole_by_dim(op: str, op_of_dim: str) -> None:
    """Registers an op that reduces all dims, as `op_of_dim` along the member's dims flattened into one."""

    def rule(w: Writer, x: Stacked, **kwargs: Any) -> Any:
        """flattens the member's dims into one, then works along it"""
        y = w.call(op_of_dim, flat_member(w, x), -1, **kwargs)
        return w.stacked(y)[0] if isinstance(y.fake, (tuple, list)) else Stacked(y)

    register(full_name(op), "flatten", rule, family="dim")


def value_of(x: WideValue) -> Value:
    """Returns the Value of a Shared or Stacked value."""
    return x.value  # type: ignore[union-attr]
