"""Notes which ONNX Runtime sessions run a program, and runs them.

The note is all that a load needs: it says where a session's inputs come from, and where its outputs go. The
weights of the artifact are not read for it, nor is its prologue run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UsageError
from ..system.compiled_cache import CompiledCache
from ..system.threads import spread
from .covering import key_of
from .flat import Flat
from .member_loops import FlatOutput
from .onnx_graphs import FoundGraph, in_memory
from .onnx_packed import machine, opened
from .onnx_repeat import ANY
from .onnx_session import Run
from .task import Task

_FORM = 2


@dataclass(frozen=True)
class Share:
    """The members that a session runs, from `start` to `stop`. entry: of its packed weights in the cache; ""
    for weights in memory.
    """

    start: int
    stop: int
    entry: str

    @property
    def members(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class SessionInput:
    """An input of a session. number: of the program's input. each: whether it is there once for each member.
    row: whether a member's is its row of the program's input.
    """

    number: int
    each: bool
    row: bool


@dataclass(frozen=True)
class Binding:
    """How sessions run a program.

    Attributes:
        graph: The key of the member's graph.
        shares: The sessions.
        inputs: Of each session, in order.
        outputs: For each output of the graph the member whose value it is; less than 0 for all members'.
        booleans: Which outputs are boolean.
        joined: Which outputs have a row for each member.
        shape: Where the program's outputs are among these.
        least: The smallest valid size of dims at which the sessions are wrong at 1.
        flagged: Whether the last output says that an index was out of range.
        apart: Whether a member's outputs depend on its own inputs and weights alone.
    """

    graph: str
    shares: tuple[Share, ...]
    inputs: tuple[SessionInput, ...]
    outputs: tuple[int, ...]
    booleans: tuple[bool, ...]
    joined: tuple[bool, ...]
    shape: tuple[Any, ...]
    least: Mapping[str, int]
    flagged: bool
    apart: bool

    def record(self) -> dict[str, Any]:
        """Returns what `of_record` takes. Raises: ValueError for an output that is no tensor or number."""
        return {
            "form": _FORM,
            "graph": self.graph,
            "shares": [[s.start, s.stop, s.entry] for s in self.shares],
            "inputs": [[i.number, i.each, i.row] for i in self.inputs],
            "outputs": list(self.outputs),
            "booleans": list(self.booleans),
            "joined": list(self.joined),
            "shape": _written(self.shape),
            "least": dict(self.least),
            "flagged": self.flagged,
            "apart": self.apart,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Binding:
        """Reads a record. Raises: KeyError, TypeError, ValueError."""
        return cls(
            str(record["graph"]),
            tuple(Share(int(a), int(b), str(e)) for a, b, e in record["shares"]),
            tuple(SessionInput(int(n), bool(each), bool(row)) for n, each, row in record["inputs"]),
            tuple(map(int, record["outputs"])),
            tuple(map(bool, record["booleans"])),
            tuple(map(bool, record["joined"])),
            tuple(_read(record["shape"])),
            {str(d): int(n) for d, n in record["least"].items()},
            bool(record["flagged"]),
            bool(record["apart"]),
        )

    def has_parts(self, number: int) -> bool:
        """Whether each member has a part of an output."""
        return self.outputs[number] == ANY or (number < len(self.joined) and self.joined[number])

    def outputs_of(self, share: Share) -> list[int]:
        """The numbers of the outputs that a session has."""
        return [k for k, member in enumerate(self.outputs) if member < 0 or member in share.members]

    def run(self, sessions: Sequence[Run]) -> Run:
        """The sessions as one function of the program's inputs. sessions: one for each share."""
        runs = [self._of_call(run, share) for run, share in zip(sessions, self.shares, strict=True)]
        return runs[0] if len(runs) == 1 else self._on_threads(runs)

    def _of_call(self, run: Run, share: Share) -> Run:
        """A session as a function of the program's inputs."""
        places = [
            (i.number, member if i.row else -1)
            for i in self.inputs
            for member in (share.members if i.each else (-1,))
        ]
        split = {number for number, row in places if row >= 0}
        if not split:
            return lambda given: run([given[number] for number, _ in places])

        def rows(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            parts = {number: given[number].unbind() for number in split}
            return run([given[number] if row < 0 else parts[number][row] for number, row in places])

        return rows

    def _on_threads(self, runs: Sequence[Run]) -> Run:
        """Runs each share of the members on a thread, and joins their outputs."""
        numbers = [self.outputs_of(share) for share in self.shares]

        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            results: list[dict[int, torch.Tensor]] = [{} for _ in runs]

            def one(k: int) -> None:
                results[k] = dict(zip(numbers[k], runs[k](given)))

            spread(one, len(runs), len(runs))
            outputs = []
            for number in range(len(self.outputs)):
                parts = [result[number] for result in results if number in result]
                if number >= len(self.joined):  # an index is out of range
                    outputs.append(next((flag for flag in parts if flag), parts[0]))
                else:
                    outputs.append(torch.cat(parts) if self.joined[number] else parts[0])
            return outputs

        return run


def _written(shape: Any) -> Any:
    if isinstance(shape, FlatOutput):
        return {"output": shape.number}
    if isinstance(shape, (list, tuple)):
        return [_written(s) for s in shape]
    if shape is None or isinstance(shape, (bool, int, float)):
        return shape
    raise ValueError(f"an output is a {type(shape).__name__}")


def _read(shape: Any) -> Any:
    if isinstance(shape, dict):
        return FlatOutput(int(shape["output"]))
    return [_read(s) for s in shape] if isinstance(shape, list) else shape


def binding_key(task: Task, onnxruntime: Any) -> str:
    """The key of a program's note; "" if its weights are in no file."""
    if not task.weights_key:
        return ""
    torchs = [torch.__version__, torch.version.git_version]
    return key_of(
        task,
        form=_FORM,
        sessions=machine(onnxruntime),
        torch=torchs,
        weights=task.weights_key,
        workers=task.workers,
    )


def find(key: str, cache: CompiledCache) -> Binding | None:
    """The note of a program whose sessions are all in the cache; None without one.

    Raises: UsageError if other users could have written it.
    """
    entry = cache.find(key)
    if entry is None:
        return None
    try:
        found = Binding.of_record(entry[1])
    except (KeyError, TypeError, ValueError):
        return None
    return found if all(s.entry and cache.find(s.entry) for s in found.shares) else None


def store(key: str, binding: Binding, cache: CompiledCache) -> None:
    """Writes a note, if all its sessions are in the cache, and the cache can be written."""
    if not all(s.entry for s in binding.shares):
        return
    try:
        record = binding.record()
        cache.remake(key, record)
    except (UsageError, ValueError):
        return


def sessions(
    binding: Binding,
    cache: CompiledCache,
    flat: Flat | None,
    graph: FoundGraph | None,
    onnxruntime: Any,
    kept: Mapping[Share, Run],
) -> list[Run]:
    """Opens the sessions. flat, graph: of those whose weights are in memory. kept: those that are open."""
    threads = 1 if len(binding.shares) > 1 else 0
    made = []
    for share in binding.shares:
        entry = cache.find(share.entry) if share.entry else None
        if share in kept:
            made.append(kept[share])
        elif entry is not None:
            booleans = [binding.booleans[k] for k in binding.outputs_of(share)]
            made.append(opened(entry[0], booleans, threads, onnxruntime))
        else:
            assert flat is not None and graph is not None
            made.append(in_memory(graph.graph, share.members, flat, onnxruntime, threads))
    return made
