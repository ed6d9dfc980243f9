"""Provides the backend `onnxruntime`: an ONNX Runtime session for the main part of a wide program (the extra
`onnx`).

1. The ONNX file is written once, into the cache, without weights. A weight of the artifact is a reference
   into the weights file, by offset; a derived weight is a reference without a file. The session gets all of
   them from memory, also from the pages of the mapped file, without a copy.
2. Inputs and outputs pass by DLPack, without a copy. An op uses as many threads as torch's ops.
3. Named dims stay dynamic. Before the file is stored, and again by the artifact's probe, answers are checked
   against the flat graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, LoweringError, WidepackError
from .covering import agree, key_of, refuse_other_devices, stored
from .flat import Flat, flatten
from .index_flags import is_flagged
from .onnx_model import external_tensor, in_order, onnx_model, session, where_mapped
from .task import Task, Unavailable, first_cause, first_line
from .variants import Checked, Variant

NAME = "onnxruntime"
COPIES = True
MODEL = "program.onnx"
MADE = "made-by-the-prologue"  # the file name of derived weights, which are in no file
_FORM = 5


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
    flat = in_order(flatten(task.program, task.weights, NAME, task.title))
    key = key_of(  # the processor is not part of it: a session is made for each
        task,
        form=_FORM,
        backend=NAME,
        weights=[[str(w.dtype), list(w.shape)] for w in flat.weights],
        torch=[torch.__version__, torch.version.git_version],
    )
    why = (
        f"has not been written as ONNX: {{folder}} has no file of torch {torch.__version__} for it, and "
        "loading compiles only on request.\n"
        "`widepack compile ARTIFACT --backend onnxruntime` fills the cache, load(compile='now') writes it "
        "here, and backend='eager' needs no file."
    )
    place, record = stored(task, key, why, lambda folder: _write(task, flat, folder, onnxruntime))
    try:
        run = _session(place / MODEL, record, flat, onnxruntime, task.workers)
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


def _session(path: Path, record: Mapping[str, Any], flat: Flat, onnxruntime: Any, workers: int = 0) -> Any:
    """A session over the weights in memory: flat inputs -> flat outputs.

    workers: how many ops at once, each on a thread of its own; 0 for one, on all threads.
    """
    weights = {str(name): flat.weights[i] for name, i in zip(record["names"], record["weights"])}
    return session(path, list(record["inputs"]), list(record["booleans"]), weights, onnxruntime, workers)


# ---------------------------------------------------------------- writing


def _write(task: Task, flat: Flat, folder: Path, onnxruntime: Any) -> dict[str, Any]:
    """Writes the ONNX file and compares a session of it with the flat graph.

    Gives the record. Raises: LoweringError.
    """
    if task.progress:
        task.progress(f"writing {task.title} as ONNX", 0, 1)
    try:
        record = _export(task, flat, folder / MODEL)
        run = _session(folder / MODEL, record, flat, onnxruntime)
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


def _export(task: Task, flat: Flat, path: Path) -> dict[str, Any]:
    import onnx_ir

    dims = {d: (least, most) for d, (least, most, _) in task.dims.items()}
    made = onnx_model(flat, task.device, dims, task.example, task.title, flags=True)
    located = task.located()
    for w in made.weights:
        file, offset = where_mapped(flat.weights[w.number], located) or (MADE, 0)
        made.give(w, external_tensor(w, file, offset, flat.weights[w.number].nbytes))
    onnx_ir.save(made.model, path)
    return {
        "form": _FORM,
        "title": task.title,
        "weights": [w.number for w in made.weights],
        "names": [w.value.name for w in made.weights],
        "inputs": made.inputs,
        "booleans": made.booleans,
    }
