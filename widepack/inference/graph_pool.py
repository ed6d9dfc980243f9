"""Defines what the graphs of one loaded model share: the recorder, one memory, and the lock of their runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..backends.graph_capture import ONE_CAPTURE, CapturedRun, GraphRecorder, Run
from ..backends.graph_recorders import recorder_for
from ..errors import UsageError

WARM_UPS = 3
"""Runs before a capture: libraries allocate memory and choose kernels in the first ones."""
RUNS = 5
"""Runs of which a time is the mean."""


class GraphPool:
    """The graphs of one model.

    All entries, patterns and batches share one memory for the values between ops, so one graph runs at a
    time: `lock` is held while a call copies its inputs, starts the graph and copies the answers, and the
    recorder orders this on the device. A graph for each thread would need as much memory again for each
    thread, and a capture in each.

    Args:
        recorder: Captures graphs on the model's device.
        measured: Whether a graph runs only where it was measured to be faster: `graph="auto"`.

    Attributes:
        lock: Is held by the one call that uses graphs of this model.
    """

    def __init__(self, recorder: GraphRecorder, measured: bool) -> None:
        self.recorder, self.measured = recorder, measured
        self.lock = threading.RLock()
        self._memory: Any = None

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Runs a block after all earlier such blocks, on the host and on the device."""
        with self.lock, self.recorder.in_order(self._of_model()):
            yield

    def warm_up(self, run: Run) -> Any:
        """Runs a function as before a capture. Returns: its last result."""
        return self.recorder.warm_up(run, WARM_UPS)

    def capture(self, run: Run) -> CapturedRun:
        """Captures a run. Raises: what the run raises, and RuntimeError."""
        with ONE_CAPTURE:
            return self.recorder.capture(run, self._of_model())

    def seconds(self, run: Run) -> float:
        """Returns the seconds of one run."""
        return self.recorder.seconds(run, RUNS)

    def wait(self) -> None:
        """Waits until no graph of the model runs. The lock is held."""
        if self._memory is not None:
            self.recorder.wait(self._memory)

    def _of_model(self) -> Any:
        if self._memory is None:
            self._memory = self.recorder.new_memory()
        return self._memory


def graph_pool(graph: bool | str, device: torch.device) -> GraphPool | None:
    """Returns what the graphs of a load share; None for a load without graphs.

    graph: as `load` takes it. device: where the model runs. Raises: UsageError.
    """
    if not isinstance(graph, bool) and graph != "auto":
        raise UsageError(f"graph={graph!r:.40} is unknown; known: True, False, 'auto'")
    if graph is False:
        return None
    recorder = recorder_for(device)
    if recorder is None and graph is True:
        raise UsageError(
            f"graph=True needs a CUDA device, and the model is loaded on {device}: a CUDA graph records the "
            "kernels of a GPU.\n"
            "Load with device='cuda', or leave graph out; graph='auto' uses graphs on CUDA only."
        )
    return None if recorder is None else GraphPool(recorder, measured=graph == "auto")
