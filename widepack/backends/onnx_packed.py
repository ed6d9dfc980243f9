"""Keeps sessions with their packed weights in the cache, so that a load maps them from a file.

ONNX Runtime packs matrices for the instructions of the processor. In memory the packed copy stands beside the
plain one. Here both are written once, and a session of that file maps it: processes share its pages, and of
the plain weights no page is read. A session of one member maps the same file. The file belongs to one
processor and one version of ONNX Runtime, which are a part of its key, and to the values of the weights.
Sessions of one graph and of the same weights are one session in a process, whichever patterns and batches
they are for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import strict_json

from ..errors import UsageError
from ..system.compiled_cache import CompiledCache
from ..system.machine import instructions
from ..system.memory import give_back
from .flat import Flat
from .onnx_parts import SessionFile
from .onnx_repeat import MemberGraph, repeated
from .onnx_session import Run, options, session

MODEL, MEMBERS, WEIGHTS = "session.onnx", "members.onnx", "weights.bin"
"""The files of an entry: the session of all its members, what sessions of single members are taken from, and
the weights of both.
"""
_FORM = 2
_open: weakref.WeakValueDictionary[tuple[str, str, int], Any] = weakref.WeakValueDictionary()


def machine(onnxruntime: Any) -> list[str]:
    """What packed weights depend on, beside the weights."""
    return [str(onnxruntime.__version__), instructions()]


def packed(
    graph: MemberGraph, key: str, members: range, flat: Flat, cache: CompiledCache, onnxruntime: Any
) -> str:
    """Writes a session of some members into the cache, if it is not there.

    key: of the graph. Returns: the key of the entry; "" if there is no place for it.
    """
    weights = {name: flat.weight(number, member) for name, number, member in graph.weights_of(members)}
    size = sum(w.nbytes for w in weights.values())
    parts = [_FORM, key, len(members), _digest(list(weights.values())), machine(onnxruntime)]
    entry = strict_json.digest(parts).removeprefix("sha256:")

    def write(folder: Path) -> dict[str, Any]:
        made = options(onnxruntime, 1)
        made.optimized_model_filepath = str(folder / MODEL)
        made.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
        made.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
        session(repeated(graph, members, apart=True), None, weights, onnxruntime, made)
        give_back()  # its packed weights: they are mapped from the file from now on
        os.replace(folder / MODEL, folder / MEMBERS)
        file = SessionFile((folder / MEMBERS).read_bytes())
        whole = file.outputs[: len(graph.outputs_of(members))]
        (folder / MODEL).write_bytes(file.part(file.inputs, whole))
        return {"form": _FORM, "weights": size}

    try:
        cache.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if free_bytes(cache.folder) < 3 * size:
            return ""
        cache.make(entry, write)
    except (OSError, UsageError):
        return ""  # the cache cannot be written
    return entry


def opened(place: Path, booleans: Sequence[bool], threads: int, onnxruntime: Any) -> Run:
    """The session of an entry. place: its folder. threads: 0 means torch's number. Raises: whatever ONNX
    Runtime raises.
    """
    return opened_part(place / MODEL, place, "", booleans, threads, onnxruntime)


def opened_part(
    file: Path | bytes, place: Path, name: str, booleans: Sequence[bool], threads: int, onnxruntime: Any
) -> Run:
    """A session over the weights of an entry. file: the ONNX file, or its content. name: of the part in the
    entry. Raises: whatever ONNX Runtime raises.
    """
    known = str(place), name, threads or torch.get_num_threads()
    run: Any = _open.get(known)
    if run is None:
        made = options(onnxruntime, threads)
        made.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if isinstance(file, bytes):  # there the files of weights are looked for
            made.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
            made.enable_cpu_mem_arena = False  # each would keep the memory of its largest call
        run = _open[known] = session(file, booleans, {}, onnxruntime, made)
    found: Run = run
    return found


def free_bytes(folder: Path) -> int:
    """The space for files in a folder."""
    return shutil.disk_usage(folder).free


def forget() -> None:
    """Forgets the sessions that others still use: the next ones are opened again."""
    _open.clear()


def _digest(weights: Sequence[torch.Tensor]) -> str:
    """The digest of the values of weights."""
    found = hashlib.sha256()
    for w in weights:
        flat = w.detach().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return found.hexdigest()
