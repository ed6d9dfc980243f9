"""Finds the ONNX graph of one member of a program: in this process, in the cache, or in a trusted artifact;
else writes it.

A graph says nothing of weights, of the number of members, or of how a call's inputs are divided among them.
So one graph serves all patterns of inputs and all batches with the same body (`member_inputs.py`). It is
compared with the flat graph before it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import strict_json

from ..errors import LoweringError, UsageError, WidepackError
from ..runtime.graph_module import graph_module
from ..system.compiled_cache import CompiledCache, default_folder
from .covering import agree
from .flat import Flat, filled
from .index_flags import is_flagged
from .member_inputs import first_member
from .member_loops import FlatOutput
from .onnx_repeat import MemberGraph, repeated
from .onnx_session import Run, options, session
from .task import Task, Unavailable, first_cause
from .variants import Checked, Variant

FILE = "member.onnx"
MOST_UNASKED = 1000
"""The most nodes of a member that a load writes as ONNX without being asked; each takes about 10 ms."""
_FORM = 1
_SIZES = (1, 2, 5)  # the graph has no condition on sizes
_MOST = 64
_known: dict[str, FoundGraph] = {}


@dataclass(frozen=True)
class FoundGraph:
    """A member's graph. content: the digest of the program that it is of. key: the same with the version of
    torch that wrote it. least: as in `covering.agree`. place: its folder in the cache; None if it is in no
    folder.
    """

    content: str
    key: str
    graph: MemberGraph
    least: dict[str, int]
    place: Path | None = None


def found_graph(task: Task, flat: Flat, onnxruntime: Any) -> FoundGraph:
    """Returns the graph of a program.

    flat: the program, with names by their order. Raises: Unavailable without the packages that write it;
    LoweringError if ONNX cannot express it.
    """
    content = _content(task, flat)
    torchs = [torch.__version__, str(torch.version.git_version)]
    key = strict_json.digest([content, *torchs]).removeprefix("sha256:")
    if key in _known:
        return _known[key]
    found = _stored(task, flat, content, key, onnxruntime)
    while len(_known) >= _MOST:
        _known.pop(next(iter(_known)))
    _known[key] = found
    return found


def forget() -> None:
    """Forgets the graphs that this process found."""
    _known.clear()


def graph_in(place: Path) -> dict[str, bytes]:
    """The graph of an entry of the cache, by the digest of the program that it is of; empty without one."""
    entry = CompiledCache(place.parent).find(place.name)
    if entry is None or "content" not in entry[1]:
        return {}
    return {str(entry[1]["content"]): (entry[0] / FILE).read_bytes()}


def _content(task: Task, flat: Flat) -> str:
    """The digest of all that a graph depends on, beside the packages that write it."""
    loops = flat.loops
    parts = {
        "form": _FORM,
        "program": flat.program.to_json(),
        "weights": [[str(w.dtype), list(w.shape)] for w in flat.weights],
        "each": sorted([*loops.weights, *loops.inputs]) if loops else [],
        "borders": [sorted(loops.selects), sorted(loops.joins)] if loops else [],
        "outputs": list(loops.outputs) if loops else [],
        "dims": {d: [least, most] for d, (least, most, _) in task.dims.items()},
        "guards": list(task.guards),
    }
    return strict_json.digest(parts).removeprefix("sha256:")


def _stored(task: Task, flat: Flat, content: str, key: str, onnxruntime: Any) -> FoundGraph:
    cache = CompiledCache(task.cache or default_folder())
    if (entry := cache.find(key)) is not None:
        place, record = entry
        graph = MemberGraph.of_file((place / FILE).read_bytes())
        least = {str(d): int(n) for d, n in record["least"].items()}
        return FoundGraph(content, key, graph, least, place)
    made: list[FoundGraph] = []

    def write(folder: Path) -> dict[str, Any]:
        graph, least = _of_artifact(task, flat, content, onnxruntime) or _written(task, flat, onnxruntime)
        made.append(FoundGraph(content, key, graph, least))
        (folder / FILE).write_bytes(graph.file())
        return {"form": _FORM, "title": task.title, "content": content, "least": least}

    try:
        place, _ = cache.make(key, write)
    except UsageError:
        if not made:
            raise
        return made[0]  # the cache cannot be written
    if made:
        return replace(made[0], place=place)
    return _stored(task, flat, content, key, onnxruntime)  # another process wrote it


def _of_artifact(
    task: Task, flat: Flat, content: str, onnxruntime: Any
) -> tuple[MemberGraph, dict[str, int]] | None:
    """The artifact's graph, if the artifact is trusted, and if its answers are right."""
    data = task.graph(content)
    if data is None:
        return None
    try:
        graph = MemberGraph.of_file(data)
        return graph, _compared(task, flat, graph, onnxruntime)
    except Exception:  # noqa: BLE001  it is written anew
        return None


def _written(task: Task, flat: Flat, onnxruntime: Any) -> tuple[MemberGraph, dict[str, int]]:
    """Writes a graph, and compares it with the flat graph. Raises: Unavailable, LoweringError."""
    if not task.compile and (nodes := len(flat.program.nodes)) > MOST_UNASKED:
        raise Unavailable(
            f"{task.title} has {nodes:,} nodes for one member, and a load writes at most {MOST_UNASKED:,} as "
            "ONNX without being asked.\n`widepack compile ARTIFACT --backend onnxruntime` writes them once, "
            "load(compile='now') writes them here, and backend='eager' needs no file."
        )
    if task.progress:
        task.progress(f"writing {task.title} as ONNX", 0, 1)
    dims = {d: (least, most) for d, (least, most, _) in task.dims.items()}
    try:
        from .onnx_model import member_graph, onnx_model

        made = onnx_model(flat, task.device, dims, task.example, task.title, flags=True)
        graph = member_graph(flat, made)
        return graph, _compared(task, flat, graph, onnxruntime)
    except WidepackError:
        raise
    except ImportError as e:
        raise Unavailable(
            f"writing ONNX needs the packages onnx and onnxscript ({e}): pip install 'widepack[onnx]', or "
            "load with backend='eager'"
        ) from e
    except Exception as e:
        raise LoweringError(
            f"torch {torch.__version__} cannot write {task.title} as an ONNX file that ONNX Runtime "
            f"runs: {first_cause(e)}; load with backend='eager'"
        ) from e


def _compared(task: Task, flat: Flat, graph: MemberGraph, onnxruntime: Any) -> dict[str, int]:
    """Compares a graph with the flat graph. Returns: as `agree`. Raises: LoweringError, and what ONNX Runtime
    raises.
    """
    loops, slots = flat.loops, flat.program.inputs
    one = loops is not None and flat.program.members == 1
    members = range(1 if one or loops is None else loops.members)
    takes = flat.takes or range(len(slots))
    rows = {i.name: loops is not None and loops.inputs.get(slots[i.number].name) for i in graph.inputs}
    session_run = in_memory(graph, members, flat, onnxruntime)

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return session_run(
            [
                given[takes[i.number]][m] if rows[i.name] else given[takes[i.number]]
                for i in graph.inputs
                for m in (members if i.each else (-1,))
            ]
        )

    return compared(task, flat, run, one)


def compared(task: Task, flat: Flat, run: Run, one: bool) -> dict[str, int]:
    """Compares a session with the flat graph. one: whether it is of the first member alone. Returns: as
    `agree`. Raises: LoweringError.
    """
    what, flagged = "ONNX Runtime's answer", is_flagged(flat.program)
    if not one:
        whole = Checked(task, flat.shape, [Variant(run)], flagged=flagged)
        return agree(task, whole, task.eager, what, others=_SIZES)
    graph = graph_module(flat.program, task.device)
    assert flat.loops is not None
    numbers = [k for k, member in enumerate(flat.loops.outputs) if member <= 0]
    shape = [_of_first(s, numbers) for s in flat.shape]

    def eager(*inputs: torch.Tensor) -> list[Any]:
        outputs = graph.forward(*flat.weights, *first_member(flat, list(inputs)))
        return [filled(s, outputs) for s in shape]

    def found(*inputs: torch.Tensor) -> list[Any]:
        outputs = run([x.contiguous() for x in inputs])
        if flagged and outputs[-1]:
            return eager(*inputs)
        places = dict(zip(numbers, outputs))
        return [
            filled(s, [places.get(k, outputs[0]) for k in range(len(flat.program.outputs))]) for s in shape
        ]

    return agree(task, found, eager, what, others=_SIZES)


def _of_first(shape: Any, numbers: Sequence[int]) -> Any:
    """The shape of an output without the values of other members than the first."""
    if not isinstance(shape, (list, tuple)):
        return shape
    return [s for s in shape if not isinstance(s, FlatOutput) or s.number in numbers]


def in_memory(graph: MemberGraph, members: range, flat: Flat, onnxruntime: Any, threads: int = 0) -> Run:
    """A session of some members whose weights are in memory."""
    weights = {name: flat.weight(number, member) for name, number, member in graph.weights_of(members)}
    booleans = [graph.booleans[k] for k in graph.outputs_of(members)]
    return session(repeated(graph, members), booleans, weights, onnxruntime, options(onnxruntime, threads))
