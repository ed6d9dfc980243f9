"""Every strategy over every option of its layer: drawn options, each argument's kind varied alone and in pairs, three dtypes, N members, batches down to none.

Held to the op once a member in the same dtype, and its error in float64: a strategy may be off by four times what the members' own answers are off, and a few ulp of the largest number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracle import EXACT, bits, member, outputs, packed, put, tensors
from widepack.interpret import applicable
from widepack.primitives.options import OPTIONS, Pick, arguments
from widepack.registry import REGISTRY
from widepack.samples_of_ops import Draw, Sample
from widepack.values import Shared, Stacked, Value
from widepack.writer import EagerWriter

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MEMBERS = (1, 2, 5)
BATCHES = (0, 1, 4)
EVERY = list(itertools.product(DTYPES, MEMBERS, BATCHES))
UNTYPED = {"aten.native_dropout.default"}  # of an empty tensor its mask is no mask in torch
ULPS = 32  # of float64, to whose answers there is no better truth
FEW = 8  # of the others, beside four times the members' own errors

CASES = {"run": 0, "refused": 0}  # what was held to the members, and what some member refuses
pytestmark = pytest.mark.filterwarnings("error")


def kinds(count: int) -> list[tuple[bool, ...]]:
    """Which arguments are Stacked: all, each alone, all but one, every pair."""
    every = tuple(range(count))
    chosen = [set(every), *({i} for i in every), *(set(every) - {i} for i in every), *map(set, itertools.combinations(every, 2))]
    return list(dict.fromkeys(tuple(i in c for i in every) for c in chosen if c))


def cast(sample: Any, dtype: torch.dtype) -> Any:
    """A sample with its floats in a dtype."""
    return put(sample, iter([t.to(dtype) if t.is_floating_point() else t for t in tensors(sample)]))


def arranged(many: list[Sample], which: tuple[bool, ...], memory: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any, list[Sample]]:
    """Arguments for a strategy, and each member's own."""
    stacked = [k for k, a in zip(which, arguments(many[0])) for _ in tensors(a)]
    columns: list[Shared | Stacked] = []
    own: list[list[torch.Tensor]] = []
    for s, parts in zip(stacked, zip(*(tensors(m) for m in many))):
        columns.append(Stacked(Value(None, memory(torch.stack(parts)))) if s else Shared(Value(None, parts[0])))
        own.append(list(parts) if s else [parts[0]] * len(many))
    args, kwargs = put(many[0], iter(columns))
    return args, kwargs, [put(many[0], iter([o[i] for o in own])) for i in range(len(many))]


def answer(op: str, sample: Sample) -> list[torch.Tensor] | None:
    """The member alone; None where it refuses."""
    try:
        return tensors([member(op, sample)])
    except (RuntimeError, IndexError, ValueError):
        return None


def largest(many: Iterable[torch.Tensor]) -> float:
    """The largest finite number; 0 of none."""
    return max((float(t.double().abs().nan_to_num(nan=0, posinf=0).max()) for t in many if t.is_floating_point() and t.numel()), default=0.0)


def held(op: str, got: list[Any], own: list[list[torch.Tensor]], truth: list[list[torch.Tensor]], dtype: torch.dtype, where: str) -> None:
    """got: of each member what a strategy gave. A small output beside large ones (an LSTM's last state) is as exact as they are."""
    eps, size = torch.finfo(dtype).eps, largest(t for row in truth for t in row)
    for number in range(len(own[0])):
        mine, want = [o[number] for o in own], [t[number] for t in truth]
        off = largest(m.double() - t for m, t in zip(mine, want) if m.is_floating_point())
        for i, (outs, m, t) in enumerate(zip(got, mine, want)):
            parts = list(outs) if isinstance(outs, (list, tuple)) else [outs]
            g = parts[number]
            if g is None or (m.numel() == 0 and op in UNTYPED):  # what the strategy leaves out nothing reads
                continue
            said = f"{where}, output {number}, member {i}"
            assert g.shape == m.shape and g.dtype == m.dtype, f"{said}: {g.dtype}{list(g.shape)}, the member's is {m.dtype}{list(m.shape)}"
            if REGISTRY[op].family in EXACT or not m.is_floating_point():
                assert torch.equal(bits(g), bits(m)), f"{said}: differs from the member's own"
                continue
            assert torch.equal(torch.isfinite(g), torch.isfinite(m)), f"{said}: not finite in other places"
            finite = torch.isfinite(m)
            bound = ULPS * eps * size if dtype == torch.float64 else 4 * off + FEW * eps * size
            error = largest([(g.double() - (m if dtype == torch.float64 else t))[finite]])
            assert error <= bound, f"{said}: off by {error:.3g}, the bound is {bound:.3g} (the members' own {off:.3g}, the largest number {size:.3g})"


def run(op: str, pick: Pick, dtype: torch.dtype, members: int, batch: int, memory: Callable[[torch.Tensor], torch.Tensor]) -> None:
    many = [cast(OPTIONS[op](Draw(100 + i), pick.again(), batch), dtype) for i in range(members)]
    literals = put(many[0], iter([str(list(t.shape)) for t in tensors(many[0])]))
    for which in kinds(len(arguments(many[0]))):
        args, kwargs, own = arranged(many, which, memory)
        where = f"{op}{literals[0]}{literals[1] or ''}, {dtype}, N={members}, batch {batch}, {memory.__name__}, Stacked: {which}"
        answers = [answer(op, s) for s in own]
        truth = [answer(op, cast(s, torch.float64)) for s in own]
        w = EagerWriter(members)
        w.op = op
        for s in applicable(w, op, args, kwargs):
            if s.asked:
                continue
            if any(a is None for a in answers):
                CASES["refused"] += 1
                continue
            CASES["run"] += 1
            held(op, outputs(s.rule(w, *args, **kwargs), members), answers, truth, dtype, f"{where}, strategy {s.name}")  # type: ignore[arg-type]


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


def memories(x: torch.Tensor) -> torch.Tensor:
    return packed(x) if x.ndim >= 3 else x


OPS = sorted(OPTIONS)
FEW_DRAWS = settings(max_examples=2, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MANY_DRAWS = settings(FEW_DRAWS, max_examples=50)


@pytest.mark.parametrize("op", OPS)
@FEW_DRAWS
@given(data=st.data())
def test_strategies_answer_as_the_members_at_drawn_options(op: str, data: st.DataObject) -> None:
    pick = Pick(lambda count: data.draw(st.integers(0, count - 1)))
    OPTIONS[op](Draw(0), pick, 1)
    dtype, members, batch = data.draw(st.sampled_from(EVERY))
    run(op, pick, dtype, members, batch, data.draw(st.sampled_from([plain, memories])))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@MANY_DRAWS
@given(data=st.data())
def test_strategies_answer_as_the_members_at_many_options(op: str, data: st.DataObject) -> None:
    pick = Pick(lambda count: data.draw(st.integers(0, count - 1)))
    OPTIONS[op](Draw(0), pick, 1)
    for dtype, members, batch in EVERY:
        run(op, pick, dtype, members, batch, memories if (members + batch) % 2 else plain)


def test_every_option_space_makes_calls_that_members_take() -> None:
    """At most batches: what every member refuses proves nothing."""
    for op, space in OPTIONS.items():
        generator, taken = torch.Generator().manual_seed(0), 0
        for _ in range(10):
            pick = Pick(lambda count, g=generator: int(torch.randint(0, count, (), generator=g)))  # type: ignore[misc]
            taken += answer(op, space(Draw(0), pick, 4)) is not None
        assert taken >= 8, op


def test_picks_say_shapes_and_nothing_else() -> None:
    """Two draws with one set of picks differ by what tensors hold; another batch by its size alone."""
    for op in OPS:
        pick = Pick(lambda count: 0)
        one = OPTIONS[op](Draw(1), pick, 2)
        two, three = OPTIONS[op](Draw(2), pick.again(), 2), OPTIONS[op](Draw(1), pick.again(), 3)
        assert [(t.shape, t.dtype) for t in tensors(one)] == [(t.shape, t.dtype) for t in tensors(two)], op
        assert any(not torch.equal(a, b) for a, b in zip(tensors(one), tensors(two))), op
        assert [(t.ndim, t.dtype) for t in tensors(one)] == [(t.ndim, t.dtype) for t in tensors(three)], op
