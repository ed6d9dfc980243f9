"""Draws valid operands for an op, from samples or from the schema of the op, and then changes them. Some sets
have views alone: of one number, or in another order in memory.

A forged program or an unusual call can make each of these changes: other sizes, ranks, dtypes, strides and
values of a tensor, other numbers, other lengths of lists, one argument in the place of another, a weight in
oneDNN's order in the place of a dense one.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from valid_operands import VALID

from widepack import primitives as primitives  # fills the samples
from widepack.ir import ops
from widepack.ir.torch_internals import schema_of
from widepack.registry.samples import SAMPLES, Draw

INTEGERS = (
    -(2**63), -(2**31), -100, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 16, 33, 100, 10**8, 2**31 - 1, 2**63 - 1,
)  # fmt: skip
SMALL = (-3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 16, 33)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 0.5, 1.0, 2.0, 1e-30, 1e30, -1e30)
TEXTS = (
    "", "none", "mean", "sum", "max", "prod", "amax", "reflect", "constant", "zeros", "tanh", "relu", "fro",
    "nuc",
)  # fmt: skip
SIZES = (0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
    torch.int8, torch.bool, torch.complex64,
)  # fmt: skip
MOST_NUMBERS = 200_000  # of one operand

Operands = tuple[list[Any], dict[str, Any]]


class Drawn:
    """Draws the operands of one op, from one seed.

    Args:
        op: The op's name in programs.
        seed: Two draws with the same op and seed are equal.
    """

    def __init__(self, op: str, seed: int) -> None:
        self.op = op
        self.random = random.Random(f"{op} {seed}")
        self.generator = torch.Generator().manual_seed(seed)
        self.schema = ops.arguments(op)

    def operands(self) -> Operands:
        """Returns positional and named operands with up to four changes."""
        args, kwargs = self._valid()
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 2, 3, 4))):
            # skips a change that is not possible after an earlier change
            with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                self._change(args, kwargs)
        if self.random.random() < 0.15:
            view = self.random.choice((_one_number, _other_order))
            args, kwargs = [_mapped(a, view) for a in args], {k: _mapped(v, view) for k, v in kwargs.items()}
        return args, kwargs

    # ------------------------------------------------------------ valid operands

    def _valid(self) -> Operands:
        several: list[Any] = []
        if self.op in VALID:
            several = VALID[self.op](Draw(self.random.randrange(2**30)))
        elif self.op in SAMPLES:
            several = SAMPLES[self.op](Draw(self.random.randrange(2**30)))
        if not several or self.random.random() < 0.1:
            return self._by_schema()
        args, kwargs = self.random.choice(several)
        return [_unshared(a) for a in args], dict(kwargs)

    def _by_schema(self) -> Operands:
        """Returns operands of the types that the schema names."""
        rank = self.random.randrange(5)
        args, kwargs = [], {}
        keywords = {a.name for a in schema_of(ops.resolve(self.op)).arguments if a.kwarg_only}
        for name, type_, default in self.schema:
            if "Optional" in type_ and self.random.random() < 0.5:
                value = None
            elif default is not None and self.random.random() < 0.6:
                value = default
            else:
                value = self._of_type(type_, rank)
            if name in keywords:
                if value is not None:
                    kwargs[name] = value
            else:
                args.append(value)
        return args, kwargs

    def _of_type(self, type_: str, rank: int) -> Any:
        inner = type_.removeprefix("Optional[").removesuffix("]") if type_.startswith("Optional[") else type_
        if inner == "Tensor":
            return self._tensor(rank)
        if inner.startswith("List["):
            element = inner[5:-1]
            count = self.random.choice((1, 2, 2, 3, rank))
            return [self._of_type(element, rank) for _ in range(count)]
        simple: dict[str, Callable[[], Any]] = {
            "int": lambda: self.random.choice(SMALL),
            "SymInt": lambda: self.random.choice(SMALL),
            "float": lambda: self.random.choice(FLOATS),
            "number": lambda: self.random.choice((*SMALL, *FLOATS)),
            "bool": lambda: self.random.random() < 0.5,
            "str": lambda: self.random.choice(TEXTS),
            "Device": lambda: torch.device("cpu"),
            "ScalarType": lambda: self.random.choice(DTYPES),
        }
        return simple.get(inner, lambda: None)()

    def _tensor(self, rank: int) -> Tensor:
        shape = [self.random.choice(SIZES[:10]) for _ in range(rank)]
        return self._numbers(shape, self.random.choice(DTYPES[:2] if self.random.random() < 0.6 else DTYPES))

    def _numbers(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(list(shape), generator=self.generator).to(dtype)
        return torch.randint(0, 5, list(shape), generator=self.generator).to(dtype)

    # ------------------------------------------------------------ changes

    def _change(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Changes one operand in place."""
        places: list[tuple[Any, Any]] = [(args, i) for i in range(len(args))] + [(kwargs, k) for k in kwargs]
        if not places:
            return
        holder, key = self.random.choice(places)
        kind = self.random.random()
        if kind < 0.06:
            source, other = self.random.choice(places)
            holder[key] = _unshared(source[other])
        elif kind < 0.10 and len(args) > 1:
            args.pop()
        elif kind < 0.16 and len(args) < len(self.schema):
            args.append(self._of_type(self.schema[len(args)][1], self.random.randrange(5)))
        else:
            holder[key] = self._changed(holder[key])

    def _changed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._changed_tensor(value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.random.choice((value - 1, value + 1, -value, *self.random.choices(INTEGERS, k=3)))
        if isinstance(value, float):
            return self.random.choice(FLOATS)
        if isinstance(value, str):
            return self.random.choice(TEXTS)
        if isinstance(value, (list, tuple)):
            return self._changed_list(list(value))
        if value is None:
            return self.random.choice((None, 0, 1, self._tensor(self.random.randrange(4))))
        return value

    def _changed_list(self, values: list[Any]) -> list[Any]:
        kind = self.random.random()
        if not values or kind < 0.2:
            return [*values, values[0] if values else self.random.choice(SMALL)]
        if kind < 0.4:
            values.pop(self.random.randrange(len(values)))
            return values
        place = self.random.randrange(len(values))
        values[place] = self._changed(values[place])
        return values

    def _changed_tensor(self, x: Tensor) -> Any:
        if x.layout is not torch.strided:
            return self._tensor(self.random.randrange(1, 5))
        changes = (
            *((self._resized,) * 5),
            self._other_rank,
            self._cast,
            *((self._strided,) * 2),
            *((self._other_values,) * 4),
            *((self._extreme,) * 3),
            self._opaque,
        )
        return self.random.choice(changes)(x)

    def _resized(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        if not shape:
            return self._numbers([self.random.choice(SIZES)], x.dtype)
        for _ in range(self.random.choice((1, 1, 2))):
            place = self.random.randrange(len(shape))
            old = shape[place]
            shape[place] = self.random.choice(
                (max(old - 1, 0), old + 1, 2 * old, 1, 0, self.random.choice(SIZES))
            )
        return _refilled(x, shape) if math.prod(shape) <= MOST_NUMBERS else x

    def _other_rank(self, x: Tensor) -> Tensor:
        kind = self.random.randrange(4)
        if kind == 0 and x.dim():
            return x.select(0, 0) if x.shape[0] else x.reshape(-1)
        if kind == 1:
            return x.unsqueeze(self.random.randrange(x.dim() + 1))
        if kind == 2:
            return x.reshape(-1)
        return x.unsqueeze(0).unsqueeze(-1)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.random.choice(DTYPES)) if not x.is_complex() else x.abs()

    def _strided(self, x: Tensor) -> Tensor:
        kind = self.random.randrange(6)
        if kind == 0 and x.dim() > 1:
            return x.transpose(0, -1)
        if kind == 1 and x.dim():
            return x.flip(0)[:: max(1, x.shape[0] // 2)]
        if kind == 2:
            return torch.stack([x, x], -1)[..., 0]
        if kind == 3 and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == 4 and x.dim() and x.shape[0]:
            return x[:1].expand(x.shape)
        return x[..., 1:] if x.dim() else x

    def _other_values(self, x: Tensor) -> Tensor:
        fresh = x.clone()
        flat = fresh.view(-1) if fresh.is_contiguous() else fresh.reshape(-1)
        if not flat.numel():
            return x
        for _ in range(self.random.choice((1, 1, 2, 5))):
            place = self.random.randrange(flat.numel())
            if x.dtype.is_floating_point:
                flat[place] = self.random.choice(FLOATS)
            elif x.is_complex() or x.dtype == torch.bool:
                flat[place] = 1
            else:
                number = self.random.choice((*INTEGERS, *SMALL, *x.shape))
                bounds = torch.iinfo(x.dtype)
                flat[place] = max(bounds.min, min(bounds.max, number))
        return flat.view(x.shape)

    def _extreme(self, x: Tensor) -> Tensor:
        """Returns the tensor with NaN, an infinity, a denormal or the largest number in many places."""
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            return self._other_values(x)
        bounds = torch.finfo(x.dtype)
        denormal = bounds.smallest_normal / 4
        several = (*FLOATS[:3], denormal, -denormal, bounds.max, -bounds.max, bounds.max / 2)
        if x.dtype.is_complex:
            value: Any = complex(self.random.choice(several), self.random.choice((0.0, *several)))
        else:
            value = self.random.choice(several)
        fresh = x.clone()
        kind = self.random.randrange(4)
        if kind == 0 or not x.dim():
            return torch.full_like(fresh, value)
        if kind == 1:
            place = self.random.randrange(max(x.shape[0], 1))
            fresh[place : place + 1] = value  # one matrix of a batch, or one row
        elif kind == 2 and x.dim() > 1:
            torch.diagonal(fresh, dim1=-2, dim2=-1).fill_(value)
        else:
            chosen = torch.rand(x.shape, generator=self.generator) < self.random.choice((0.1, 0.5))
            fresh[chosen] = value
        return fresh

    def _opaque(self, x: Tensor) -> Any:
        """Returns a weight in oneDNN's order, as a pack op makes it."""
        if x.dtype is not torch.float32 or x.dim() < 3:
            return x
        return ops.function("widepack.pack_linear.default")(x.reshape(x.shape[0], x.shape[1], -1), 4)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns an operand with a change of each dense tensor in it."""
    if isinstance(value, Tensor):
        return change(value) if value.layout is torch.strided else value
    return [_mapped(v, change) for v in value] if isinstance(value, (list, tuple)) else value


def _one_number(x: Tensor) -> Tensor:
    """Returns a tensor of this shape that shows one number everywhere."""
    return x.reshape(-1)[:1].clone().reshape([1] * x.dim()).expand(x.shape) if x.numel() and x.dim() else x


def _other_order(x: Tensor) -> Tensor:
    """Returns the same tensor with its dims in the opposite order in memory."""
    back = list(range(x.dim() - 1, -1, -1))
    return x.permute(back).contiguous().permute(back)


def _refilled(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a tensor of another shape with the numbers of x, repeated as needed, in new memory."""
    count, flat = math.prod(shape), x.reshape(-1)
    if not flat.numel():
        return torch.zeros(list(shape), dtype=x.dtype)
    return flat.repeat(count // flat.numel() + 1)[:count].clone().reshape(list(shape))


def _unshared(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.layout is torch.strided else value
    return [_unshared(v) for v in value] if isinstance(value, (list, tuple)) else value
