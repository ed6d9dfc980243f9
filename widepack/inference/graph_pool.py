"""Defines what the graphs of one loaded model share, and which calls use CUDA graphs: `ens.graph_use()`"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..backends.graph_capture import ONE_CAPTURE, CapturedRun, GraphRecorder, Run, recorder_for
from ..errors import UsageError


@dataclass(frozen=True)
class GraphUse:
    """Which calls of one wide program run by a CUDA graph, and why others do not.

    Attributes:
        pattern: `shared`, `each`, or `mixed:` and a letter for each input.
        batch: The batch class of the program: the least and the most rows.
        sizes: The batches for which a graph may be captured; empty if none is.
        captured: Those for which one was captured so far.
        why_not: The reason why no graph is captured any more; "" if graphs may be.
        why_not_padded: Why smaller batches are not padded to the next size; "" if they are.
        why_not_sizes: For batches without a graph the reason.
        why_not_calls: Why calls ran without a graph: the first few reasons.

    Example:
        >>> for use in ens.graph_use():
        ...     print(use)
    """

    pattern: str
    batch: tuple[int, int | None]
    sizes: tuple[int, ...] = ()
    captured: tuple[int, ...] = ()
    why_not: str = ""
    why_not_padded: str = ""
    why_not_sizes: tuple[tuple[int, str], ...] = ()
    why_not_calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        most = "any" if self.batch[1] is None else self.batch[1]
        start = f"{self.pattern}, batch {self.batch[0]} to {most}: "
        if not self.sizes:
            return f"{start}no graph: {self.why_not}"
        sizes = ", ".join(map(str, self.sizes)) if self.sizes != (0,) else "fixed"
        captured = ", ".join(map(str, self.captured)) or "none"
        lines = [f"{start}graphs for batch {sizes}; captured: {captured}"]
        if self.why_not:
            lines.append(f"no other graph is captured: {self.why_not}")
        if self.why_not_padded and self.sizes != (0,):
            lines.append(f"other batches run without a graph: {self.why_not_padded}")
        lines += [f"batch {size} runs without a graph: {why}" for size, why in self.why_not_sizes]
        lines += [f"a call ran without a graph: {why}" for why in self.why_not_calls]
        return "\n  ".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns the values as JSON."""
        found = asdict(self)
        return {**found, "why_not_sizes": {str(size): why for size, why in self.why_not_sizes}}


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
        self._memory = recorder.new_memory()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Runs a block after all earlier such blocks, on the host and on the device."""
        with self.lock, self.recorder.in_order(self._memory):
            yield

    def warm_up(self, run: Run) -> Any:
        """Runs a function as before a capture. Returns: its last result."""
        return self.recorder.warm_up(run, WARM_UPS)

    def capture(self, run: Run) -> CapturedRun:
        """Captures a run. Raises: what the run raises, and RuntimeError."""
        with ONE_CAPTURE:
            return self.recorder.capture(run, self._memory)

    def seconds(self, run: Run) -> float:
        """Returns the seconds of one run."""
        return self.recorder.seconds(run, RUNS)

    def wait(self) -> None:
        """Waits until no graph of the model runs. The lock is held."""
        self.recorder.wait(self._memory)


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
