"""Records runs as graphs of a device, and defines what a recorder of any device has.

A graph is a recorded run: the same kernels over the same memory. To replay it costs the host one launch
instead of one for each kernel. Its rules, which every `GraphRecorder` keeps:

1. A recorded run reads and writes the memory that it had when it was recorded. New inputs are written into
   that memory before a replay, and answers are copied out of it after the replay.
2. A recorded run does not wait for the device, so it cannot read a number from it (`.item()`).
3. Graphs that share one `GraphMemory` use the same memory for values between their ops, so that only one of
   them may run at a time, and nothing that a replay wrote is valid after the replay of another one.
4. One capture at a time runs in a process: `ONE_CAPTURE` is held meanwhile, and by whoever waits for a whole
   device.

For CUDA devices the calls of torch are made one by one instead of by `torch.cuda.graph`: that context waits
for the whole device, empties the cache of the allocator, and after a failed capture leaves its stream as the
current one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..ir.torch_internals import clear_product_workspaces, end_allocation_to_pool

Run = Callable[[], Any]

ONE_CAPTURE = threading.RLock()
"""Is held while a run is captured, and while a thread waits for all work of a device."""


class CapturedRun(Protocol):
    """A graph.

    Attributes:
        outputs: What the captured run returned. Its tensors have numbers after a replay only.
    """

    @property
    def outputs(self) -> Any: ...

    def replay(self) -> None:
        """Starts the graph on the current stream."""
        ...


class GraphRecorder(Protocol):
    """Captures and orders graphs on one device."""

    def new_memory(self) -> Any:
        """Returns a memory that the graphs of one model share."""
        ...

    def in_order(self, memory: Any) -> AbstractContextManager[None]:
        """Runs a block on the current stream after the last such block of this memory, on any stream."""
        ...

    def warm_up(self, run: Run, times: int) -> Any:
        """Runs a function as often as given, on the stream of captures. Returns: its last result."""
        ...

    def capture(self, run: Run, memory: Any) -> CapturedRun:
        """Captures a run. `ONE_CAPTURE` is held. Raises: what the run raises, and RuntimeError."""
        ...

    def capturing(self) -> bool:
        """Returns whether the caller captures a graph on the current stream."""
        ...

    def seconds(self, run: Run, times: int) -> float:
        """Returns the seconds of one run, measured over several after a first one, with the device's time."""
        ...

    def wait(self, memory: Any) -> None:
        """Waits until no block of this memory runs on the device."""
        ...


_MODE = "thread_local"


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Lets products of a capture take workspaces of the graph's memory.

    Those of the thread and stream may be used by other work while the graph runs.
    """
    clear_product_workspaces()
    try:
        yield
    finally:
        clear_product_workspaces()


class CudaGraphMemory:
    """The memory that the graphs of one model share.

    torch's allocators keep a memory as long as a graph of it is alive. They refuse captures into it
    afterwards, or after a capture that failed: the graphs that are captured then share another one.

    Attributes:
        last: The event after its last use; None before the first use.
    """

    def __init__(self) -> None:
        self.last: torch.cuda.Event | None = None
        self._handle: Any = None
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def handle(self) -> Any:
        """Returns the allocators' name of the memory for the next capture."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: CudaGraph) -> None:
        """Counts a graph that was captured into the memory."""
        self._graphs.add(graph)

    def leave(self) -> None:
        """Uses another memory for the next capture, because one failed."""
        self._graphs = weakref.WeakSet()


class CudaGraph:
    """A CUDA graph, and what the captured run returned."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """Captures runs on a CUDA device. device: with its index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None

    def new_memory(self) -> CudaGraphMemory:
        return CudaGraphMemory()

    @contextlib.contextmanager
    def in_order(self, memory: CudaGraphMemory) -> Iterator[None]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if memory.last is None:
                memory.last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            else:
                stream.wait_event(memory.last)
            try:
                yield
            finally:
                memory.last.record(stream)

    def warm_up(self, run: Run, times: int) -> Any:
        result = None
        with self._on_side():
            for _ in range(times):
                result = run()
        return result

    def capture(self, run: Run, memory: CudaGraphMemory) -> CapturedRun:
        graph, handle = torch.cuda.CUDAGraph(), memory.handle()
        with self._on_side(), _own_workspaces():
            try:
                # Other threads may allocate and copy meanwhile, which the default mode would forbid them.
                graph.capture_begin(pool=handle, capture_error_mode=_MODE)
                outputs = run()
                graph.capture_end()
            except BaseException:
                memory.leave()
                self._abandon(graph, handle)
                raise
        captured = CudaGraph(graph, outputs)
        memory.add(captured)
        return captured

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def seconds(self, run: Run, times: int) -> float:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            run()
            stream.synchronize()
            began = time.perf_counter()
            for _ in range(times):
                run()
            stream.synchronize()
            return (time.perf_counter() - began) / times

    def wait(self, memory: CudaGraphMemory) -> None:
        if memory.last is not None:
            memory.last.synchronize()

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[None]:
        """Runs a block on the stream of captures, after the current stream's work and before its next.

        Warm-up and capture share the stream: libraries keep memory for each stream, which they get in the
        warm-up. Its priority is not the default one: torch gives users streams of the default priority from
        a pool of 32, so another thread could start work on the stream that captures.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            side = self._side = self._side or torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    yield
            finally:
                current.wait_stream(side)

    def _abandon(self, graph: torch.cuda.CUDAGraph, handle: Any) -> None:
        """Ends a capture that failed, so that later work on the device does not see it.

        torch leaves two things behind: memory is still allocated to the pool, and the device's generator of
        random numbers refuses to draw, until another capture succeeds. So a small one is made.
        """
        with contextlib.suppress(RuntimeError):  # the error of the capture is the one to report
            graph.capture_end()
        end_allocation_to_pool(self._device, handle)
        value = torch.zeros(1, device=self._device)
        small = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError):
            small.capture_begin(capture_error_mode=_MODE)
            value.add_(1)
            small.capture_end()


RECORDERS: dict[str, Callable[[torch.device], GraphRecorder]] = {"cuda": CudaRecorder}
"""What makes the recorder of a device, by the kind of device."""


def recorder_for(device: torch.device) -> GraphRecorder | None:
    """Returns a recorder for a device; None for a device without graphs."""
    make = RECORDERS.get(device.type)
    return make(device) if make is not None else None
