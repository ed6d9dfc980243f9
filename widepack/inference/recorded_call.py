"""Defines a captured graph with the memory of its inputs and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.graph_capture import CapturedRun
from .graph_rows import RowDims


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
