"""Provides the writers, with which strategies call ops: `w.call(op, ...)`, and helpers for the member axis.

A `Writer` turns calls into values. The `ProgramWriter` of `lowering` adds a node to the wide program and
computes its fake value. `EagerWriter` runs the op on real tensors; tests and the primitive benchmark run
strategies with it.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from ..ir import ops
from ..ir.encoding import iter_arguments, map_arguments
from ..ir.ops import full_name
from ..ir.values import Ragged, Shared, Stacked, Value, WideValue, known


class Writer:
    """Calls ops for a strategy, and moves the member axis of values. It is the base class of all writers.

    A strategy gets a writer as its first argument, `w`. In the shapes below N is `w.members`, B the member's
    batch and C its channels. A size that is known only at run time reads as `None`, so use `-1`,
    `flatten.using_ints`, `unflatten.int` or `w.sizes`.

    Attributes:
        members: The number of members, N.
        device: The device kind that the program is for: `"cpu"` or `"cuda"`.
        op: The name of the op that the strategy runs, for strategies of several ops.

    Example:
        >>> import torch
        >>> from widepack.ir.values import Value
        >>> from widepack.primitives import Stacked
        >>> w = EagerWriter(members=3)
        >>> x = Stacked(Value(None, torch.ones(3, 5, 4)))
        >>> w.fold(x).sizes
        (15, 4)
        >>> w.call("relu", x.value).sizes
        (3, 5, 4)
    """

    def __init__(self, members: int, device: str = "cpu") -> None:
        self.members = members
        self.device = device
        self.op = ""

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        """Runs one op. Each writer implements it.

        Args:
            op: The op's full name, `aten.relu.default`.
            args: Values and literals, in the order of the op's schema.
            kwargs: The same, by name.

        Returns:
            The op's result.

        Raises:
            NotImplementedError: The class is not a writer.

        Example:
            >>> y = w.run("aten.relu.default", (x.value,), {})
        """
        raise NotImplementedError

    def call(self, op: str, *args: Any, **kwargs: Any) -> Value:
        """Calls one op and returns its value.

        Args:
            op: The op's name. `"relu"` means `aten.relu.default`, and `"max.dim"` means `aten.max.dim`.
            *args: Values and literals, in the order of the op's schema. Use `x.value` or `w.stack(x)`, not
                `x` itself.
            **kwargs: The same, by name.

        Returns:
            The op's result: a `Value`. Read results of an op with several of them through `w.stacked`.

        Example:
            >>> y = w.call("relu", x.value)
        """
        return self.run(full_name(op), args, kwargs)

    def stacked(self, value: Value) -> Any:
        """Returns a result of an op with a member axis as a value for each member.

        Args:
            value: The result.

        Returns:
            A `Stacked` value, or a tuple of them if the op has several results.

        Example:
            >>> values, indices = w.stacked(w.call("max.dim", x.value, -1))
        """
        if isinstance(value.fake, (tuple, list)):
            return tuple(
                self.stacked(self.call("operator.getitem", value, i)) for i in range(len(value.fake))
            )
        return Stacked(value)

    def shared(self, value: Value) -> Any:
        """Returns a result of an op as a value for all members.

        Args:
            value: The result.

        Returns:
            A `Shared` value, or a tuple of them if the op has several results.

        Example:
            >>> one = w.shared(w.call("sum", x.value))
        """
        if isinstance(value.fake, (tuple, list)):
            return tuple(self.shared(self.call("operator.getitem", value, i)) for i in range(len(value.fake)))
        return Shared(value)

    def stack(self, x: WideValue) -> Value:
        """Returns the value with a member axis, `[N, ...]`. A Shared value is expanded; nothing is copied.

        Args:
            x: A `Shared` or `Stacked` value.

        Returns:
            A `Value` of shape `[N, *s]`, where `s` is the member's shape.

        Raises:
            TypeError: The value is Ragged; its members have different shapes.

        Example:
            >>> value = w.stack(x)  # [N, *s]
        """
        if isinstance(x, Stacked):
            return x.value
        if isinstance(x, Ragged):
            raise TypeError(
                "w.stack(x): x is Ragged, so its members have different shapes and no common tensor"
            )
        value = cast(Value, x.value)
        return self.call(
            "expand", self.call("unsqueeze", value, 0), [self.members, *(-1 for _ in range(value.ndim))]
        )

    def own_memory(self, x: WideValue) -> Value:
        """Returns the value with a member axis, in memory that no other value has, for ops that write to it.

        A Shared value is copied for each member, and so is a value that repeats numbers of its memory (of
        `expand`). Without the copy torch's compiler adds all numbers into the memory of one.

        Args:
            x: A `Shared` or `Stacked` value.

        Returns:
            The value `[N, ...]`.

        Example:
            >>> value = w.own_memory(x)  # [N, *s]
        """
        value = self.stack(x)
        repeats = any(
            known(stride) == 0 and known(size) != 1
            for stride, size in zip(value.fake.stride(), value.fake.shape)
        )
        if isinstance(x, Stacked) and not repeats:
            return value
        return self.call("clone", value, memory_format=torch.contiguous_format)

    def align(self, x: Stacked, rank: int, at: int = 1) -> Value:
        """Adds dims of size 1 until the member's rank is `rank`: `[N, *s] -> [N, 1, ..., *s]`.

        Args:
            x: The value.
            rank: The rank of the result, the member axis not counted.
            at: The dim before which the new dims go. Default: 1, right after the member axis.

        Returns:
            A `Value` of rank `1 + rank`.

        Example:
            >>> w.align(x, 3).sizes
            (3, 1, 5, 4)
        """
        value = x.value
        for _ in range(rank - x.rank):
            value = self.call("unsqueeze", value, at)
        return value

    def fold(self, x: Stacked) -> Value:
        """Folds members into the batch: `[N, B, ...] -> [N*B, ...]`.

        Args:
            x: The value.

        Returns:
            A `Value`.

        Example:
            >>> w.fold(x).sizes
            (15, 4)
        """
        return self.call("flatten.using_ints", x.value, 0, 1)

    def unfold(self, y: Value, like: Stacked) -> Any:
        """Undoes `fold`: `[N*B, ...] -> [N, B, ...]`, as `Stacked`; a tuple for several results.

        Args:
            y: The result of an op over a folded value.
            like: The value that was folded.

        Returns:
            A `Stacked` value, or a tuple of them.

        Example:
            >>> w.unfold(w.fold(x), x).value.sizes
            (3, 5, 4)
        """
        if isinstance(y.fake, (tuple, list)):
            return tuple(self.unfold(self.call("operator.getitem", y, i), like) for i in range(len(y.fake)))
        return Stacked(self.call("unflatten.int", y, 0, [self.members, -1]))

    def pack(self, x: Stacked) -> Value:
        """Packs members into channels: `[N, B, C, ...] -> [B, N*C, ...]`. It is a view if x is
        channel-packed.

        Args:
            x: The value.

        Returns:
            A `Value`.

        Example:
            >>> w.pack(x).sizes
            (5, 12)
        """
        return self.call("flatten.using_ints", self.call("transpose.int", x.value, 0, 1), 1, 2)

    def unpack(self, y: Value, like: Stacked | None = None) -> Any:
        """Undoes `pack` with a view: `[B, N*C, ...] -> [N, B, C, ...]`, as `Stacked`, or as a tuple.

        Args:
            y: The result of an op over a packed value.
            like: The value that was packed. It is not read.

        Returns:
            A `Stacked` value, or a tuple of them.

        Example:
            >>> w.unpack(w.pack(x)).value.sizes
            (3, 5, 4)
        """
        if isinstance(y.fake, (tuple, list)):
            return tuple(self.unpack(self.call("operator.getitem", y, i), like) for i in range(len(y.fake)))
        return Stacked(self.call("transpose.int", self.call("unflatten.int", y, 1, [self.members, -1]), 0, 1))

    def sizes(self, x: WideValue) -> list[Any]:
        """Returns the member's sizes of a value, without the member axis.

        Args:
            x: A `Shared` or `Stacked` value.

        Returns:
            A list with an int for each static size, and a `Value` for each size that is known only at run
            time. Both are valid arguments of `w.call`.

        Raises:
            TypeError: The value is Ragged; its members have different sizes.

        Example:
            >>> w.sizes(x)
            [5, 4]
        """
        value = cast(Value, x.value) if isinstance(x, (Shared, Stacked)) else None
        if value is None:
            raise TypeError("w.sizes(x): x is Ragged, so its members have different sizes")
        first = 1 if isinstance(x, Stacked) else 0
        return [
            s if s is not None else self.call("sym_size.int", value, d)
            for d, s in enumerate(value.sizes)
            if d >= first
        ]


class EagerWriter(Writer):
    """Runs each op at once, on real tensors."""

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        """Runs the op and wraps its result."""
        return Value(None, ops.resolve(op)(*unwrap(args), **unwrap(kwargs)))


def unwrap(args: Any) -> Any:
    """Replaces each Value in the arguments by its tensor or number."""
    return map_arguments(args, lambda a: a.fake if isinstance(a, Value) else a)


def wide_items(args: Any) -> list[WideValue]:
    """Returns the wide values in the arguments, also those in lists, tuples and dicts."""
    return [a for a in iter_arguments(args) if isinstance(a, (Shared, Stacked, Ragged))]


def put_shared(args: Any) -> Any:
    """Replaces each Shared value in the arguments by its Value, also in lists, tuples and dicts."""
    return map_arguments(args, lambda a: a.value if isinstance(a, Shared) else a, as_lists=True)


def is_tensor(x: Any) -> bool:
    """Whether x is a Stacked value, or a Shared tensor."""
    return isinstance(x, Stacked) or (
        isinstance(x, Shared) and isinstance(x.value, Value) and x.value.is_tensor
    )


def rank(x: WideValue) -> int:
    """Returns the rank of a value in the member: the member axis is not counted.

    Args:
        x: The value.

    Returns:
        The rank. A number has rank 0.

    Example:
        >>> widepack.primitives.rank(x)
        2
    """
    if isinstance(x, Stacked):
        return x.rank
    return cast(Value, x.value).ndim if isinstance(x, Shared) and is_tensor(x) else 0


def category(dtype: torch.dtype) -> int:
    """Returns the category of a dtype in type promotion: 0 bool, 1 integer, 2 floating, 3 complex."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1
