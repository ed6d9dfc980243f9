"""Tests that every strategy of every primitive equals the op run once for each member.

The tests cover, for every op of the registry: its samples, the kinds that its tensors may have, N = 1 and 3,
member-major and channel-packed memory, a known and an unknown batch size, and every strategy that applies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import (
    SIZED,
    UNDEFINED,
    WALKED,
    assert_equal,
    member,
    memories,
    outputs,
    put,
    run_all,
    runs,
    same_bits,
    tensors,
    wide,
)

from widepack.ir import ops, values
from widepack.ir.kinds import SIZES
from widepack.ir.torch_internals import schema_of
from widepack.ir.values import Shared, Stacked, Value
from widepack.kernels.library import DIFFERENTIABLE
from widepack.lowering.interpreter import applicable, once_a_member
from widepack.registry.registry import REGISTRY, Strategy, register
from widepack.registry.samples import SAMPLES, B, Draw, Sample, call, samples
from widepack.registry.writer import EagerWriter, put_shared
from widepack_artifacts.opset import OPS

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("op", WALKED)
def test_every_strategy_equals_the_op_run_once_for_each_member(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = values.known
    ran = set()
    for batch in ("known", "unknown"):
        if batch == "unknown":
            monkeypatch.setattr(values, "known", lambda size: None if size == B else known(size))
        for members in (1, 3) if batch == "known" else (3,):
            of_calls: list[Sample] = []
            for where, result, calls in run_all(op, members):
                ran.add(where.rpartition(" ")[2])
                if calls is not of_calls:  # all strategies have the same calls
                    of_calls, alone = calls, [member(op, sample) for sample in calls]
                    drawn = not ops.pure(op, *calls[0])
                for i, (got, expected) in enumerate(zip(outputs(result, members), alone)):
                    assert_equal(op, got, expected, f"{where}, {batch} batch, member {i}", drawn=drawn)
    assert ran - {"sequential"} == set(REGISTRY[op].strategies), (
        f"{op}: no sample reaches the strategies {sorted(set(REGISTRY[op].strategies) - ran)}"
    )


class Recording(EagerWriter):
    """Records which ops were called."""

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        self.called = {*getattr(self, "called", ()), op}
        return super().run(op, args, kwargs)


@pytest.mark.parametrize(
    "op",
    [f"aten.{n}" for n in ("linear.default", "conv2d.default", "lstm.input", "gru.input", "rnn_tanh.input")],
)
def test_a_strategy_over_ops_of_widepack_has_derivative_false(op: str) -> None:
    calls_widepack: dict[str, set[bool]] = {}
    for _, many, kinds in runs(op, 2):
        args, kwargs, _ = wide(many, kinds, "major")
        asking = EagerWriter(2)
        asking.op = op
        for s in applicable(asking, op, args, kwargs):
            w = Recording(2)
            w.op = op
            s.rule(w, *args, **kwargs)
            calls_widepack.setdefault(s.name, set()).add(
                any(name.startswith("widepack.") and name not in DIFFERENTIABLE for name in w.called)
            )
    assert calls_widepack == {s.name: {not s.derivative} for s in REGISTRY[op].strategies.values()}


def refuses(op: str, sample: Sample) -> bool:
    try:
        member(op, sample)
    except RuntimeError:
        return True
    return False


def seeded(s: Strategy, w: EagerWriter, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a strategy. It draws the same random numbers in every call."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes 2 ms: it notes its call for GPUs
    return s.rule(w, *args, **kwargs)


@pytest.mark.parametrize("op", WALKED)
def test_nan_in_one_member_changes_no_bit_of_another(op: str) -> None:
    for where, many, kinds in runs(op, 3):
        for memory in memories(many):
            (args, kwargs, _), (args_nan, kwargs_nan, calls) = (
                wide(many, kinds, memory, nan) for nan in (None, 1)
            )
            w = EagerWriter(3)
            w.op = op
            if refuses(op, calls[1]):  # the member raises an error, so the strategy does too
                for s in applicable(w, op, args, kwargs):
                    with pytest.raises(RuntimeError):
                        s.rule(w, *args_nan, **kwargs_nan)
                continue
            for s in applicable(w, op, args, kwargs):
                clean, dirty = (
                    outputs(seeded(s, w, *a, **k), 3) for a, k in ((args, kwargs), (args_nan, kwargs_nan))
                )
                for i in (0, 2):
                    for a, b in zip(tensors([clean[i]]), tensors([dirty[i]])):
                        assert op in UNDEFINED or same_bits(a, b), (
                            f"{where}, {memory}, strategy {s.name}: NaN in member 1 reached member {i}"
                        )


ATTENTION = "aten.scaled_dot_product_attention.default"


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("op", [ATTENTION, *(op for op in WALKED if op not in (ATTENTION, *UNDEFINED))])
def test_nan_in_one_number_of_an_input_is_where_the_member_has_it(op: str) -> None:
    """torch has several kernels for an op, and not all of them answer NaN for the same numbers."""
    for where, many, kinds in runs(op, 3):
        first = next(iter(tensors(many[1])), None)
        if first is None or not kinds[0] or not first.is_floating_point() or not ops.pure(op, *many[0]):
            continue
        ill = first.clone(memory_format=torch.contiguous_format)
        ill.view(-1)[:1] = float("nan")
        one = put(many[1], iter([ill, *list(tensors(many[1]))[1:]]))
        args, kwargs, calls = wide([many[0], one, many[2]], kinds, "major")
        if refuses(op, calls[1]):
            continue
        alone = list(tensors([member(op, calls[1])]))
        w = EagerWriter(3)
        w.op = op
        for s in applicable(w, op, args, kwargs):
            if s.name == "split":  # it reads a base and factors
                continue
            found = tensors([outputs(s.rule(w, *args, **kwargs), 3)[1]])
            for a, b in zip(found, alone):
                assert torch.equal(a.isnan(), b.isnan()), f"{where}, strategy {s.name}"


@pytest.mark.parametrize("bad", [-1, 7, 20])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_id_that_the_member_refuses_is_refused_by_every_strategy(
    bad: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    op, ran = "aten.embedding.default", set()
    for _, many, kinds in runs(op, 3):
        sample = [call(s[0][0], torch.zeros(shape, dtype=dtype)) for s in many]
        sample[0][0][1].view(-1)[-1:] = bad
        args, kwargs, calls = wide(sample, kinds, "major")
        with pytest.raises(IndexError):
            member(op, calls[0])
        w = EagerWriter(3)
        w.op = op
        for s in applicable(w, op, args, kwargs):
            ran.add(s.name)
            with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of .*(range|bounds)"):
                s.rule(w, *args, **kwargs)
    assert ran == set(REGISTRY[op].strategies)


@pytest.mark.parametrize(("rows", "width", "strategy"), [(4, 4, "gather"), (1024, 4, "flat_index")])
def test_only_large_lookups_in_many_tables_use_a_flat_index(rows: int, width: int, strategy: str) -> None:
    """The limit was measured on a CPU only."""
    table, ids = torch.randn(3, 7, width), torch.randint(0, 7, (3, rows))
    args = Stacked(Value(None, table)), Stacked(Value(None, ids))
    w = EagerWriter(3)
    first = applicable(w, "aten.embedding.default", args, {})[0]
    assert first.name == strategy
    assert torch.equal(first.rule(w, *args).value.fake, torch.stack([t[i] for t, i in zip(table, ids)]))
    assert applicable(EagerWriter(3, "cuda"), "aten.embedding.default", args, {})[0].name == "gather"


def test_an_index_that_the_member_refuses_is_refused() -> None:
    x = torch.randn(3, 4, 2)
    for ids in (torch.tensor([[0], [4], [0]]), torch.tensor([[0], [-5], [0]])):
        for kinds in ((True, True), (False, True), (True, False)):
            columns = [
                Stacked(Value(None, t)) if k else Shared(Value(None, t[1])) for t, k in zip((x, ids), kinds)
            ]
            w = EagerWriter(3)
            w.op = "aten.index.Tensor"
            for s in applicable(w, w.op, (columns[0], [columns[1]]), {}):
                with pytest.raises(IndexError, match="out of bounds"):
                    s.rule(w, columns[0], [columns[1]])


def test_every_op_without_a_strategy_is_listed_with_a_reason() -> None:
    found = once_a_member()
    assert "" not in found, f"ops without a strategy, another name, or a reason in their record: {found['']}"
    listed = [op for ops in found.values() for op in ops]
    assert len(listed) > 50 and not set(listed) & set(REGISTRY) and set(listed) <= set(OPS)


def test_every_op_has_samples_whose_draws_differ_only_in_numbers() -> None:
    assert sorted(set(REGISTRY) - set(SAMPLES)) == [], "ops without samples"
    assert sorted(set(SAMPLES) - set(REGISTRY)) == [], "samples of ops that are not registered"
    for op, make in SAMPLES.items():
        one, two = make(Draw(1)), make(Draw(2))
        assert [literals(s) for s in one] == [literals(s) for s in two], op
        assert all(tensors(s) for s in one) or op in SIZED, op


def literals(arg: Any) -> Any:
    """Replaces tensors by shape and dtype, and NaN by text, because NaN is not equal to itself."""
    if isinstance(arg, torch.Tensor):
        return list(arg.shape), str(arg.dtype)
    if isinstance(arg, (list, tuple)):
        return [literals(a) for a in arg]
    return {k: literals(a) for k, a in arg.items()} if isinstance(arg, dict) else repr(arg)


def test_every_registered_op_is_allowed() -> None:
    assert sorted(set(REGISTRY) - OPS) == []


@pytest.mark.parametrize("op", sorted(OPS - {"loop"}))
def test_every_allowed_op_exists_and_is_functional(op: str) -> None:
    function = ops.resolve(op)
    if not isinstance(function, torch._ops.OpOverload):
        assert op in ops.PYTHON
        return
    assert not schema_of(function).is_mutable
    assert ops.name_of(function) == op


def test_a_second_registration_is_refused_with_both_files() -> None:
    with pytest.raises(
        ValueError, match=r"'bmm' is registered twice, in .*linear\.py and in .*test_oracle\.py"
    ):
        register("linear", "bmm", lambda w, x: x, family="linear")
    with pytest.raises(
        ValueError, match=r"samples are registered twice, in .*linear\.py and in .*test_oracle\.py"
    ):
        samples("linear")(lambda draw: [])


def test_sizes_of_stacked_values_are_shared() -> None:
    """The rules make a Shared result where `kinds` expects it, although they read a Stacked value."""
    for op in sorted(SIZES & set(REGISTRY)):
        for where, result, _ in run_all(op, 3):
            assert isinstance(result, Shared), where


def test_shared_arguments_run_once() -> None:
    w = EagerWriter(3)
    x = Shared(Value(None, torch.ones(2)))
    assert put_shared([x, (x, 1)])[1][0] is x.value
    assert isinstance(w.shared(w.call("add.Tensor", x.value, 1)), Shared)
