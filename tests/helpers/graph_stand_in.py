"""Records graphs of CPU tensors by the rules of CUDA graphs (`widepack/backends/graph_capture.py`).

A capture records every op with the tensors that it read and wrote. A replay runs the ops again over the same
tensors. What would be wrong on a GPU is wrong or refused here:

| mistake | what happens |
|---|---|
| inputs are not copied into the memory of the graph | the answer is the one to older inputs |
| an answer is memory of the graph | a later replay overwrites it |
| an answer is read before a replay, or after the replay of another graph of the memory | it is garbage |
| a swap replaces the memory of a weight | the graph still reads the old one |
| the host reads a number in a capture | the capture is refused |
| two calls use the graphs of one memory at once, or two captures run at once | they are refused |
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from widepack.backends import graph_capture
from widepack.ir.torch_internals import inference_guard
from widepack.system.autocast import autocast_off

GARBAGE = 0x7F
"""The byte that fills memory whose numbers are not valid."""
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WAITING = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose")
_READING = ("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__")
_ONE_CAPTURE = threading.Lock()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a value that have readable memory: prepacked weights have none."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in _tensors(value)}


class _RefuseReads(TorchFunctionMode):
    """Refuses methods that read numbers without an op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Runs ops, and records each with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _TAGS & set(func.tags) or func.name().partition(".")[0] in _WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        found = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, found))
        return found


class StandInMemory:
    """A memory of graphs. graphs: those that share it. blocks: how many ordered blocks have run."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[StandInGraph] = weakref.WeakSet()
        self.blocks = 0
        self.inside = threading.Lock()


class StandInGraph:
    """A recorded run."""

    def __init__(self, record: _Record, outputs: Any, memory: StandInMemory) -> None:
        self.outputs, self._memory = outputs, memory
        self._steps = [s for s in record.steps if "empty" not in s[0].name()]
        self._own: dict[int, torch.UntypedStorage] = {}
        for _, args, kwargs, found in record.steps:
            given = _storages((args, kwargs))
            for t in _tensors(found):
                if t.untyped_storage().data_ptr() not in given:
                    self._own[t.untyped_storage().data_ptr()] = t.untyped_storage()
        self.replays = 0
        self.spoil()
        memory.graphs.add(self)

    def spoil(self) -> None:
        """Fills the memory of the graph with garbage: nothing has run, or another graph has."""
        for storage in self._own.values():
            storage.fill_(GARBAGE)  # type: ignore[attr-defined]

    def replay(self) -> None:
        for other in list(self._memory.graphs):
            if other is not self:
                other.spoil()
        self.replays += 1
        with inference_guard(True), autocast_off():  # kernels of a graph know no modes of the caller
            for func, args, kwargs, found in self._steps:
                self._again(found, func(*args, **kwargs))

    def _again(self, old: Any, new: Any) -> None:
        """Writes the results of an op into those that it had in the capture."""
        for into, value in zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True):
            if not isinstance(into, Tensor):
                assert into == value
            elif into.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                into.copy_(value)


class StandInRecorder:
    """Records runs on the CPU.

    Attributes:
        memories: All that were made.
        captures: How many captures succeeded.
        outside: What the user captures, by thread, as a test sets it.
        times: The seconds that `seconds` returns, in order; empty for measured ones.
    """

    def __init__(self) -> None:
        self.memories: list[StandInMemory] = []
        self.captures = 0
        self.outside = threading.local()
        self.times: list[float] = []

    def new_memory(self) -> StandInMemory:
        self.memories.append(StandInMemory())
        return self.memories[-1]

    @contextlib.contextmanager
    def in_order(self, memory: StandInMemory) -> Iterator[None]:
        assert memory.inside.acquire(blocking=False), "two calls use the graphs of one memory at once"
        try:
            memory.blocks += 1
            yield
        finally:
            memory.inside.release()

    def warm_up(self, run: Callable[[], Any], times: int) -> Any:
        found = None
        for _ in range(times):
            found = run()
        return found

    def capture(self, run: Callable[[], Any], memory: StandInMemory) -> StandInGraph:
        if not _ONE_CAPTURE.acquire(blocking=False):
            raise RuntimeError("another capture is underway")
        try:
            with _RefuseReads(), _Record() as record:
                outputs = run()
        finally:
            _ONE_CAPTURE.release()
        self.captures += 1
        return StandInGraph(record, outputs, memory)

    def capturing(self) -> bool:
        return getattr(self.outside, "capturing", False)

    def seconds(self, run: Callable[[], Any], times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            run()
        measured = (time.perf_counter() - began) / times
        return self.times.pop(0) if self.times else measured

    def wait(self, memory: StandInMemory) -> None:
        """All has run already."""


def use_stand_in(patch: pytest.MonkeyPatch) -> list[StandInRecorder]:
    """Gives the CPU graphs: each load gets a recorder, which is appended to the list that is returned."""
    made: list[StandInRecorder] = []

    def recorder(device: torch.device) -> StandInRecorder:
        made.append(StandInRecorder())
        return made[-1]

    patch.setitem(graph_capture.RECORDERS, "cpu", recorder)
    return made
