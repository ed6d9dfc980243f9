"""Tests that every strategy of every op can be timed without values: on torch's meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import WALKED, tensors, wide

from widepack.ir.encoding import map_arguments
from widepack.ir.values import Shared, Stacked, Value
from widepack.kernel_times.cuda import CudaModel
from widepack.kernels.checks.require import OperandError
from widepack.planning.strategy_times import NodeRuns, TimedWriter
from widepack.registry.registry import REGISTRY
from widepack.registry.samples import SAMPLES, Draw, Sample
from widepack.runtime.meta_values import metas
from widepack_artifacts.program import Node

N = 3
FAMILIES = sorted({REGISTRY[op].family for op in WALKED})


def on_meta(args: Any) -> Any:
    """Returns wide values without memory."""

    def one(x: Any) -> Any:
        if not isinstance(x, (Shared, Stacked)):
            return x
        return type(x)(Value(None, metas(x.value.fake)))

    return map_arguments(args, one)


def runs_of(writer: TimedWriter, op: str, many: list[Sample]) -> NodeRuns:
    args, kwargs, _ = wide(many, (True,) * len(tensors(many[0])), "major")
    return writer.runs_of(Node("n", op), on_meta(args), on_meta(kwargs), None, False)


VALUES = {"aten.index.Tensor": "a mask as an index", "aten.istft.default": "torch compares values"}
"""Ops that cannot run without values for one of their samples. A program with such a node takes the first
strategy of each op.
"""


@pytest.mark.extended(keep=12)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_has_a_time(family: str) -> None:
    writer, timed = TimedWriter(N, CudaModel()), 0
    for op in WALKED:
        if REGISTRY[op].family != family:
            continue
        for many in zip(*(SAMPLES[op](Draw(i)) for i in range(N))):
            try:
                found = runs_of(writer, op, list(many))
            except OperandError:  # the check of the op refuses this sample, as in lowering
                continue
            except NotImplementedError:
                if op not in VALUES:
                    raise
                continue
            timed += 1
            assert found.times
            for name, spent in found.times.items():
                assert 0 <= spent.seconds < 1, (op, name)
                assert spent.kernels or not spent.device, (op, name)
    assert timed


def test_equal_nodes_are_run_once_and_other_nodes_are_not() -> None:
    writer, op = TimedWriter(N, CudaModel()), "aten.linear.default"

    def timed(x: Stacked | Shared, weight: Stacked) -> NodeRuns:
        return writer.runs_of(Node("n", op), [x, weight], {}, None, False)

    def value(*sizes: int) -> Value:
        return Value(None, torch.empty(sizes, device="meta"))

    x, weight = Stacked(value(N, 8, 4)), Stacked(value(N, 6, 4))
    first = timed(x, weight)
    assert timed(Stacked(value(N, 8, 4)), Stacked(value(N, 6, 4))) is first
    assert list(first.times) == ["bmm", "turned"] and first.first == "bmm"
    larger, shared = timed(Stacked(value(N, 9, 4)), weight), timed(Shared(value(8, 4)), weight)
    assert larger is not first and list(shared.times) == ["one_gemm", "bmm", "turned"]
    early = timed(x, Stacked(writer.mark_early(value(N, 6, 4))))
    assert early.times["turned"].kernels == first.times["turned"].kernels - 1, "turned at load"


def test_a_strategy_of_one_kind_of_device_is_not_the_first_one_everywhere() -> None:
    writer = TimedWriter(N, CudaModel())
    table = Stacked(Value(None, torch.empty(N, 50, 8, device="meta")))
    ids = Stacked(Value(None, torch.empty(N, 400, 4, dtype=torch.int64, device="meta")))
    found = writer.runs_of(Node("n", "aten.embedding.default"), [table, ids], {}, None, False)
    assert next(iter(found.times)) == "gather" and found.first is None
