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

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, LoweringError, WidepackError
from ..system.compiled_cache import CompiledCache, default_folder
from .flat import Flat, flatten
from .index_flags import is_flagged
from .onnx_model import in_order, onnx_model, session, where_mapped
from .task import Task, Unavailable, first_cause, first_line, sizes_to_try, words
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
    if task.device.type != "cpu":
        raise Unavailable(
            f"backend 'onnxruntime' runs on the cpu in this version, and the model is on {task.device}; "
            "load with backend='eager'"
        )
    try:
        version = metadata.version("onnxruntime")
        import onnxruntime
    except (ImportError, metadata.PackageNotFoundError) as e:
        raise Unavailable(
            f"backend 'onnxruntime' needs the package onnxruntime ({e}): pip install 'widepack[onnx]', or "
            "load with backend='eager'"
        ) from e
    flat = flatten(task.program, task.weights, NAME, task.title)
    flat = in_order(flat)
    cache = CompiledCache(task.cache or default_folder())
    key = key_of(task, flat)
    found = cache.find(key)
    if found is None:
        if not task.compile:
            raise Unavailable(
                f"{task.title} has not been written as ONNX: {cache.folder} has no file of torch "
                f"{torch.__version__} for it, and loading compiles only on request.\n"
                "`widepack compile ARTIFACT --backend onnxruntime` fills the cache, "
                "load(compile='now') writes it here, and backend='eager' needs no file."
            )
        found = cache.make(key, lambda folder: _write(task, flat, folder, onnxruntime))
    place, record = found
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


def key_of(task: Task, flat: Flat) -> str:
    """Everything that the file depends on. The processor is not part of it: a session is made for each."""
    parts = {
        "form": _FORM,
        "backend": NAME,
        "program": task.content,
        "pattern": task.pattern,
        "weights": [[str(w.dtype), list(w.shape)] for w in flat.weights],
        "dims": {d: list(v) for d, v in task.dims.items()},
        "torch": [torch.__version__, torch.version.git_version],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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
    return {**record, "least": _agree(task, flat, run)}


def _agree(task: Task, flat: Flat, run: Any) -> dict[str, int]:
    """Checks a session against the flat graph.

    Returns: the dims at which it is wrong at size 1, with the smallest valid size. Raises: LoweringError.
    """
    least: dict[str, int] = {}
    for sizes in sizes_to_try(task):
        try:
            inputs = [x.contiguous() for x in task.inputs(sizes)]
            with torch.inference_mode():
                want = task.eager(*inputs)
        except (RuntimeError, ValueError, IndexError):
            continue  # members do not accept inputs of these sizes
        try:
            with torch.inference_mode():
                wrong = task.differ(flat.outputs(run(inputs)[: len(flat.program.outputs)]), want)
        except Exception as e:  # noqa: BLE001  a session has its own classes of errors
            wrong = f"it fails: {type(e).__name__}: {first_line(e)}"
        ones = [d for d, s in sizes.items() if s == 1 and task.example[d] != 1]
        if wrong and not ones:
            raise LoweringError(
                f"{task.title}: ONNX Runtime's answer differs from the flat graph's at "
                f"{words(sizes) or 'its sizes'}: {wrong}. It is not stored; load with backend='eager'"
            )
        least.update(dict.fromkeys(ones, 2) if wrong else {})
    return least


def _export(task: Task, flat: Flat, path: Path) -> dict[str, Any]:
    import onnx_ir

    made = onnx_model(
        flat,
        task.device,
        {d: (least, most) for d, (least, most, _) in task.dims.items()},
        task.example,
        task.title,
        flags=True,
    )
    located = task.located()
    for w in made.weights:
        weight = flat.weights[w.number]
        file, offset = where_mapped(weight, located) or (MADE, 0)
        size = weight.numel() * weight.element_size()
        made.give(
            w,
            onnx_ir.ExternalTensor(
                file, offset, size, w.dtype, shape=w.shape, name=w.value.name, base_dir=""
            ),
        )
    onnx_ir.save(made.model, path)
    return {
        "form": _FORM,
        "title": task.title,
        "weights": [w.number for w in made.weights],
        "names": [w.value.name for w in made.weights],
        "inputs": made.inputs,
        "booleans": made.booleans,
    }
