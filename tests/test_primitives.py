"""One oracle for all: every strategy of every primitive equals the op run once a member.

Walked for every op of the registry: its samples, the kinds that its tensors may have, N = 1 and 3, member-major and channel-packed memory, a batch that is
known and one that is not, every strategy that says it applies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from widepack import ops, values
from widepack import primitives as primitives  # fills the registry
from widepack.fallback import sequential
from widepack.interpret import applicable, shared
from widepack.kinds import SIZES
from widepack.registry import REGISTRY, Strategy, register
from widepack.samples_of_ops import SAMPLES, B, Draw, Sample, call, samples
from widepack.values import Shared, Stacked, Value
from widepack.writer import EagerWriter
from widepack_artifacts.opset import OPS

EXACT = {"identity", "shape", "index", "embedding", "pad"}  # families that move numbers and never compute with them
ULPS = 32  # of the answer's largest number: sums of a few dozen terms in another order, vectorised and scalar code of one function
UNDEFINED = {"aten.empty_like.default", "aten.new_empty.default"}  # what they hold means nothing: shape and dtype are compared
COMBINATIONS = 7

pytestmark = pytest.mark.filterwarnings("error")


def tensors(arg: Any) -> list[torch.Tensor]:
    """The tensors among arguments, in order."""
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [t for a in arg for t in tensors(a)]
    return [t for a in arg.values() for t in tensors(a)] if isinstance(arg, dict) else []


def put(arg: Any, to: Iterator[Any]) -> Any:
    """Arguments with their tensors replaced by the next of `to`."""
    if isinstance(arg, torch.Tensor):
        return next(to)
    if isinstance(arg, (list, tuple)):
        return type(arg)(put(a, to) for a in arg)
    return {k: put(a, to) for k, a in arg.items()} if isinstance(arg, dict) else arg


def combinations(count: int) -> list[tuple[bool, ...]]:
    """Which tensors are Stacked: at least one, all first, then one alone each, then the others."""
    every = [c for c in itertools.product((True, False), repeat=count) if any(c)]
    return sorted(every, key=lambda c: (not all(c), sum(c) != 1))[:COMBINATIONS]


def packed(x: torch.Tensor) -> torch.Tensor:
    """`[N, B, C, ...]` over memory `[B, N*C, ...]`."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def wide(many: list[Sample], kinds: tuple[bool, ...], memory: str, nan: int | None = None) -> tuple[Any, Any, list[Sample]]:
    """Arguments for a rule, and each member's own arguments. nan: the member whose floats are all NaN."""
    columns, own = [], []
    for stacked, parts in zip(kinds, zip(*(tensors(s) for s in many))):
        if not stacked:
            columns.append(Shared(Value(None, parts[0])))
            own.append([parts[0]] * len(many))
            continue
        if nan is not None and (parts[0].is_floating_point() or parts[0].is_complex()):
            parts = tuple(torch.full_like(p, float("nan")) if i == nan else p for i, p in enumerate(parts))
        x = torch.stack(parts)
        pack = memory == "packed" and x.ndim >= 3
        columns.append(Stacked(Value(None, packed(x) if pack else x), pack))
        own.append(list(parts))
    args, kwargs = put(many[0], iter(columns))
    return args, kwargs, [put(many[0], iter([o[i] for o in own])) for i in range(len(many))]


def outputs(result: Any, members: int) -> list[list[Any]]:
    """A rule's result as each member's outputs; None for what the rule leaves out."""
    if isinstance(result, (tuple, list)):
        return [list(row) for row in zip(*(outputs(r, members) for r in result))]
    if result is None:
        return [None] * members
    held = result.value.held if isinstance(result.value, Value) else result.value
    return list(held.unbind(0)) if isinstance(result, Stacked) else [held] * members


def assert_equal(op: str, got: Any, want: Any, where: str) -> None:
    """Shapes and dtypes are equal; numbers too, but for rounding where the op computes with floats."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), f"{where}: {len(got)} outputs, the member has {len(want)}"
        for g, w in zip(got, want):
            assert_equal(op, g, w, where)
    elif not isinstance(want, torch.Tensor):
        assert got == want, f"{where}: {got} is not {want}"
    elif got is not None:
        assert got.shape == want.shape, f"{where}: shape {list(got.shape)}, the member's is {list(want.shape)}"
        assert got.dtype == want.dtype, f"{where}: {got.dtype}, the member's is {want.dtype}"
        if op in UNDEFINED:
            return
        if REGISTRY[op].family in EXACT or not (want.is_floating_point() or want.is_complex()):
            assert torch.equal(bits(got), bits(want)), f"{where}: differs from the member's own"
            return
        finite = want[torch.isfinite(want)].abs()
        bound = ULPS * torch.finfo(want.dtype).eps * float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=0, atol=bound, equal_nan=True, msg=lambda m: f"{where}: {m}")


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, with one NaN for all."""
    if x.is_floating_point() or x.is_complex():
        x = torch.view_as_real(x) if x.is_complex() else x
        return torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x).contiguous().view(torch.uint8) if x.ndim else bits(x.reshape(1))
    return x


def member(op: str, sample: Sample) -> Any:
    args, kwargs = sample
    return ops.resolve(op)(*args, **kwargs)


def runs(op: str, members: int) -> Iterator[tuple[str, list[Sample], tuple[bool, ...]]]:
    """Every sample of an op with every combination of kinds."""
    drawn = [SAMPLES[op](Draw(17 + i)) for i in range(members)]
    for number, many in enumerate(zip(*drawn)):
        for kinds in combinations(len(tensors(many[0]))):
            words = ", ".join(f"{'Stacked' if k else 'Shared'} {str(t.dtype)[6:]}{list(t.shape)}" for k, t in zip(kinds, tensors(many[0])))
            yield f"{op} sample {number} ({words}), N={members}", list(many), kinds


def memories(many: list[Sample]) -> tuple[str, ...]:
    return ("major", "packed") if any(t.ndim >= 2 for t in tensors(many[0])) else ("major",)


def run_all(op: str, members: int) -> Iterator[tuple[str, Any, list[Sample]]]:
    for where, many, kinds in runs(op, members):
        for memory in memories(many):
            args, kwargs, own = wide(many, kinds, memory)
            w = EagerWriter(members)
            w.op = op
            for s in applicable(w, op, args, kwargs):
                yield f"{where}, {memory}, strategy {s.name}", s.rule(w, *args, **kwargs), own


@pytest.mark.parametrize("op", sorted(REGISTRY))
def test_every_strategy_equals_the_op_once_a_member(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = values.known
    ran = set()
    for batch in ("known", "unknown"):
        if batch == "unknown":
            monkeypatch.setattr(values, "known", lambda size: None if size == B else known(size))
        for members in (1, 3):
            for where, result, own in run_all(op, members):
                ran.add(where.rpartition(" ")[2])
                for i, (got, sample) in enumerate(zip(outputs(result, members), own)):
                    assert_equal(op, got, member(op, sample), f"{where}, {batch} batch, member {i}")
    assert ran == set(REGISTRY[op].strategies), f"{op}: no sample reaches the strategies {sorted(set(REGISTRY[op].strategies) - ran)}"
