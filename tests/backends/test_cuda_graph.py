"""Tests in which order the recorder of CUDA devices calls torch. The calls are replaced, so it needs no GPU.

`tests/gpu/test_device_graphs.py` tests it on a device.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from widepack.backends import graph_capture
from widepack.backends.graph_capture import CudaRecorder


class Calls:
    """Replaces what the recorder calls of torch. log: the calls in order. fail: the call that raises."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fail = ""
        self.current: Any = Stream(self, "caller")

    def called(self, name: str) -> None:
        self.log.append(name)
        if name == self.fail:
            self.fail = ""
            raise RuntimeError(f"{name} failed")

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self.name = calls, name

    def wait_stream(self, other: Stream) -> None:
        self._calls.called(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._calls.called(f"{self.name} waits for the event of {event.of}")

    def synchronize(self) -> None:
        self._calls.called(f"wait for {self.name}")


class Event:
    def __init__(self, calls: Calls) -> None:
        self._calls, self.of = calls, "none"

    def record(self, stream: Stream) -> None:
        self.of = stream.name

    def synchronize(self) -> None:
        self._calls.called(f"wait for the event of {self.of}")


class Graph:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._calls.called(f"begin on {self._calls.current.name}, {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self._calls.called("end")

    def replay(self) -> None:
        self._calls.called(f"replay on {self._calls.current.name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    handles = (f"pool{k}" for k in itertools.count())
    replaced: dict[str, Any] = {
        "device": lambda device: contextlib.nullcontext(),
        "stream": made.on,
        "current_stream": lambda: made.current,
        "Stream": lambda priority: Stream(made, "side"),
        "Event": lambda: Event(made),
        "CUDAGraph": lambda: Graph(made),
        "graph_pool_handle": lambda: next(handles),
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in replaced.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graph_capture, "clear_product_workspaces", lambda: made.called("clear"))
    monkeypatch.setattr(
        graph_capture, "end_allocation_to_pool", lambda device, handle: made.called(f"release {handle}")
    )
    return made


def recorder() -> CudaRecorder:
    return CudaRecorder(torch.device("cpu"))


def test_torch_takes_the_arguments_of_a_capture() -> None:
    known = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert set(inspect.signature(Graph.capture_begin).parameters) <= set(known)


def test_a_capture_runs_on_the_side_stream_between_the_callers_work(calls: Calls) -> None:
    graphs = recorder()
    captured = graphs.capture(lambda: calls.called(f"run on {calls.current.name}"), graphs.new_memory())
    assert calls.log == [
        "side waits for caller",
        "clear",
        "begin on side, pool0, thread_local",
        "run on side",
        "end",
        "clear",
        "caller waits for side",
    ]
    captured.replay()
    assert calls.log[-1] == "replay on caller"


@pytest.mark.parametrize("fail", ["begin on side, pool0, thread_local", "run", "end"])
def test_a_capture_that_fails_leaves_nothing_behind(calls: Calls, fail: str) -> None:
    graphs = recorder()
    calls.fail = fail
    with pytest.raises(RuntimeError, match=f"{fail} failed"):
        graphs.capture(lambda: calls.called("run"), graphs.new_memory())
    released = calls.log.index("release pool0")
    assert "end" in calls.log[:released], "the capture is ended"
    assert calls.log[released:] == [
        "release pool0",
        "begin on side, None, thread_local",  # a small capture, after which random numbers can be drawn again
        "end",
        "clear",
        "caller waits for side",
    ]
    assert calls.current.name == "caller"


def begun(calls: Calls) -> list[str]:
    """Returns the memories of the captures so far."""
    return [call.split(", ")[1] for call in calls.log if call.startswith("begin")]


def test_graphs_share_a_memory_while_one_of_them_is_alive(calls: Calls) -> None:
    """torch refuses a capture into a memory whose graphs are all gone."""
    graphs = recorder()
    memory = graphs.new_memory()
    first = graphs.capture(lambda: None, memory)
    second = graphs.capture(lambda: None, memory)
    del first
    third = graphs.capture(lambda: None, memory)
    assert begun(calls) == ["pool0"] * 3
    del second, third
    gc.collect()
    last = graphs.capture(lambda: None, memory)
    assert begun(calls)[3:] == ["pool1"]
    assert last is not None


def test_a_capture_after_one_that_failed_gets_another_memory(calls: Calls) -> None:
    graphs = recorder()
    memory = graphs.new_memory()
    first = graphs.capture(lambda: None, memory)
    calls.fail = "run"
    with pytest.raises(RuntimeError, match="run failed"):
        graphs.capture(lambda: calls.called("run"), memory)
    second = graphs.capture(lambda: None, memory)
    third = graphs.capture(lambda: None, memory)
    assert begun(calls) == ["pool0", "pool0", "None", "pool1", "pool1"]
    assert None not in (first, second, third)


def test_uses_of_one_memory_are_ordered_over_streams(calls: Calls) -> None:
    graphs = recorder()
    memory = graphs.new_memory()
    graphs.wait(memory)
    with graphs.in_order(memory):
        pass
    assert calls.log == [], "the first use waits for nothing"
    other = Stream(calls, "other")
    with calls.on(other), pytest.raises(ValueError, match="inside"), graphs.in_order(memory):
        raise ValueError("inside")
    with graphs.in_order(memory):
        pass
    graphs.wait(memory)
    assert calls.log == [
        "other waits for the event of caller",
        "caller waits for the event of other",
        "wait for the event of caller",
    ]


def test_warm_ups_and_times(calls: Calls) -> None:
    graphs = recorder()

    def run() -> int:
        calls.called(f"run on {calls.current.name}")
        return len(calls.log)

    assert graphs.warm_up(run, 2) == 3
    assert calls.log == ["side waits for caller", "run on side", "run on side", "caller waits for side"]
    calls.log.clear()
    assert graphs.seconds(lambda: calls.called("run"), 2) >= 0
    assert calls.log == ["run", "wait for caller", "run", "run", "wait for caller"]
    assert not graphs.capturing()
