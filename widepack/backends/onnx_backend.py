"""Provides the backend `onnxruntime`: ONNX Runtime sessions for the main part of a wide program (the extra
`onnx`).

1. The ONNX graph of one member is written once, without weights, and is called once for each member in a
   session (`onnx_graphs.py`, `onnx_repeat.py`). Each member has its own weights, of which ONNX Runtime packs
   each matrix. Packed weights are mapped from the cache (`onnx_packed.py`).
2. Inputs and outputs pass without a copy. An op uses as many threads as torch's ops.
3. If the plan runs the members of a loop on several threads, a session of one thread runs each thread's
   share of them. That is faster than threads within an op, and than ONNX Runtime's own parallel mode.
4. Named dims stay dynamic. Before a graph is stored, and again by the artifact's probe, answers are checked
   against the flat graph.
5. A call of one member alone runs a session of that member, over the same packed weights
   (`onnx_member_sessions.py`).
6. What was bound is noted in the cache. The next load opens its sessions, without the weights of the artifact
   and without the packages that write ONNX (`onnx_binding.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, WidepackError
from ..system.compiled_cache import CompiledCache, default_folder
from .covering import refuse_other_devices
from .flat import Flat, flatten_loops, in_order
from .index_flags import is_flagged
from .member_inputs import canonical, with_member_inputs
from .member_loops import FlatOutput, is_divisible
from .onnx_binding import Binding, SessionInput, Share, binding_key, find, sessions, store
from .onnx_graphs import FoundGraph, found_graph
from .onnx_member_sessions import MemberSessions
from .onnx_packed import packed
from .onnx_session import Run
from .task import Task, Unavailable, first_line
from .variants import Checked, Variant

NAME = "onnxruntime"
COPIES = True


def bind(task: Task) -> Checked:
    """Binds sessions, and writes the ONNX graph first if there is none.

    Raises: Unavailable without the packages; LoweringError if ONNX cannot express the program.
    """
    refuse_other_devices(task, NAME)
    try:
        version = metadata.version("onnxruntime")
        import onnxruntime
    except (ImportError, metadata.PackageNotFoundError) as e:
        raise Unavailable(
            f"backend 'onnxruntime' needs the package onnxruntime ({e}): pip install 'widepack[onnx]', or "
            "load with backend='eager'"
        ) from e
    cache = CompiledCache(task.cache or default_folder())
    try:
        return _bound(task, cache, onnxruntime)
    except WidepackError:
        raise
    except Exception as e:
        raise ArtifactError(
            f"{task.title}: ONNX Runtime {version} cannot run what is in the cache ({type(e).__name__}: "
            f"{first_line(e)}); remove the folder {cache.folder}, or load with backend='eager'"
        ) from e


def _bound(task: Task, cache: CompiledCache, onnxruntime: Any) -> Checked:
    """Opens the sessions that the cache notes for a program, or makes them."""
    key = binding_key(task, onnxruntime)
    if key and (known := find(key, cache)) is not None:
        runs = sessions(known, cache, None, None, onnxruntime, {})
        return _checked(task, known, runs, cache, onnxruntime, cache.folder / known.graph)
    flat = in_order(flatten_loops(task.program, task.weights(), NAME, task.title))
    flat = canonical(with_member_inputs(flat))
    found = found_graph(task, flat, onnxruntime)
    binding = _binding(task, flat, found, cache, onnxruntime)
    store(key, binding, cache)
    kept = _unchanged(task, binding)
    runs = sessions(binding, cache, flat, found, onnxruntime, kept)
    return _checked(task, binding, runs, cache, onnxruntime, found.place)


def _binding(task: Task, flat: Flat, found: FoundGraph, cache: CompiledCache, onnxruntime: Any) -> Binding:
    """Decides which sessions run which members, and packs their weights if these are in files."""
    graph, shares = found.graph, []
    for members in _shares(flat, task.workers):
        entry = packed(graph, found.key, members, flat, cache, onnxruntime) if task.weights_key else ""
        shares.append(Share(members.start, members.stop, entry))
    loops, slots = flat.loops, flat.program.inputs
    rows = loops.inputs if loops else {}
    inputs = [
        SessionInput(
            flat.takes[i.number] if flat.takes else i.number, i.each, rows.get(slots[i.number].name, False)
        )
        for i in graph.inputs
    ]
    return Binding(
        found.key,
        tuple(shares),
        tuple(inputs),
        tuple(member for _, member in graph.outputs),
        graph.booleans,
        tuple(loops is not None and o.value.name in loops.joins for o in flat.program.outputs),
        flat.shape,
        found.least,
        is_flagged(flat.program),
        _apart(task, flat, inputs),
    )


def _apart(task: Task, flat: Flat, inputs: Sequence[SessionInput]) -> bool:
    """Whether a member's outputs depend on its own inputs and weights alone."""
    loops, slots = flat.loops, task.program.inputs
    if loops is None or not is_divisible(flat.program, loops):
        return False
    if not all(i.row or slots[i.number].kind == "shared" for i in inputs):
        return False
    for shape, output in zip(flat.shape, task.program.outputs):
        if isinstance(shape, FlatOutput):
            value = flat.program.outputs[shape.number].value.name
            if value not in loops.joins and output.kind != "shared":
                return False
        elif not isinstance(shape, list) or not all(
            isinstance(s, FlatOutput) and loops.outputs[s.number] == member for member, s in enumerate(shape)
        ):
            return False
    return True


class Sessions(Checked):
    """Sessions as a function. binding: how they run the program. runs: the sessions."""

    binding: Binding
    runs: Sequence[Run]


def _checked(
    task: Task,
    binding: Binding,
    runs: Sequence[Run],
    cache: CompiledCache,
    onnxruntime: Any,
    place: Path | None,
) -> Sessions:
    variants = [Variant(binding.run(runs), (), binding.least)]
    made = Sessions(task, binding.shape, variants, place, flagged=binding.flagged)
    made.binding, made.runs = binding, runs
    before = task.before.members if task.before is not None else None
    known = before if isinstance(before, MemberSessions) else None
    made.members = MemberSessions(task, binding, cache, onnxruntime, known)
    return made


def _unchanged(task: Task, binding: Binding) -> dict[Share, Run]:
    """The sessions of what was bound before whose members are the same: those of other threads' shares."""
    before = task.before
    if not isinstance(before, Sessions) or before.binding.graph != binding.graph:
        return {}
    if len(binding.shares) < 2:  # one session runs all members
        return {}
    members = [(s.start, s.stop) for s in binding.shares]
    if members != [(s.start, s.stop) for s in before.binding.shares]:
        return {}
    pairs = zip(binding.shares, before.runs)
    return {share: run for share, run in pairs if task.member not in share.members}


def _shares(flat: Flat, workers: int) -> list[range]:
    """The members that each session runs: all of them, or a share of them for each thread."""
    loops = flat.loops
    count = loops.members if loops else 0
    if loops is None or workers < 2 or not is_divisible(flat.program, loops):
        return [range(count)]
    workers = min(workers, count)
    return [range(count * k // workers, count * (k + 1) // workers) for k in range(workers)]
