"""Tests that measurements wait for a device before they read the clock. A stand-in plays the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack.runtime.executable import Executable
from widepack.runtime.graph_module import graph_module
from widepack.system.timing import once, waited
from widepack.tuning import search
from widepack.tuning.candidate_pool import CandidatePool
from widepack_bench.baselines.cuda_graph import recorded
from widepack_bench.baselines.table import BASELINES
from widepack_bench.errors import Unavailable
from widepack_bench.layers.in_memory import InMemory, inputs, members
from widepack_bench.layers.reference import LayerReference
from widepack_bench.measure.race import AGAIN, OURS, race

CUDA = torch.device("cuda")
WORK_S = 0.004


class Device:
    """A device that works for `WORK_S` for each call, after the call has returned."""

    def __init__(self) -> None:
        self.pending = 0.0
        self.waits = 0

    def call(self, seconds: float = WORK_S) -> Callable[[], None]:
        def run() -> None:
            self.pending += seconds

        return run

    def synchronize(self, device: object = None) -> None:
        self.waits += 1
        time.sleep(self.pending)
        self.pending = 0.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


def test_a_call_waits_for_its_device(device: Device) -> None:
    call = device.call()
    assert waited(call, torch.device("cpu")) is call
    assert once(call) < WORK_S / 2
    device.synchronize()
    assert once(waited(call, CUDA), 3) >= WORK_S


def test_candidates_of_a_tuning_wait(device: Device) -> None:
    call = device.call()
    pool: Any = SimpleNamespace(inputs=(), device=CUDA)
    candidate: Any = SimpleNamespace(bound=SimpleNamespace(run=call))
    assert once(CandidatePool.call(pool, candidate)) >= WORK_S
    assert device.waits == 1


def test_times_of_nodes_wait(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node of the program is followed by a wait."""
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())  # noqa: E731  # a factory
    modules, stacked = members(make, 2), inputs(["input=float32[B,4]"], 3, 2)
    wide = InMemory(make, modules, ["input=float32[B,4]"], stacked, True)
    program = wide.lowered("wide").program
    run = Executable(program, wide.weights, torch.device("cpu"))
    monkeypatch.setattr(
        search, "graph_module", lambda p, _, workers: graph_module(p, torch.device("cpu"), workers)
    )
    search.cost_of_nodes(run, torch.device("cpu"), stacked, 0.0)
    assert device.waits == 0
    search.cost_of_nodes(run, CUDA, stacked, 0.0)
    assert device.waits == search.RUNS * len(run.program.nodes)


def test_a_race_waits(device: Device) -> None:
    run = race(
        device.call(), {"slow": device.call(2 * WORK_S)}, budget_s=0.2, min_rounds=4, sync=device.synchronize
    )
    assert all(run.median_ms(name) >= 1e3 * WORK_S for name in (OURS, AGAIN))
    assert run.median_ms("slow") >= 2e3 * WORK_S  # an upper bound would measure the load of the machine


class OnDevice(Tensor):
    """A tensor that no op takes together with tensors of the CPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        plain = [a for a in args if isinstance(a, Tensor) and not isinstance(a, OnDevice)]
        if plain:
            raise RuntimeError("expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_answers_of_a_device_are_compared_on_the_cpu() -> None:
    modules = members(lambda: nn.Linear(4, 3), 2)
    (x,) = inputs(["x=float32[B,4]"], 5, 2)
    reference = LayerReference.of(modules, [x], True)
    right = torch.stack([m(v) for m, v in zip(modules, x, strict=True)])
    assert reference.wrong(right.as_subclass(OnDevice)) == ""
    assert "output 0, member 0, this call: largest error" in reference.wrong(
        (right + 0.1).as_subclass(OnDevice)
    )


def test_graphs_of_layers_without_parameters() -> None:
    """Where such a layer runs is known at a call."""
    run = BASELINES["cuda-graph-loop"]([nn.ReLU(), nn.ReLU()], False)
    with pytest.raises(Unavailable, match="needs a CUDA device, and the inputs are on cpu"):
        run(torch.ones(3))
    with pytest.raises(Unavailable, match="the inputs are on cpu"):
        recorded(lambda x: x + 1)(torch.ones(3))
