"""Runs an op once for each member. The result defines what every strategy must return.

`wide` turns the samples of N members into arguments of a strategy. `outputs` splits the result of the
strategy into the members' results. `assert_equal` compares them with the members. `run_all` runs every
strategy of an op.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from widepack import primitives as primitives  # fills the registry
from widepack.ir import ops
from widepack.ir.kinds import SIZES
from widepack.ir.values import GatheredMatrices, Shared, Stacked, Value, WeightFactors
from widepack.lowering.interpreter import applicable
from widepack.registry.registry import REGISTRY, Strategy, always
from widepack.registry.samples import SAMPLES, B, Draw, Sample
from widepack.registry.sequential import sequential
from widepack.registry.writer import EagerWriter

EXACT = {
    "identity",
    "shape",
    "index",
    "embedding",
    "pad",
}  # families that copy numbers and never compute
ULPS = 32  # of the largest number of the result: sums in another order, vectorised against scalar code
UNDEFINED = {
    "aten.empty_like.default",
    "aten.new_empty.default",
}  # their numbers are arbitrary: only shape and dtype are compared
COMBINATIONS = 7
VIEWS = {
    "aten.view.default",
    "aten._unsafe_view.default",
}  # simplification replaces them by `reshape`; for one member they need contiguous memory
SEQUENTIAL = Strategy(
    "sequential", lambda w, *args, **kwargs: sequential(w, w.op, args, kwargs), always, "once for each member"
)


def tensors(arg: Any) -> list[torch.Tensor]:
    """Returns the tensors among arguments, in order."""
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [t for a in arg for t in tensors(a)]
    return [t for a in arg.values() for t in tensors(a)] if isinstance(arg, dict) else []


SIZED = {
    op for op in SAMPLES if not any(tensors(s) for s in SAMPLES[op](Draw(0)))
}  # ops that draw random numbers and take only sizes (test_dropout.py)
WALKED = sorted(set(REGISTRY) - SIZED)


def put(arg: Any, to: Iterator[Any]) -> Any:
    """Replaces the tensors in arguments by the next tensors of `to`."""
    if isinstance(arg, torch.Tensor):
        return next(to)
    if isinstance(arg, (list, tuple)):
        return type(arg)(put(a, to) for a in arg)
    return {k: put(a, to) for k, a in arg.items()} if isinstance(arg, dict) else arg


@cache
def combinations(count: int, draws: bool = False) -> list[tuple[bool, ...]]:
    """Returns which tensors are Stacked: all, each alone, then the rest. draws: also none (random ops)."""
    alone = [tuple(k == i for k in range(count)) for i in range(count)]
    if len(alone) >= COMBINATIONS - 1:  # the many others would be sorted to the end and cut off
        return [(True,) * count, *alone][:COMBINATIONS]
    every = [c for c in itertools.product((True, False), repeat=count) if any(c) or draws]
    return sorted(every, key=lambda c: (not all(c), sum(c) != 1))[:COMBINATIONS]


def packed(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` as `[N, B, C, ...]` over memory of layout `[B, N*C, ...]`."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` as `[N, B, C, *s]` over memory of layout `[B, *s, N, C]`."""
    order = [1, *range(3, x.ndim), 0, 2]
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def factors_of(x: torch.Tensor) -> WeightFactors | None:
    """Returns exact factors of each member's tensor `x[i]`: a base of zeros, ones on the diagonal of left,
    and `x[i]` as right; None for a value that no op takes as a factored weight.
    """
    if x.ndim < 3 or not x.is_floating_point() or not x.shape[1]:
        return None
    rows = x.shape[1]
    left = torch.eye(rows, dtype=x.dtype, device=x.device).expand(x.shape[0], rows, rows)
    parts = torch.zeros_like(x[0].detach()), left, x.reshape(x.shape[0], rows, -1)
    base, thin, right = (Value(None, p) for p in parts)
    return WeightFactors(Shared(base), Stacked(thin), Stacked(right))


def gathered_of(x: torch.Tensor) -> GatheredMatrices | None:
    """Returns each member's matrices `x[i]` as the matrices that an index selects, in another order; None
    for a value that is no batch of matrices.
    """
    if x.ndim < 4 or not x.is_floating_point():
        return None
    table = x.flatten(1, -3).flip(1)
    index = torch.arange(table.shape[1], device=x.device).flip(0).reshape(x.shape[1:-2])
    return GatheredMatrices(Stacked(Value(None, table)), Shared(Value(None, index)))


def wide(
    many: list[Sample], kinds: tuple[bool, ...], memory: str, nan: int | None = None
) -> tuple[Any, Any, list[Sample]]:
    """Returns arguments for a strategy, and the arguments of each member.

    memory: member-major ("major"), channel-packed ("packed"), or that with channels innermost ("last").
    nan: the member whose floating-point numbers are all NaN.
    """
    columns: list[Shared | Stacked] = []
    by_argument: list[list[torch.Tensor]] = []
    for stacked, parts in zip(kinds, zip(*(tensors(s) for s in many))):
        if not stacked:
            columns.append(Shared(Value(None, parts[0])))
            by_argument.append([parts[0]] * len(many))
            continue
        if nan is not None and (parts[0].is_floating_point() or parts[0].is_complex()):
            parts = tuple(torch.full_like(p, float("nan")) if i == nan else p for i, p in enumerate(parts))
        x = torch.stack(parts)
        x_wide = packed(x) if memory == "packed" and x.ndim >= 3 else x
        x_wide = channels_last(x) if memory == "last" and _is_image(parts[0]) else x_wide
        columns.append(Stacked(Value(None, x_wide), factors_of(x), gathered_of(x)))
        by_argument.append(list(parts))
    args, kwargs = put(many[0], iter(columns))
    return args, kwargs, [put(many[0], iter([a[i] for a in by_argument])) for i in range(len(many))]


def outputs(result: Any, members: int) -> list[Any]:
    """Returns each member's outputs from the result of a rule; None for an output that the rule omits."""
    if isinstance(result, (tuple, list)):
        return [list(row) for row in zip(*(outputs(r, members) for r in result))]
    if result is None:
        return [None] * members
    stored = result.value.fake if isinstance(result.value, Value) else result.value
    return list(stored.unbind(0)) if isinstance(result, Stacked) else [stored] * members


def assert_equal(op: str, got: Any, want: Any, where: str, drawn: bool = False) -> None:
    """Checks that shapes, dtypes and numbers are equal, except for rounding of floating-point numbers.

    drawn: the numbers are random and not compared here; test_dropout.py checks them.
    """
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), f"{where}: {len(got)} outputs, the member has {len(want)}"
        for g, w in zip(got, want):
            assert_equal(op, g, w, where, drawn)
    elif not isinstance(want, torch.Tensor):
        assert got == want, f"{where}: {got} is not {want}"
    elif got is not None:
        assert got.shape == want.shape, (
            f"{where}: shape {list(got.shape)}, the member's is {list(want.shape)}"
        )
        assert got.dtype == want.dtype, f"{where}: {got.dtype}, the member's is {want.dtype}"
        if op in UNDEFINED or drawn:
            return
        if REGISTRY[op].family in EXACT or not (want.is_floating_point() or want.is_complex()):
            assert same_bits(got, want), f"{where}: differs from the member's result"
            return
        if torch.equal(got, want):  # most strategies that copy numbers; the bound takes ten times as long
            return
        finite = want[torch.isfinite(want)].abs()
        bound = ULPS * torch.finfo(want.dtype).eps * float(finite.max()) if finite.numel() else 0.0
        if torch.allclose(got, want, rtol=0, atol=bound, equal_nan=True):  # a fifth of assert_close's time
            return
        torch.testing.assert_close(
            got, want, rtol=0, atol=bound, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and bits. All NaN are equal."""
    if a.shape != b.shape:
        return False
    if a.dtype == b.dtype and not a.is_complex():  # mostly they are equal as they are, which is seen at once
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        if torch.equal(*raw):
            return True
    return torch.equal(bits(a), bits(b))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor. All NaN get the same bytes."""
    if x.is_floating_point() or x.is_complex():
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        if not x.ndim:
            return bits(x.reshape(1))
        one_nan = torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x)
        return one_nan.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return x


def member(op: str, sample: Sample) -> Any:
    args, kwargs = sample
    return ops.resolve(op)(*args, **kwargs)


def on(sample: Sample, device: str) -> Sample:
    """Moves the tensors of a sample to a device."""
    args, kwargs = put(sample, iter([t.to(device) for t in tensors(sample)]))
    return args, kwargs


def runs(op: str, members: int, device: str = "cpu") -> Iterator[tuple[str, list[Sample], tuple[bool, ...]]]:
    """Yields every sample of an op with every combination of kinds."""
    drawn = [[on(s, device) for s in SAMPLES[op](Draw(17 + i))] for i in range(members)]
    for number, many in enumerate(zip(*drawn)):
        for kinds in combinations(len(tensors(many[0])), not ops.pure(op, *many[0])):
            words = ", ".join(
                f"{'Stacked' if k else 'Shared'} {str(t.dtype)[6:]}{list(t.shape)}"
                for k, t in zip(kinds, tensors(many[0]))
            )
            yield f"{op} sample {number} ({words}), N={members}", list(many), kinds


def memories(many: list[Sample]) -> tuple[str, ...]:
    ranks = {t.ndim for t in tensors(many[0])}
    packed = ("packed",) if any(n >= 2 for n in ranks) else ()
    return ("major", *packed, *(("last",) if _is_image(tensors(many[0])[0]) else ()))


def _is_image(x: torch.Tensor) -> bool:
    """Whether a member's tensor may be a batch of images or volumes with channels."""
    return x.ndim in (4, 5) and x.shape[0] == B


def run_all(op: str, members: int, device: str = "cpu") -> Iterator[tuple[str, Any, list[Sample]]]:
    for where, many, kinds in runs(op, members, device):
        for memory in memories(many):
            args, kwargs, calls = wide(many, kinds, memory)
            w = EagerWriter(members, torch.device(device).type)
            w.op = op
            last = [SEQUENTIAL] if op not in SIZES and (op not in VIEWS or memory == "major") else []
            for s in (*applicable(w, op, args, kwargs), *last):
                yield f"{where}, {memory}, strategy {s.name}", s.rule(w, *args, **kwargs), calls
