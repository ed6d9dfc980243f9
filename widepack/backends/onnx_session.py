"""Provides the backend `onnxruntime`: an ONNX Runtime session for the main part of a wide program (the extra
`onnx`).

1. The ONNX file is written once, into the cache, without weights. A weight of the artifact is a reference
   into the weights file, by offset; a derived weight is a reference without a file. The session gets all of
   them from memory, also from the pages of the mapped file, without a copy.
2. Inputs and outputs pass by DLPack, without a copy. An op uses as many threads as torch's ops.
3. If the plan runs the members of a loop on several threads, a session of one thread runs each thread's
   share of them. That is faster than threads within an op, and than ONNX Runtime's own parallel mode.
4. Named dims stay dynamic. Before the file is stored, and again by the artifact's probe, answers are checked
   against the flat graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, LoweringError, WidepackError
from ..system.threads import spread
from .covering import agree, key_of, refuse_other_devices, stored
from .flat import Flat, flatten_loops
from .index_flags import is_flagged
from .member_loops import border_source, is_divisible
from .onnx_model import Run, external_tensor, in_order, onnx_model, session, where_mapped
from .task import Task, Unavailable, first_cause, first_line
from .variants import Checked, Variant

NAME = "onnxruntime"
COPIES = True
MODEL = "program.onnx"
MADE = "made-by-the-prologue"  # the file name of derived weights, which are in no file
_FORM = 6


def bind(task: Task) -> Checked:
    """Binds a session, and writes the ONNX file first if the task allows that.

    Raises: Unavailable without the package, or without a file if it may not be written now; LoweringError if
    ONNX cannot express the program.
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
    shares = _shares(flat, task.workers)
    key = key_of(  # the processor is not part of it: a session is made for each
        task,
        form=_FORM,
        backend=NAME,
        weights=[[str(w.dtype), list(w.shape)] for w in flat.weights],
        members=sorted({len(share) for share in shares}),
        torch=[torch.__version__, torch.version.git_version],
    )
    why = (
        f"has not been written as ONNX: {{folder}} has no file of torch {torch.__version__} for it, and "
        "loading compiles only on request.\n"
        "`widepack compile ARTIFACT --backend onnxruntime` fills the cache, load(compile='now') writes it "
        "here, and backend='eager' needs no file."
    )
    place, record = stored(task, key, why, lambda folder: _write(task, flat, folder, onnxruntime, shares))
    try:
        run = _run(place, record, flat, onnxruntime, shares)
    except Exception as e:
        raise ArtifactError(
            f"{place}: ONNX Runtime {version} cannot run this file ({type(e).__name__}: "
            f"{first_line(e)}); remove the folder and make it again: `widepack compile --backend "
            "onnxruntime`"
        ) from e
    least = {str(d): int(n) for d, n in record["least"].items()}
    return Checked(
        task.device, flat, [Variant(run, (), least)], task.eager, place, flagged=is_flagged(flat.program)
    )


# ---------------------------------------------------------------- running


def _shares(flat: Flat, workers: int) -> list[range]:
    """The members that each session runs: all of them, or a share of them for each thread."""
    loops = flat.loops
    count = loops.members if loops else 0
    if loops is None or workers < 2 or not is_divisible(flat.program, loops):
        return [range(count)]
    workers = min(workers, count)
    return [range(count * k // workers, count * (k + 1) // workers) for k in range(workers)]


def _run(
    folder: Path, record: Mapping[str, Any], flat: Flat, onnxruntime: Any, shares: Sequence[range]
) -> Run:
    """Makes the sessions over the weights in memory. Returns: a function of the flat inputs to the flat
    outputs.
    """
    runs = []
    for share in shares:
        one = record["models"][str(len(share))]
        weights = {
            str(name): flat.weight(number, member if member < 0 else share.start + member)
            for name, (number, member) in one["weights"].items()
        }
        threads = 1 if len(shares) > 1 else 0
        path = folder / _file(share, flat)
        runs.append(session(path, list(one["inputs"]), list(one["booleans"]), weights, onnxruntime, threads))
    return runs[0] if len(runs) == 1 else _on_threads(runs, flat, shares)


def _file(share: range, flat: Flat) -> str:
    whole = flat.loops is None or len(share) == flat.loops.members
    return MODEL if whole else f"members-{len(share)}.onnx"


def _on_threads(runs: Sequence[Run], flat: Flat, shares: Sequence[range]) -> Run:
    """Runs each share of the members on a thread, and joins their outputs."""
    assert flat.loops is not None
    loops, inputs = flat.loops, [s.name for s in flat.program.inputs]
    sources = {border_source(n) for n in flat.program.nodes if n.name in loops.selects}
    selected = {i for i, name in enumerate(inputs) if name in sources}
    joined = [o.value.name in loops.joins for o in flat.program.outputs]

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results: list[list[torch.Tensor]] = [[] for _ in runs]

        def one(k: int) -> None:
            rows = slice(shares[k].start, shares[k].stop)
            results[k] = runs[k]([x[rows] if i in selected else x for i, x in enumerate(given)])

        spread(one, len(runs), len(runs))
        outputs = [torch.cat(parts) if all_of else parts[0] for all_of, *parts in zip(joined, *results)]
        flags = [flag for result in results for flag in result[len(joined) :]]  # an index is out of range
        return outputs + (flags and [next((f for f in flags if f), flags[0])])

    return run


# ---------------------------------------------------------------- writing


def _write(task: Task, flat: Flat, folder: Path, onnxruntime: Any, shares: Sequence[range]) -> dict[str, Any]:
    """Writes the ONNX file and compares a session of it with the flat graph.

    Gives the record. Raises: LoweringError.
    """
    if task.progress:
        task.progress(f"writing {task.title} as ONNX", 0, 1)
    try:
        sizes = {len(share): share for share in shares}
        models = {str(k): _export(task, flat, folder / _file(s, flat), k) for k, s in sizes.items()}
        record = {"form": _FORM, "title": task.title, "models": models}
        run = _run(folder, record, flat, onnxruntime, shares)
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
    return {**record, "least": agree(task, flat, Variant(run), "ONNX Runtime's answer")}


def _export(task: Task, flat: Flat, path: Path, members: int) -> dict[str, Any]:
    """Writes the ONNX file of some of the members. The weights that it names are those of the first ones."""
    import onnx_ir

    if flat.loops:
        flat = replace(flat, loops=replace(flat.loops, members=members))
    dims = {d: (least, most) for d, (least, most, _) in task.dims.items()}
    made = onnx_model(flat, task.device, dims, task.example, task.title, flags=True)
    located = task.located()
    for w in made.weights:
        weight = flat.weight(w.number, w.member)
        file, offset = where_mapped(weight, located) or (MADE, 0)
        made.give(w, external_tensor(w, file, offset, weight.nbytes))
    onnx_ir.save(made.model, path)
    return {
        "weights": {w.value.name: (w.number, w.member) for w in made.weights},
        "inputs": made.inputs,
        "booleans": made.booleans,
    }
