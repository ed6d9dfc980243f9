"""Checks every strategy over every option of its layer: kinds of arguments, dtypes, N, batch sizes down to 0.

A strategy is compared with the op that runs once for each member in the same dtype. Its error against float64
may be four times the error of the members, plus a few ulp of the largest number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from option_spaces import OPTIONS, Pick, arguments
from oracle import EXACT, SEQUENTIAL, bits, member, outputs, packed, put, tensors

from widepack.ir.values import Shared, Stacked, Value
from widepack.lowering.interpreter import applicable
from widepack.planning.split_plans import SPLIT
from widepack.registry.registry import REGISTRY
from widepack.registry.samples import Draw, Sample, call
from widepack.registry.writer import EagerWriter

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MEMBERS = (1, 2, 5)
BATCHES = (0, 1, 4)
EVERY = list(itertools.product(DTYPES, MEMBERS, BATCHES))
UNTYPED = {"aten.native_dropout.default"}  # the mask of an empty tensor has another dtype in torch
ULPS = 32  # the bound in float64, in ulp of the largest number: no reference is more exact
SUMS = (
    "aten.bilinear.default",
    "aten.linear.default",
)  # sums of products: `sum_bound` is their bound in float64
FEW = 8  # in other dtypes: the ulp that are added to four times the members' errors

OPS = sorted(OPTIONS)
DROPS = [op for op in OPS if REGISTRY[op].family == "dropout"]
DRAWS = {"independent", "shared"}  # strategies of dropout that draw
TRIES = 60  # draws of options; one of them must reach each strategy
Memory = Callable[[torch.Tensor], torch.Tensor]  # puts a tensor into another memory order
pytestmark = pytest.mark.filterwarnings("error")


def kinds(count: int) -> list[tuple[bool, ...]]:
    """Returns the combinations of Stacked arguments: all, each alone, all but one, every pair."""
    every = tuple(range(count))
    chosen = [
        set(every),
        *({i} for i in every),
        *(set(every) - {i} for i in every),
        *map(set, itertools.combinations(every, 2)),
    ]
    return list(dict.fromkeys(tuple(i in c for i in every) for c in chosen if c))


def cast(sample: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a sample to a dtype."""
    return put(sample, iter([t.to(dtype) if t.is_floating_point() else t for t in tensors(sample)]))


def arranged(many: list[Sample], which: tuple[bool, ...], memory: Memory) -> tuple[Any, Any, list[Sample]]:
    """Returns arguments for a strategy, and the arguments of each member."""
    stacked = [k for k, a in zip(which, arguments(many[0])) for _ in tensors(a)]
    columns: list[Shared | Stacked] = []
    by_argument: list[list[torch.Tensor]] = []
    for s, parts in zip(stacked, zip(*(tensors(m) for m in many))):
        columns.append(
            Stacked(Value(None, memory(torch.stack(parts)))) if s else Shared(Value(None, parts[0]))
        )
        by_argument.append(list(parts) if s else [parts[0]] * len(many))
    args, kwargs = put(many[0], iter(columns))
    return args, kwargs, [put(many[0], iter([o[i] for o in by_argument])) for i in range(len(many))]


def answer(op: str, sample: Sample) -> list[torch.Tensor] | None:
    """Returns the member's results; None if the op refuses the arguments."""
    try:
        return tensors([member(op, sample)])
    except (RuntimeError, IndexError, ValueError):
        return None


def largest(many: Iterable[torch.Tensor]) -> float:
    """Returns the largest finite number; 0 if there is none."""
    return max(
        (
            float(t.double().abs().nan_to_num(nan=0, posinf=0).max())
            for t in many
            if t.is_floating_point() and t.numel()
        ),
        default=0.0,
    )


def sum_bound(op: str, calls: Iterable[Sample]) -> float:
    """Returns how far apart two results in float64 may be, for an op that sums products: `SUMS`.

    An output is a sum of t products of an element of the weight with one of each input, and a bias; t is the
    number of the weight's elements for one output. In whatever order a strategy computes, a product takes
    part in at most t + 2 roundings: two of its own factors, t - 1 of additions, and that of the bias. Each
    changes it by at most eps/2 of itself. So a computed sum is off by at most (t + 2) * eps/2 * M, where M is
    the sum of the absolute values of the products and the bias: the op over absolute values. Two computed
    sums differ by at most twice that. The largest result is no measure of it: a single output may be the
    small difference of large products.
    """
    bounds = [0.0]
    for args, kwargs in calls:
        weight = args[2] if op == "aten.bilinear.default" else args[1]
        terms = weight[0].numel()
        sums = member(op, put((args, kwargs), iter([t.abs() for t in tensors((args, kwargs))])))
        bounds.append((terms + 2) * torch.finfo(torch.float64).eps * largest([sums]))
    return max(bounds)


def check(
    op: str,
    calls: list[Sample],
    got: list[Any],
    answers: list[list[torch.Tensor]],
    truth: list[list[torch.Tensor]],
    dtype: torch.dtype,
    where: str,
) -> None:
    """Compares a strategy with the members. A small output must be as exact as the large ones.

    calls: the arguments of each member. got: the results of the strategy by member.
    """
    in_float64 = sum_bound(op, calls) if op in SUMS and dtype == torch.float64 else None
    eps, size = torch.finfo(dtype).eps, largest(t for row in truth for t in row)
    for number in range(len(answers[0])):
        member_answers, want = [o[number] for o in answers], [t[number] for t in truth]
        off = largest(m.double() - t for m, t in zip(member_answers, want) if m.is_floating_point())
        for i, (outs, m, t) in enumerate(zip(got, member_answers, want)):
            parts = list(outs) if isinstance(outs, (list, tuple)) else [outs]
            g = parts[number]
            if g is None or (
                m.numel() == 0 and op in UNTYPED
            ):  # no node reads a result that a strategy omits
                continue
            message = f"{where}, output {number}, member {i}"
            assert g.shape == m.shape and g.dtype == m.dtype, (
                f"{message}: {g.dtype}{list(g.shape)}, the member's is {m.dtype}{list(m.shape)}"
            )
            if REGISTRY[op].family in EXACT or not m.is_floating_point():
                assert torch.equal(bits(g), bits(m)), f"{message}: differs from the member's answer"
                continue
            assert torch.equal(torch.isfinite(g), torch.isfinite(m)), (
                f"{message}: other numbers are not finite"
            )
            finite = torch.isfinite(m)
            bound = ULPS * eps * size if dtype == torch.float64 else 4 * off + FEW * eps * size
            bound = bound if in_float64 is None else in_float64
            error = largest([(g.double() - (m if dtype == torch.float64 else t))[finite]])
            assert error <= bound, (
                f"{message}: off by {error:.3g}, the bound is {bound:.3g} "
                f"(the members' error {off:.3g}, the largest number {size:.3g})"
            )


def named(op: str) -> set[str]:
    """Returns the strategies that the grid must reach.

    `split` needs a weight with factors, which the grid does not draw (test_weight_factors.py). `blocks` needs
    longer sequences than the grid draws (test_oracle.py, tests/kernels/test_masked.py). `trained` of an LSTM
    is not for float32 (test_oracle.py, tests/fused/test_recurrent_training.py).
    """
    others = {SPLIT, "blocks"} | ({"trained"} if op == "aten.lstm.input" else set())
    return set(REGISTRY[op].strategies) - (DRAWS if op in DROPS else set()) - others


def run(
    op: str,
    pick: Pick,
    dtype: torch.dtype,
    members: int,
    batch: int,
    memory: Memory,
    among: set[str] | None = None,
) -> set[str]:
    """Compares each strategy that applies with the members, and returns the names of the compared strategies.

    among: the strategies to compare; by default all.
    """
    reached: set[str] = set()
    many = [cast(OPTIONS[op](Draw(100 + i), pick.again(), batch), dtype) for i in range(members)]
    literals = put(many[0], iter([str(list(t.shape)) for t in tensors(many[0])]))
    for which in kinds(len(arguments(many[0]))):
        args, kwargs, calls = arranged(many, which, memory)
        where = f"{op}{literals[0]}{literals[1] or ''}, {dtype}, N={members}, batch {batch}, "
        where += f"{memory.__name__}, Stacked: {which}"
        w = EagerWriter(members)
        w.op = op
        draws = REGISTRY[op].family in ("dropout", "random") if op in REGISTRY else False
        chosen = [s for s in applicable(w, op, args, kwargs) if not (s.on_request and draws)] or [SEQUENTIAL]
        chosen = [s for s in chosen if among is None or s.name in among]
        maybe = [answer(op, s) for s in calls] if chosen else []
        answers = [a for a in maybe if a is not None]
        if len(answers) < len(maybe):
            continue
        truth = [a for s in calls if (a := answer(op, cast(s, torch.float64))) is not None]
        assert not chosen or len(truth) == len(calls)
        for s in chosen:
            check(
                op,
                calls,
                outputs(s.rule(w, *args, **kwargs), members),
                answers,
                truth,
                dtype,
                f"{where}, strategy {s.name}",
            )
            reached.add(s.name)
    return reached


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


def memories(x: torch.Tensor) -> torch.Tensor:
    return packed(x) if x.ndim >= 3 else x


FEW_DRAWS = settings(
    max_examples=2, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
MANY_DRAWS = settings(FEW_DRAWS, max_examples=50)


@pytest.mark.parametrize("op", OPS)
@FEW_DRAWS
@given(data=st.data())
def test_strategies_answer_as_the_members_for_random_options(op: str, data: st.DataObject) -> None:
    pick = Pick(lambda count: data.draw(st.integers(0, count - 1)))
    OPTIONS[op](Draw(0), pick, 1)
    dtype, members, batch = data.draw(st.sampled_from(EVERY))
    run(op, pick, dtype, members, batch, data.draw(st.sampled_from([plain, memories])))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_strategies_answer_as_the_members_for_many_options(op: str) -> None:
    """The test covers the complete grid. The draws reach every strategy."""
    reached: set[str] = set()

    @MANY_DRAWS
    @given(data=st.data())
    def walk(data: st.DataObject) -> None:
        pick = Pick(lambda count: data.draw(st.integers(0, count - 1)))
        OPTIONS[op](Draw(0), pick, 1)
        for dtype, members, batch in EVERY:
            reached.update(run(op, pick, dtype, members, batch, memories if (members + batch) % 2 else plain))

    walk()
    assert reached >= named(op)


def seeded(seed: int) -> Callable[[], Pick]:
    """Returns a maker of random picks, which differ in each call."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: Pick(lambda count: int(torch.randint(0, count, (), generator=generator)))


@pytest.mark.parametrize("op", OPS)
def test_every_strategy_is_reached(op: str) -> None:
    """The test also compares the strategy, so that a rule that never applies fails without the long draws."""
    picks, missing = seeded(0), named(op)
    for number in range(TRIES):
        pick = picks()
        OPTIONS[op](Draw(0), pick, 1)
        missing -= run(op, pick, torch.float32, 2, 4, memories if number % 2 else plain, missing)
        if not missing:
            return
    raise AssertionError(f"{op}: no draw reaches the strategies {sorted(missing)}")


def test_the_bound_of_a_sum_is_of_its_products() -> None:
    """One output of four products that cancel: it is smaller than they are, and its error is not."""
    op, choices = "aten.bilinear.default", [0, 1, 0, 0, 1]

    def chosen() -> Pick:
        left = iter(choices)
        pick = Pick(lambda count: next(left))
        OPTIONS[op](Draw(0), pick, 1)
        return pick

    (sample,) = [cast(OPTIONS[op](Draw(100), chosen().again(), 0), torch.float64)]
    (right,) = tensors([member(op, sample)])
    assert right.numel() == 1
    assert ULPS * torch.finfo(torch.float64).eps * abs(float(right)) < sum_bound(op, [sample]) < 1e-13
    assert "outer" in run(op, chosen(), torch.float64, 1, 0, memories)


SELU = 1.7580993408473766  # alpha dropout replaces a number by -SELU, before scale and shift


def kept_and_gone(op: str, x: torch.Tensor, p: float) -> tuple[torch.Tensor, float]:
    """Returns the result for each number of x if it is kept, and the result for a dropped number."""
    if "alpha" not in op:
        return x / (1 - p), 0.0
    scale = ((SELU**2 * p + 1) * (1 - p)) ** -0.5
    return scale * x + scale * SELU * p, -scale * SELU * (1 - p)


def drops(op: str, y: torch.Tensor, x: torch.Tensor, p: float, where: str) -> torch.Tensor:
    """Checks the numbers of y `[N, B, C, *]`, and returns which numbers or channels were dropped."""
    kept, gone = kept_and_gone(op, x.double(), p)
    dropped = (y.double() - gone).abs() < (y.double() - kept).abs()
    off = largest([y.double() - torch.where(dropped, gone, kept)])
    assert off <= 4 * torch.finfo(y.dtype).eps * max(largest([kept]), abs(gone)), f"{where}: off by {off:.3g}"
    assert "alpha" in op or not y[dropped].any(), f"{where}: a dropped number is not zero"
    if "feature" not in op or y.ndim == 3:
        return dropped
    channels = dropped.flatten(3)
    assert torch.equal(channels.all(3), channels.any(3)), f"{where}: a channel is dropped in part"
    return channels.all(3)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("op", DROPS)
def test_random_strategies_are_dropout_of_each_member(op: str) -> None:
    """Numbers are 0 or `x / (1 - p)` (alpha: two linear functions). `shared` has one mask, `independent` has
    N.
    """
    reached: set[str] = set()
    shapes, chances, memory_of = ((64,), (16, 3), (16, 3, 2)), (0.25, 0.5), (plain, memories)
    for number, ((dtype, members, batch), shape, p, which, memory) in enumerate(
        itertools.product(EVERY, shapes, chances, (True, False), memory_of)
    ):
        many = [cast(call(Draw(i).uniform(0.5, 2, batch, *shape), p, True), dtype) for i in range(members)]
        args, kwargs, calls = arranged(many, (which,), memory)
        x = torch.stack([a[0] for a, _ in calls])
        w = EagerWriter(members)
        w.op = op
        for s in applicable(w, op, args, kwargs):
            kind = "Stacked" if which else "Shared"
            where = f"{op}, p={p}, {dtype}{list(x.shape)}, {kind}, {memory.__name__}, strategy {s.name}"
            torch.default_generator.manual_seed(number)  # torch.manual_seed takes 2 ms
            result = s.rule(w, *args, **kwargs)
            y, mask = (
                (v.value.fake for v in result) if isinstance(result, tuple) else (result.value.fake, None)
            )
            assert y.shape == x.shape and y.dtype == dtype, f"{where}: {y.dtype}{list(y.shape)}"
            dropped = drops(op, y, x, p, where)
            assert mask is None or not batch or (mask.dtype == torch.bool and torch.equal(mask, ~dropped)), (
                f"{where}: the mask is another one"
            )
            drawn = dropped[:1] if s.name == "shared" else dropped
            if batch:
                bound = 5 * (p * (1 - p) / drawn.numel()) ** 0.5
                assert abs(float(drawn.double().mean()) - p) <= bound, (
                    f"{where}: {drawn.double().mean():.3f} are dropped"
                )
            for one, other in itertools.pairwise(dropped):
                assert torch.equal(one, other) == (s.name == "shared" or not batch), (
                    f"{where}: members' masks"
                )
            reached.add(s.name)
    assert reached == DRAWS


def test_every_option_space_makes_calls_that_members_accept() -> None:
    """This must be true at most batch sizes, because options that every member refuses prove nothing."""
    for op, space in OPTIONS.items():
        picks, taken = seeded(0), 0
        for _ in range(10):
            taken += answer(op, space(Draw(0), picks(), 4)) is not None
        assert taken >= 8, op


def test_picks_determine_shapes_only() -> None:
    """Two draws with the same picks differ in numbers only. Another batch differs in its size only."""
    for op in OPS:
        pick = Pick(lambda count: 0)
        one = OPTIONS[op](Draw(1), pick, 2)
        two, three = OPTIONS[op](Draw(2), pick.again(), 2), OPTIONS[op](Draw(1), pick.again(), 3)
        assert [(t.shape, t.dtype) for t in tensors(one)] == [(t.shape, t.dtype) for t in tensors(two)], op
        assert any(not torch.equal(a, b) for a, b in zip(tensors(one), tensors(two))), op
        assert [(t.ndim, t.dtype) for t in tensors(one)] == [(t.ndim, t.dtype) for t in tensors(three)], op
