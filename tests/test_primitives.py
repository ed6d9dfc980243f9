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
from widepack.once_a_member import ONCE_A_MEMBER, unlisted
from widepack.registry import REGISTRY, Strategy, always, register
from widepack.samples_of_ops import SAMPLES, B, Draw, Sample, call, samples
from widepack.values import Shared, Stacked, Value
from widepack.writer import EagerWriter
from widepack_artifacts.opset import OPS

EXACT = {"identity", "shape", "index", "embedding", "pad"}  # families that move numbers and never compute with them
ULPS = 32  # of the answer's largest number: sums of a few dozen terms in another order, vectorised and scalar code of one function
UNDEFINED = {"aten.empty_like.default", "aten.new_empty.default"}  # what they hold means nothing: shape and dtype are compared
COMBINATIONS = 7
VIEWS = {
    "aten.view.default",
    "aten._unsafe_view.default",
}  # simplify.py makes `reshape` of them: once a member they would ask for memory of their own
SEQUENTIAL = Strategy("sequential", lambda w, *args, **kwargs: sequential(w, w.op, args, kwargs), always, "once a member")

pytestmark = pytest.mark.filterwarnings("error")


def tensors(arg: Any) -> list[torch.Tensor]:
    """The tensors among arguments, in order."""
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [t for a in arg for t in tensors(a)]
    return [t for a in arg.values() for t in tensors(a)] if isinstance(arg, dict) else []


SIZED = {op for op in SAMPLES if not any(tensors(s) for s in SAMPLES[op](Draw(0)))}  # they draw, and take sizes alone (test_dropout.py)
WALKED = sorted(set(REGISTRY) - SIZED)


def put(arg: Any, to: Iterator[Any]) -> Any:
    """Arguments with their tensors replaced by the next of `to`."""
    if isinstance(arg, torch.Tensor):
        return next(to)
    if isinstance(arg, (list, tuple)):
        return type(arg)(put(a, to) for a in arg)
    return {k: put(a, to) for k, a in arg.items()} if isinstance(arg, dict) else arg


def combinations(count: int, draws: bool = False) -> list[tuple[bool, ...]]:
    """Which tensors are Stacked: at least one, all first, then one alone each, then the others. draws: or none, which of other ops runs once."""
    every = [c for c in itertools.product((True, False), repeat=count) if any(c) or draws]
    return sorted(every, key=lambda c: (not all(c), sum(c) != 1))[:COMBINATIONS]


def packed(x: torch.Tensor) -> torch.Tensor:
    """`[N, B, C, ...]` over memory `[B, N*C, ...]`."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def wide(many: list[Sample], kinds: tuple[bool, ...], memory: str, nan: int | None = None) -> tuple[Any, Any, list[Sample]]:
    """Arguments for a rule, and each member's own arguments.

    memory: member-major ("major") or channel-packed ("packed").
    nan: the member whose floats are all NaN.
    """
    columns: list[Shared | Stacked] = []
    own: list[list[torch.Tensor]] = []
    for stacked, parts in zip(kinds, zip(*(tensors(s) for s in many))):
        if not stacked:
            columns.append(Shared(Value(None, parts[0])))
            own.append([parts[0]] * len(many))
            continue
        if nan is not None and (parts[0].is_floating_point() or parts[0].is_complex()):
            parts = tuple(torch.full_like(p, float("nan")) if i == nan else p for i, p in enumerate(parts))
        x = torch.stack(parts)
        columns.append(Stacked(Value(None, packed(x) if memory == "packed" and x.ndim >= 3 else x)))
        own.append(list(parts))
    args, kwargs = put(many[0], iter(columns))
    return args, kwargs, [put(many[0], iter([o[i] for o in own])) for i in range(len(many))]


def outputs(result: Any, members: int) -> list[Any]:
    """A rule's result as each member's outputs; None for what the rule leaves out."""
    if isinstance(result, (tuple, list)):
        return [list(row) for row in zip(*(outputs(r, members) for r in result))]
    if result is None:
        return [None] * members
    held = result.value.held if isinstance(result.value, Value) else result.value
    return list(held.unbind(0)) if isinstance(result, Stacked) else [held] * members


def assert_equal(op: str, got: Any, want: Any, where: str, drawn: bool = False) -> None:
    """Shapes and dtypes are equal; numbers too, but for rounding where the op computes with floats. drawn: of random numbers: what they are stands in test_dropout.py."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), f"{where}: {len(got)} outputs, the member has {len(want)}"
        for g, w in zip(got, want):
            assert_equal(op, g, w, where, drawn)
    elif not isinstance(want, torch.Tensor):
        assert got == want, f"{where}: {got} is not {want}"
    elif got is not None:
        assert got.shape == want.shape, f"{where}: shape {list(got.shape)}, the member's is {list(want.shape)}"
        assert got.dtype == want.dtype, f"{where}: {got.dtype}, the member's is {want.dtype}"
        if op in UNDEFINED or drawn:
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
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        return torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x).contiguous().view(torch.uint8) if x.ndim else bits(x.reshape(1))
    return x


def member(op: str, sample: Sample) -> Any:
    args, kwargs = sample
    return ops.resolve(op)(*args, **kwargs)


def runs(op: str, members: int) -> Iterator[tuple[str, list[Sample], tuple[bool, ...]]]:
    """Every sample of an op with every combination of kinds."""
    drawn = [SAMPLES[op](Draw(17 + i)) for i in range(members)]
    for number, many in enumerate(zip(*drawn)):
        for kinds in combinations(len(tensors(many[0])), not ops.pure(op, *many[0])):
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
            last = [SEQUENTIAL] if op not in SIZES and (op not in VIEWS or memory == "major") else []
            for s in (*applicable(w, op, args, kwargs), *last):
                yield f"{where}, {memory}, strategy {s.name}", s.rule(w, *args, **kwargs), own


@pytest.mark.parametrize("op", WALKED)
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
                    assert_equal(op, got, member(op, sample), f"{where}, {batch} batch, member {i}", drawn=not ops.pure(op, *sample))
    assert ran - {"sequential"} == set(REGISTRY[op].strategies), (
        f"{op}: no sample reaches the strategies {sorted(set(REGISTRY[op].strategies) - ran)}"
    )


class Recording(EagerWriter):
    """Knows which ops were called."""

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        self.called = {*getattr(self, "called", ()), op}
        return super().run(op, args, kwargs)


@pytest.mark.parametrize("op", [f"aten.{n}" for n in ("linear.default", "conv2d.default", "lstm.input", "gru.input", "rnn_tanh.input")])
def test_a_strategy_over_own_ops_says_that_it_has_no_derivative(op: str) -> None:
    own: dict[str, set[bool]] = {}
    for _, many, kinds in runs(op, 2):
        args, kwargs, _ = wide(many, kinds, "major")
        asking = EagerWriter(2)
        asking.op = op
        for s in applicable(asking, op, args, kwargs):
            w = Recording(2)
            w.op = op
            s.rule(w, *args, **kwargs)
            own.setdefault(s.name, set()).add(any(name.startswith("widepack.") for name in w.called))
    assert own == {s.name: {not s.derivative} for s in REGISTRY[op].strategies.values()}


def refuses(op: str, sample: Sample) -> bool:
    try:
        member(op, sample)
    except RuntimeError:
        return True
    return False


def seeded(s: Strategy, w: EagerWriter, *args: Any, **kwargs: Any) -> Any:
    """A strategy's result; what it draws is the same every time."""
    torch.manual_seed(0)
    return s.rule(w, *args, **kwargs)


@pytest.mark.parametrize("op", WALKED)
def test_nan_in_one_member_changes_no_bit_of_another(op: str) -> None:
    for where, many, kinds in runs(op, 3):
        for memory in memories(many):
            (args, kwargs, _), (args_nan, kwargs_nan, own) = (wide(many, kinds, memory, nan) for nan in (None, 1))
            w = EagerWriter(3)
            w.op = op
            if refuses(op, own[1]):  # the member alone answers with an error: so do all together
                for s in applicable(w, op, args, kwargs):
                    with pytest.raises(RuntimeError):
                        s.rule(w, *args_nan, **kwargs_nan)
                continue
            for s in applicable(w, op, args, kwargs):
                clean, dirty = (outputs(seeded(s, w, *a, **k), 3) for a, k in ((args, kwargs), (args_nan, kwargs_nan)))
                for i in (0, 2):
                    for a, b in zip(tensors([clean[i]]), tensors([dirty[i]])):
                        assert op in UNDEFINED or (a.shape == b.shape and torch.equal(bits(a), bits(b))), (
                            f"{where}, {memory}, strategy {s.name}: NaN in member 1 reached member {i}"
                        )


@pytest.mark.parametrize("bad", [-1, 7, 20])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_id_that_the_member_refuses_is_refused_by_every_strategy(bad: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    op, ran = "aten.embedding.default", set()
    for _, many, kinds in runs(op, 3):
        sample = [call(s[0][0], torch.zeros(shape, dtype=dtype)) for s in many]
        sample[0][0][1].view(-1)[-1:] = bad
        args, kwargs, own = wide(sample, kinds, "major")
        with pytest.raises(IndexError):
            member(op, own[0])
        w = EagerWriter(3)
        w.op = op
        for s in applicable(w, op, args, kwargs):
            ran.add(s.name)
            with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of .*(range|bounds)"):
                s.rule(w, *args, **kwargs)
    assert ran == set(REGISTRY[op].strategies)


def test_an_index_that_the_member_refuses_is_refused() -> None:
    x = torch.randn(3, 4, 2)
    for ids in (torch.tensor([[0], [4], [0]]), torch.tensor([[0], [-5], [0]])):
        for kinds in ((True, True), (False, True), (True, False)):
            columns = [Stacked(Value(None, t)) if k else Shared(Value(None, t[1])) for t, k in zip((x, ids), kinds)]
            w = EagerWriter(3)
            w.op = "aten.index.Tensor"
            for s in applicable(w, w.op, (columns[0], [columns[1]]), {}):
                with pytest.raises(IndexError, match="out of bounds"):
                    s.rule(w, columns[0], [columns[1]])


def test_no_op_runs_once_a_member_without_a_word() -> None:
    assert unlisted() == set(), "neither a strategy, nor another name, nor a reason in once_a_member.py"
    listed = [op for ops in ONCE_A_MEMBER.values() for op in ops]
    assert len(set(listed)) == len(listed) and not set(listed) & set(REGISTRY) and set(listed) <= set(OPS)


def test_every_op_has_samples_and_samples_only_differ_by_what_tensors_hold() -> None:
    assert sorted(set(REGISTRY) - set(SAMPLES)) == [], "ops without samples"
    assert sorted(set(SAMPLES) - set(REGISTRY)) == [], "samples of ops that are not registered"
    for op, make in SAMPLES.items():
        one, two = make(Draw(1)), make(Draw(2))
        assert [literals(s) for s in one] == [literals(s) for s in two], op
        assert all(tensors(s) for s in one) or op in SIZED, op


def literals(arg: Any) -> Any:
    """Arguments with tensors replaced by shape and dtype; NaN as text, since it is not equal to itself."""
    if isinstance(arg, torch.Tensor):
        return list(arg.shape), str(arg.dtype)
    if isinstance(arg, (list, tuple)):
        return [literals(a) for a in arg]
    return {k: literals(a) for k, a in arg.items()} if isinstance(arg, dict) else repr(arg)


def test_every_registered_op_is_allowed() -> None:
    assert sorted(set(REGISTRY) - OPS) == []


@pytest.mark.parametrize("op", sorted(OPS - {"loop"}))
def test_every_allowed_op_exists_and_writes_to_nothing(op: str) -> None:
    made = ops.resolve(op)
    if not isinstance(made, torch._ops.OpOverload):
        assert op in ops.PYTHON
        return
    assert not made._schema.is_mutable
    assert ops.name_of(made) == op


def test_a_second_registration_is_refused_with_both_files() -> None:
    with pytest.raises(ValueError, match=r"'bmm' is registered twice, in .*linear\.py and in .*test_primitives\.py"):
        register("linear", "bmm", lambda w, x: x, family="linear")
    with pytest.raises(ValueError, match=r"samples are registered twice, in .*linear\.py and in .*test_primitives\.py"):
        samples("linear")(lambda draw: [])


def test_sizes_are_shared() -> None:
    """What `kinds` says is Shared though a Stacked value is read, the rules make Shared."""
    for op in sorted(SIZES & set(REGISTRY)):
        for where, result, _ in run_all(op, 3):
            assert isinstance(result, Shared), where


def test_shared_arguments_run_once() -> None:
    w = EagerWriter(3)
    x = Shared(Value(None, torch.ones(2)))
    assert shared([x, (x, 1)])[1][0] is x.value
    assert isinstance(w.shared(w.call("add.Tensor", x.value, 1)), Shared)
