"""`widepack.load`: artifact -> `WideModel`. Reads JSON and safetensors only; imports no module that a file names, and the rules only when it has to lower."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.writer import Reader, opened
from widepack_artifacts.weights import Weights

from .. import backends
from ..ir import ops
from ..runtime.admission import guarded
from ..system.readahead import read_headers
from .cast import Cast
from ..spec.dtypes import find_dtype
from ..errors import UsageError
from .open_artifact import Held, Running
from ..spec.names import numbers_of, path_of
from ..system.progress import Report
from .model import WideModel

MOST_LIMIT = 1e12
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
VERIFY = ("sizes", "hashes", "off")


def load(
    path: str | PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    members: Sequence[int | str] | None = None,
    strategies: str | Sequence[str] | None = None,
    simplify: bool = True,
    backend: str = "auto",
    verify: str = "sizes",
    expect: str | None = None,
    prologue: bool = True,
    warmup: bool = True,
    threads: int | None = None,
    compile: str | None = None,
    cache: str | PathLike[str] | None = None,
    progress: Report | None = None,
    limit: float | None = 1.0,
    allow_ops: Sequence[Any] = (),
) -> WideModel:
    """Open an artifact.

    path: the folder. device: where to run; default the CPU. dtype: `bf16`, `fp16`, `fp32` or another name of a dtype: weights are cast on the device and programs lowered
    again for it, inputs are taken in it, and answers are held to what the members' own programs do in it; the files stay as they are. members: some of them, by number or name. strategies: None for the artifact's plans, or what
    `build --strategy` takes: the programs are lowered again then. simplify: False lowers them again as they were captured (with strategies
    `auto` where none are given), to see what simplification gains. backend: `auto` (what the plan names where it can run here, else `eager`), `eager`, `compile`,
    `aot` or `onnxruntime`. compile: None never compiles; `now` compiles what is not in the cache, at load and when another pattern is first called. cache: the
    folder of compiled programs; default `WIDEPACK_CACHE`, else one in the user's cache. verify: `sizes` (of all files), `hashes` (of all files), `off`
    (the manifest's digest and the programs' hashes are always checked). expect: the manifest's digest, `sha256:...`, pins a deployment. prologue: run nodes that
    depend on weights alone once, now; False keeps every weight in the mapped file. warmup: bind the programs of pattern `shared` and run the probe now, not at
    the first call. threads: torch's threads for the process, and ONNX Runtime's. progress: called with (stage, done, total) while something compiles.
    limit: how many times the memory and work that its files justify a load may take (walk.py); None lifts it, for artifacts whose makers are trusted.
    allow_ops: ops of other libraries (`mylib::op`) that the artifact's programs may ask for; a library's op may do anything with what a file says, so name those that can bear it.

    Returns: a WideModel. Raises: ArtifactError for what is damaged, not what it says, or asks for too much; ProbeError, which is one, when the probe fails here; UsageError.
    """
    if verify not in VERIFY:
        raise UsageError(f"verify={verify!r} is unknown; known: {', '.join(VERIFY)}")
    if backend != "auto" and backend not in backends.NAMES:
        raise UsageError(f"backend={backend!r} is unknown; known: auto, {', '.join(backends.NAMES)}")
    if compile not in (None, "now"):
        raise UsageError(f"compile={compile!r} is unknown; known: None, which never compiles, and 'now'")
    if cache is not None and not isinstance(cache, (str, PathLike)):
        raise UsageError(f"cache is a {type(cache).__name__}; give the folder of compiled programs")
    if not isinstance(simplify, bool):
        raise UsageError(f"simplify={simplify!r} is unknown; known: True, and False, which lowers the programs again as they were captured")
    if threads is not None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise UsageError(f"threads={threads!r} is no number of threads; give a whole number from 1")
        torch.set_num_threads(threads)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= MOST_LIMIT):
        said = f"a number of {limit.bit_length()} bits" if isinstance(limit, int) and limit.bit_length() > 64 else repr(limit)
        raise UsageError(
            f"limit={said} is no limit; give a number over 0 and up to {MOST_LIMIT:g}, how many times the usual memory and work a load may take, or None for any"
        )
    if expect is not None and not (isinstance(expect, str) and _DIGEST.match(expect)):
        raise UsageError(
            f"expect={repr(expect)[:100]} is no digest of an artifact; give sha256: and 64 hex digits in lower case, as `widepack inspect` shows it"
        )
    extra = ops.allow(allow_ops)
    path = path_of(path)
    where = on_device(device)
    running = Running(backend, compile == "now", None if cache is None else Path(cache), progress)
    wanted_dtype = find_dtype(dtype)
    wanted = "auto" if strategies is None and not simplify else strategies

    def hold(reader: Reader) -> Held:
        """All that is read of the artifact, now or later: another one may be published at the path while this one is loaded, or long after."""
        if verify == "sizes":
            reader.check_sizes()
        elif verify == "hashes":
            reader.check_hashes()
        if members is not None:
            read_headers(reader.weights_files())
        weights = Weights(reader.weights_files())
        weights.check(reader.manifest.weights, len(reader.manifest.members))
        entries = reader.manifest.entries.values()
        reader.hold(w.file for e in entries for w in e.wide if w.device == where.type)
        reader.hold(name for e in entries for name in e.member)
        return Held(
            reader,
            weights,
            _chosen(reader, members),
            where,
            prologue=prologue,
            strategies=wanted,
            verified=verify != "off",
            running=running,
            simplify=simplify,
            limit=limit,
            cast=None if wanted_dtype is None else Cast.of(reader.manifest, wanted_dtype),
        )

    with guarded(str(path)):
        held = opened(path, hold, expect, extra)[1]
        model = WideModel(held)
        held.loading = warmup
        if warmup:
            model.warmup()
        held.loading = False
        held.lowering.made.clear()
    return model


def on_device(device: str | torch.device | None) -> torch.device:
    """A device that is there; cpu without one. Raises: UsageError."""
    try:
        found = torch.device(device or "cpu")
    except RuntimeError as e:
        raise UsageError(f"device {device!r}: {str(e).splitlines()[0]}") from e
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(device)!r}: artifacts run on cpu and cuda")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {device!r}: this torch ({torch.__version__}) sees no CUDA device; use 'cpu', or install a CUDA build of torch")
        return torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
    if found.index:
        raise UsageError(f"device {str(device)!r}: there is one CPU, 'cpu'")
    return found


def _chosen(reader: Reader, members: Sequence[int | str] | None) -> list[int]:
    names = [m.name for m in reader.manifest.members]
    if members is None:
        return list(range(len(names)))
    if not isinstance(members, (str, int)) and not members:
        raise UsageError("members is empty; name at least one, or leave it out for all")
    return numbers_of(names, members)
