"""Defines the interface to a device's graphs: recorded runs.

A graph is a recorded run: the same kernels over the same memory. To replay it costs the host one launch
instead of one for each kernel. Its rules, which every `GraphRecorder` keeps:

1. A recorded run reads and writes the memory that it had when it was recorded. New inputs are written into
   that memory before a replay, and answers are copied out of it after the replay.
2. A recorded run does not wait for the device, so it cannot read a number from it (`.item()`).
3. Graphs that share one `GraphMemory` use the same memory for values between their ops, so that only one of
   them may run at a time, and nothing that a replay wrote is valid after the replay of another one.
4. One capture at a time runs in a process: `ONE_CAPTURE` is held meanwhile, and by whoever waits for a whole
   device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

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
