"""What a rule writes with: `w.call(op, ...)` and the few moves that every rule needs.

A `Writer` turns calls into values. `ProgramWriter` (interpret.py) adds a node to the wide program and computes its fake value; `EagerWriter` runs the op on
real tensors, which is how tests and the primitive benchmark run a strategy.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..ir import ops
from .registry import full_name
from ..ir.values import Ragged, Shared, Stacked, Value, Wide


class Writer:
    """Base of the writers. members: N. device: the kind of device that the program is for. op: the op at work, for rules that serve several."""

    def __init__(self, members: int, device: str = "cpu") -> None:
        self.members = members
        self.device = device
        self.op = ""

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        raise NotImplementedError

    def call(self, op: str, *args: Any, **kwargs: Any) -> Value:
        """One op. `linear` means `aten.linear.default`; arguments are Values and literals."""
        return self.run(full_name(op), args, kwargs)

    def stacked(self, value: Value) -> Any:
        """A Stacked value, or a tuple of them where the op gave several."""
        if isinstance(value.held, (tuple, list)):
            return tuple(self.stacked(self.call("operator.getitem", value, i)) for i in range(len(value.held)))
        return Stacked(value)

    def shared(self, value: Value) -> Any:
        """A Shared value, or a tuple of them where the op gave several."""
        if isinstance(value.held, (tuple, list)):
            return tuple(self.shared(self.call("operator.getitem", value, i)) for i in range(len(value.held)))
        return Shared(value)

    def stack(self, x: Wide) -> Value:
        """`[N, ...]` of any value; a Shared one is expanded, which copies nothing."""
        if isinstance(x, Stacked):
            return x.value
        if isinstance(x, Ragged):
            raise TypeError("a Ragged value has no stacked form")
        value = cast(Value, x.value)
        return self.call("expand", self.call("unsqueeze", value, 0), [self.members, *(-1 for _ in range(value.ndim))])

    def align(self, x: Stacked, rank: int, at: int = 1) -> Value:
        """`[N, 1, ..., *s]`: dims of size 1 put behind the member axis (or before dim `at`) until the member's rank is `rank`."""
        value = x.value
        for _ in range(rank - x.rank):
            value = self.call("unsqueeze", value, at)
        return value

    def fold(self, x: Stacked) -> Value:
        """`[N, B, ...] -> [N*B, ...]`."""
        return self.call("flatten.using_ints", x.value, 0, 1)

    def unfold(self, y: Value, like: Stacked) -> Any:
        """`[N*B, ...] -> [N, B, ...]`; several outputs give several."""
        if isinstance(y.held, (tuple, list)):
            return tuple(self.unfold(self.call("operator.getitem", y, i), like) for i in range(len(y.held)))
        return Stacked(self.call("unflatten.int", y, 0, [self.members, -1]))

    def pack(self, x: Stacked) -> Value:
        """`[N, B, C, ...] -> [B, N*C, ...]`; a view when the memory is channel-packed."""
        return self.call("flatten.using_ints", self.call("transpose.int", x.value, 0, 1), 1, 2)

    def unpack(self, y: Value, like: Stacked | None = None) -> Any:
        """`[B, N*C, ...] -> [N, B, C, ...]`, a view over channel-packed memory; several outputs give several."""
        if isinstance(y.held, (tuple, list)):
            return tuple(self.unpack(self.call("operator.getitem", y, i), like) for i in range(len(y.held)))
        return Stacked(self.call("transpose.int", self.call("unflatten.int", y, 1, [self.members, -1]), 0, 1))

    def sizes(self, x: Wide) -> list[Any]:
        """The member's sizes of a value: numbers where they are known, Values where not."""
        value = cast(Value, x.value) if isinstance(x, (Shared, Stacked)) else None
        if value is None:
            raise TypeError("a Ragged value has no sizes")
        first = 1 if isinstance(x, Stacked) else 0
        return [s if s is not None else self.call("sym_size.int", value, d) for d, s in enumerate(value.sizes) if d >= first]


class EagerWriter(Writer):
    """Runs each op at once on real tensors."""

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        return Value(None, ops.resolve(op)(*unwrap(args), **unwrap(kwargs)))


def unwrap(args: Any) -> Any:
    """Arguments with Values replaced by what they hold."""
    if isinstance(args, Value):
        return args.held
    if isinstance(args, tuple):
        return tuple(unwrap(a) for a in args)
    if isinstance(args, list):
        return [unwrap(a) for a in args]
    if isinstance(args, dict):
        return {k: unwrap(v) for k, v in args.items()}
    return args


def wide_items(args: Any) -> list[Wide]:
    """The wide values among arguments, lists included."""
    if isinstance(args, (Shared, Stacked, Ragged)):
        return [args]
    if isinstance(args, (list, tuple)):
        return [v for a in args for v in wide_items(a)]
    if isinstance(args, dict):
        return wide_items(list(args.values()))
    return []


def put_shared(args: Any) -> Any:
    """Arguments with Shared values unwrapped, lists included."""
    if isinstance(args, Shared):
        return args.value
    if isinstance(args, (list, tuple)):
        return [put_shared(a) for a in args]
    if isinstance(args, dict):
        return {k: put_shared(v) for k, v in args.items()}
    return args


def is_tensor(x: Any) -> bool:
    return isinstance(x, Stacked) or (isinstance(x, Shared) and isinstance(x.value, Value) and x.value.is_tensor)


def rank(x: Wide) -> int:
    """The rank of a value in the member; 0 for numbers."""
    if isinstance(x, Stacked):
        return x.rank
    return cast(Value, x.value).ndim if isinstance(x, Shared) and is_tensor(x) else 0


def category(dtype: torch.dtype) -> int:
    """0 bool, 1 integer, 2 floating, 3 complex: the order of type promotion."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1
