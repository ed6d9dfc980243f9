"""Tests on a device that every strategy of every primitive equals the op run once for each member."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from oracle import (
    UNDEFINED,
    WALKED,
    assert_equal,
    bits,
    member,
    memories,
    outputs,
    run_all,
    runs,
    tensors,
    wide,
)

from widepack.ir import ops
from widepack.lowering.interpreter import applicable
from widepack.registry.registry import REGISTRY
from widepack.registry.samples import Sample
from widepack.registry.writer import EagerWriter

FAMILIES = sorted({REGISTRY[op].family for op in WALKED})
ABSENT = re.compile(
    r"not implemented|not supported|could not run|no kernel|only supported|unsupported|must be on the cpu",
    re.IGNORECASE,
)


def runs_alone(op: str, samples: list[Sample]) -> bool:
    """Returns whether the device has a kernel for the op and these dtypes. Every other error is raised."""
    try:
        for sample in samples:
            member(op, sample)
    except RuntimeError as error:  # NotImplementedError is one
        if not ABSENT.search(str(error)):
            raise
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_equals_the_op_run_once_for_each_member(
    family: str, device: str, record_property: Callable[[str, object], None]
) -> None:
    wrong: list[str] = []
    absent: set[str] = set()
    compared = 0
    for op in (op for op in WALKED if REGISTRY[op].family == family):
        for members in (1, 3):
            try:
                for _, many, _ in runs(op, members, device):
                    if not runs_alone(op, many):
                        absent.add(op)
                if op in absent:
                    continue
                for where, result, calls in run_all(op, members, device):
                    for i, (got, sample) in enumerate(zip(outputs(result, members), calls)):
                        assert_equal(
                            op,
                            got,
                            member(op, sample),
                            f"{where}, member {i}",
                            drawn=not ops.pure(op, *sample),
                        )
                        compared += 1
            except Exception as error:  # noqa: BLE001  # the test reports all errors, not only the first
                wrong.append(f"{op}, N={members}: {type(error).__name__}: {str(error)[:300]}")
    record_property("compared", compared)
    record_property("absent", sorted(absent))
    assert compared or absent
    assert not wrong, "\n".join([f"{len(wrong)} wrong of {compared} compared:", *wrong])


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_in_one_member_changes_no_bit_of_another(family: str, device: str) -> None:
    leaks: list[str] = []
    for op in (op for op in WALKED if REGISTRY[op].family == family and op not in UNDEFINED):
        for where, many, kinds in runs(op, 3, device):
            for memory in memories(many):
                (args, kwargs, clean_calls), (args_nan, kwargs_nan, calls) = (
                    wide(many, kinds, memory, nan) for nan in (None, 1)
                )
                try:
                    if not (runs_alone(op, clean_calls) and runs_alone(op, calls)):
                        continue
                except (
                    RuntimeError
                ):  # a member that refuses NaN: tests/primitives/test_oracle.py checks the strategies
                    continue
                w = EagerWriter(3, torch.device(device).type)
                w.op = op
                for s in applicable(w, op, args, kwargs):
                    answers = []
                    for a, k in ((args, kwargs), (args_nan, kwargs_nan)):
                        torch.manual_seed(0)
                        answers.append(outputs(s.rule(w, *a, **k), 3))
                    for i in (0, 2):
                        pairs = zip(tensors([answers[0][i]]), tensors([answers[1][i]]))
                        if any(a.shape != b.shape or not torch.equal(bits(a), bits(b)) for a, b in pairs):
                            leaks.append(
                                f"{where}, {memory}, strategy {s.name}: NaN in member 1 reached member {i}"
                            )
    assert not leaks, "\n".join([f"{len(leaks)} leaks:", *leaks[:20]])
