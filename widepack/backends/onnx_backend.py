"""Provides the backend `onnxruntime`: ONNX Runtime sessions for the main part of a wide program (the extra
`onnx`).

1. The ONNX graph of one member is written once, without weights, and is called once for each member in a
   session (`onnx_graphs.py`, `onnx_repeat.py`). Each member has its own weights, of which ONNX Runtime packs
   each matrix.
2. Inputs and outputs pass without a copy. An op uses as many threads as torch's ops.
3. If the plan runs the members of a loop on several threads, a session of one thread runs each thread's
   share of them. That is faster than threads within an op, and than ONNX Runtime's own parallel mode.
4. Named dims stay dynamic. Before a graph is stored, and again by the artifact's probe, answers are checked
   against the flat graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import torch

from ..errors import ArtifactError
from ..system.threads import spread
from .covering import refuse_other_devices
from .flat import Flat, flatten_loops
from .index_flags import is_flagged
from .member_inputs import canonical, with_member_inputs
from .member_loops import is_divisible
from .onnx_graphs import found_graph, in_memory
from .onnx_model import in_order
from .onnx_repeat import MemberGraph
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
    flat = in_order(flatten_loops(task.program, task.weights, NAME, task.title))
    flat = canonical(with_member_inputs(flat))
    found = found_graph(task, flat, onnxruntime)
    shares = _shares(flat, task.workers)
    try:
        threads = 1 if len(shares) > 1 else 0
        runs = [in_memory(found.graph, share, flat, onnxruntime, threads) for share in shares]
    except Exception as e:
        raise ArtifactError(
            f"{task.title}: ONNX Runtime {version} cannot run the ONNX graph of a member "
            f"({type(e).__name__}: {first_line(e)}); remove the folder {found.place}, or "
            "load with backend='eager'"
        ) from e
    run = runs[0] if len(runs) == 1 else _on_threads(runs, found.graph, flat, shares)
    variants = [Variant(run, (), found.least)]
    return Checked(task, flat.shape, variants, found.place, flagged=is_flagged(flat.program))


def _shares(flat: Flat, workers: int) -> list[range]:
    """The members that each session runs: all of them, or a share of them for each thread."""
    loops = flat.loops
    count = loops.members if loops else 0
    if loops is None or workers < 2 or not is_divisible(flat.program, loops):
        return [range(count)]
    workers = min(workers, count)
    return [range(count * k // workers, count * (k + 1) // workers) for k in range(workers)]


def _on_threads(runs: Sequence[Run], graph: MemberGraph, flat: Flat, shares: Sequence[range]) -> Run:
    """Runs each share of the members on a thread, and joins their outputs."""
    assert flat.loops is not None
    joined = [o.value.name in flat.loops.joins for o in flat.program.outputs]
    numbers = [graph.outputs_of(share) for share in shares]

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results: list[dict[int, torch.Tensor]] = [{} for _ in runs]

        def one(k: int) -> None:
            results[k] = dict(zip(numbers[k], runs[k](given)))

        spread(one, len(runs), len(runs))
        outputs = []
        for number in range(len(graph.outputs)):
            parts = [result[number] for result in results if number in result]
            if number >= len(joined):  # an index is out of range
                outputs.append(next((flag for flag in parts if flag), parts[0]))
            else:
                outputs.append(torch.cat(parts) if joined[number] else parts[0])
        return outputs

    return run
