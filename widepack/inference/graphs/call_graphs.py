"""Runs the calls of a bound program by graphs: captured at the first call of a batch, then replayed.

1. A call chooses its bucket by its sizes (`graph_rows.py`). Without one it runs without a graph.
2. The first call of a bucket copies its inputs into memory of the graph, runs the program a few times, and
   captures it. The graph's answers to these inputs are compared with the program's.
3. Every call copies its inputs into that memory, replays the graph, and copies the answers out of it.

A capture that fails is not repeated: the program runs without further graphs, and `use` says why. A swap that
writes into the memory of weights changes what the graphs read. A swap that replaces values makes them
invalid; the next call of a bucket captures it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.graph_capture import CapturedRun
from ...backends.task import first_line
from ...ir.torch_internals import inference_guard
from ...runtime.executable import Executable
from ...verification.record import OutputBounds
from ..graph_pool import GraphPool, GraphUse
from ..programs.bound_program import BoundProgram
from ..programs.entry_inputs import EntryInputs
from ..programs.probe_check import difference
from .graph_limits import why_no_graph, why_slower
from .graph_rows import LARGEST, BucketChoice, Fit, RowDims, buckets, row_dims


class StaticInputs:
    """The memory from which a graph reads its inputs.

    Args:
        values: The tensors of a call. They are copied.
        dims: Where the rows are; None for calls that have the graph's sizes.
        rows: Of the call.
        bucket: The rows of the graph.
    """

    def __init__(self, values: Sequence[Tensor], dims: RowDims | None, rows: int, bucket: int) -> None:
        self._axes = dims.inputs if dims is not None else (None,) * len(values)
        self._bucket = bucket
        self.tensors = [self._empty(v, axis) for v, axis in zip(values, self._axes, strict=True)]
        self.fill(values, rows)

    def _empty(self, value: Tensor, axis: int | None) -> Tensor:
        shape = list(value.shape)
        if axis is not None:
            shape[axis] = self._bucket
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def fill(self, values: Sequence[Tensor], rows: int) -> None:
        """Copies the tensors of a call. The last row is repeated where the graph has more rows.

        Rows of zeros would be no input that the model was checked with, and an index may have no zero.
        """
        for into, value, axis in zip(self.tensors, values, self._axes, strict=True):
            if axis is None or rows == self._bucket:
                into.copy_(value)
                continue
            into.narrow(axis, 0, rows).copy_(value)
            into.narrow(axis, rows, self._bucket - rows).copy_(value.narrow(axis, rows - 1, 1))


class RecordedCall:
    """A graph that answers calls of up to its rows.

    Args:
        inputs: The memory of its inputs.
        captured: The graph.
        kinds: The kind of each output in the wide program.
        dims: Where the rows are; None if calls are not padded.
        bucket: The rows of the graph.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        captured: CapturedRun,
        kinds: Sequence[str],
        dims: RowDims | None,
        bucket: int,
    ) -> None:
        self.inputs, self.captured = inputs, captured
        self._kinds, self._dims, self._bucket = tuple(kinds), dims, bucket

    def answer(self, values: Sequence[Tensor], rows: int) -> list[Any]:
        """Runs a call. The caller holds the lock of the graphs. Returns: answers in memory of their own."""
        self.inputs.fill(values, rows)
        self.captured.replay()
        outputs = self.captured.outputs
        if self._dims is not None and rows != self._bucket:
            outputs = [
                self._dims.answers(k, value, kind, rows)
                for k, (value, kind) in enumerate(zip(outputs, self._kinds, strict=True))
            ]
        return copies(outputs)


def copies(outputs: Sequence[Any]) -> list[Any]:
    """Returns copies of the outputs of a program."""
    return [each_tensor(v, torch.clone) for v in outputs]


def each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Applies a function to an output: to a tensor, to each tensor of a list; other values stay."""
    if isinstance(value, Tensor):
        return change(value)
    return [each_tensor(v, change) for v in value] if isinstance(value, (list, tuple)) else value


GAIN = 0.95
"""The part of the program's time that a graph may take with `graph="auto"`."""
SEEN = 256
"""How many shapes of calls are remembered."""
REASONS = 4
"""How many reasons of calls without a graph are remembered."""


class CallGraphs:
    """The graphs of one bound program.

    Args:
        pool: What the graphs of the model share.
        bound: The program.
        inputs: Of its entry.
        pattern: The program's pattern.
        bounds: How far answers may differ, for each output; empty for rounding.
    """

    def __init__(
        self,
        pool: GraphPool,
        bound: BoundProgram,
        inputs: EntryInputs,
        pattern: str,
        bounds: Sequence[OutputBounds] = (),
    ) -> None:
        self._pool, self._bound, self._pattern = pool, bound, pattern
        self._title, self._bounds = inputs.title(pattern), list(bounds)
        self._outputs = inputs.entry.outputs
        self._kinds = [o.kind for o in bound.program.outputs]
        per_member = inputs.per_member(pattern)
        self._dims, self._why_not_padded = row_dims(inputs, per_member)
        self._why_not = why_no_graph(bound)
        self._explain(self._why_not)
        if pool.measured and not self._why_not:
            self._why_not = why_slower(bound.executable)
        self._sizes = () if self._why_not else buckets(inputs, bound.plan.batch)
        if not self._sizes and not self._why_not:
            self._why_not = f"its batches are none of those of graphs, which are up to {LARGEST}"
        self._choice = BucketChoice(inputs, per_member, self._sizes, self._dims is not None)
        self._fits: dict[Any, Fit] = {}
        self._graphs: dict[int, RecordedCall] = {}
        self._without: dict[int, str] = {}
        self._reasons: dict[str, None] = {}
        self._captured_from: tuple[Executable, int] | None = None

    @property
    def use(self) -> GraphUse:
        """Which calls run by a graph."""
        with self._pool.lock:
            return GraphUse(
                self._pattern,
                self._bound.plan.batch,
                self._sizes,
                tuple(sorted(self._graphs)),
                self._why_not,
                self._why_not_padded,
                tuple(sorted(self._without.items())),
                tuple(self._reasons),
            )

    def run(self, *values: Tensor) -> list[Any]:
        """Runs a call, by a graph if one is for it. Returns: the outputs, in memory of the caller."""
        if self._sizes and not self._pool.recorder.capturing():
            fit = self._fit(values)
            if fit.bucket is not None and self._may_run(fit.bucket):
                with inference_guard(True), self._pool.in_order():
                    graph = self._graph(fit.bucket, values, fit.rows)
                    if graph is not None:
                        return graph.answer(values, fit.rows)
        return self._bound.executable.run(*values)

    def _may_run(self, bucket: int) -> bool:
        """Returns whether a bucket has a graph, or may get one. Other calls take no lock."""
        return bucket in self._graphs or not (self._why_not or bucket in self._without)

    def forget(self) -> None:
        """Drops the graphs and their memory. The next calls capture them again."""
        with self._pool.lock:
            self._pool.wait()
            self._graphs.clear()
            self._captured_from = None

    def _fit(self, values: Sequence[Tensor]) -> Fit:
        """Returns how a call fits the graphs. Equal shapes are examined once."""
        key = tuple([(v.shape, v.dtype) for v in values])
        fit = self._fits.get(key)
        if fit is None:
            fit = self._choice.of(values)
            if len(self._fits) >= SEEN:
                self._fits.clear()
            self._fits[key] = fit
            if fit.why_not and len(self._reasons) < REASONS:
                self._reasons[fit.why_not] = None
        return fit

    # ---------------------------------------------------------------- captures, with the lock held

    def _graph(self, bucket: int, values: Sequence[Tensor], rows: int) -> RecordedCall | None:
        """Returns the graph of a bucket, captured now if it is new; None if the call runs without one."""
        executable = self._bound.executable
        from_ = executable, executable.exchanges
        if self._captured_from != from_:  # values were replaced: their memory may be of others now
            self._pool.wait()  # another stream may still read the inputs of a graph
            self._graphs.clear()
            self._captured_from = from_
        graph = self._graphs.get(bucket)
        if graph is not None or self._why_not or bucket in self._without:
            return graph
        graph = self._captured(executable, bucket, values, rows)
        if graph is not None:
            self._graphs[bucket] = graph
        return graph

    def _captured(
        self, executable: Executable, bucket: int, values: Sequence[Tensor], rows: int
    ) -> RecordedCall | None:
        """Captures a graph. None, and a reason, if that fails. Raises: what the program raises."""
        try:
            inputs = StaticInputs(values, self._dims, rows, bucket)

            def run() -> list[Any]:
                return executable.run(*inputs.tensors)

            expected = self._pool.warm_up(run)
            try:
                captured = self._pool.capture(run)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:  # noqa: BLE001  # whatever the capture raises, the program has run
                self._refuse(f"the capture failed: {type(e).__name__}: {first_line(e)}".removesuffix(": "))
                return None
            call = RecordedCall(inputs, captured, self._kinds, self._dims, bucket)
            return call if self._right(call, expected, bucket) and self._faster(call, run, bucket) else None
        except torch.OutOfMemoryError:
            self._without[bucket] = "there is too little memory for its graph"
            return None

    def _right(self, call: RecordedCall, expected: Sequence[Any], bucket: int) -> bool:
        """Compares a graph's answers with the program's. False, and a reason, if they differ."""
        call.captured.replay()
        found = call.captured.outputs
        wrong = difference(self._outputs, found, expected, self._bounds)
        if wrong:
            self._refuse(f"the graph gives other answers: {wrong}")
            return False
        if self._dims is not None:
            for k, (value, kind) in enumerate(zip(found, self._kinds, strict=True)):
                if not self._dims.has_rows(k, value, kind, bucket):
                    self._refuse(f"output {k} of the program has not one row for each row of the batch")
                    return False
        return True

    def _faster(self, call: RecordedCall, run: Any, bucket: int) -> bool:
        """Returns whether the graph is used. With `graph="auto"` it must be faster than the program."""
        if not self._pool.measured:
            return True

        def replay() -> None:
            call.captured.replay()
            copies(call.captured.outputs)

        graph, program = self._pool.seconds(replay), self._pool.seconds(run)
        if graph <= GAIN * program:
            return True
        self._without[bucket] = f"the graph takes {1e6 * graph:.3g} us, the program {1e6 * program:.3g} us"
        return False

    def _refuse(self, reason: str) -> None:
        """Captures no more graphs. Those that were captured stay in use."""
        self._why_not = reason
        self._explain(reason)

    def _explain(self, reason: str) -> None:
        """Warns of a program without graphs if the user requested them."""
        if reason and not self._pool.measured:
            warnings.warn(
                f"{self._title} runs without a CUDA graph: {reason}; `ens.graph_use()` lists the graphs",
                stacklevel=2,
            )
