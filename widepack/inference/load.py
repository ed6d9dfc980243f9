"""Loads an artifact on one device and returns a `WideModel`: `widepack.load` does it for each device.

Only JSON and safetensors are read. No module that a file names is imported. The rules are imported only if a
program has to be lowered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.program_limit import ProgramLimit
from widepack_artifacts.reader import Reader, opened
from widepack_artifacts.weights import Weights

from .. import backends
from ..errors import UsageError
from ..ir import ops
from ..runtime.admission import guarded
from ..spec.dtypes import find_dtype
from ..spec.names import numbers_of, path_of
from ..system.autocast import plain_modes
from ..system.gate import Gate
from ..system.memory import keep_freed
from ..system.progress import Report
from ..system.readahead import read_headers
from .cast import Cast
from .graph_pool import GraphPool, graph_pool
from .int8_request import check_artifact, check_loaded, check_options, int8_request
from .merged_weights import MEMORY
from .model import WideModel
from .open_artifact import BackendOptions, LoadOptions, OpenArtifact

MOST_LIMIT = 1e12
"""The largest `limit` of a load."""

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
    memory: str = "auto",
    weights: str | None = None,
    max_error: float | None = None,
    graph: bool | str = False,
    gate: Gate | None = None,
) -> WideModel:
    """Loads an artifact on one device.

    Args:
        path, device: The artifact's folder, and one device.
        dtype, members, strategies, simplify, backend, verify, expect, prologue, warmup, threads, compile: As
            `widepack.load` takes them.
        cache, progress, limit, allow_ops, memory, weights, max_error, graph: The same.
        gate: What calls pass and a swap closes. Models that answer calls together share one.

    Raises:
        ArtifactError, UsageError, VerificationError: As `widepack.load`.
    """
    int8 = int8_request(weights, max_error)
    _check_choices(verify, backend, compile, cache, simplify, memory)
    _check_limit(limit)
    check_expected(expect)
    if threads is not None:
        _set_threads(threads)
    again = partial(
        load,
        Path(path_of(path)).absolute(),
        device=device,
        dtype=dtype,
        members=members,
        strategies=strategies,
        simplify=simplify,
        backend=backend,
        verify=verify,
        prologue=prologue,
        warmup=False,
        compile=compile,
        cache=cache,
        limit=limit,
        allow_ops=allow_ops,
        memory=memory,
        weights=weights,
        max_error=max_error,
        graph=graph,
    )
    extra = ops.allow(allow_ops)
    path, place = path_of(path), on_device(device)
    if int8 is not None:
        check_options(place, backend, compile, strategies, prologue, verify)
        backend = "eager"
    options = LoadOptions(
        device=place,
        prologue=prologue,
        strategies="auto" if strategies is None and not simplify else strategies,
        simplify=simplify,
        verified=verify != "off",
        backend=BackendOptions(backend, compile == "now", None if cache is None else Path(cache), progress),
        limit=limit,
        memory=memory,
        int8=int8,
    )
    if options.device.type == "cpu" and memory != "least":
        keep_freed()
    opening = _Opening(options, verify, members, find_dtype(dtype), gate, graph_pool(graph, place))
    with plain_modes(), guarded(str(path)):
        artifact = opened(path, opening, expect, extra)[1]
        model = WideModel(artifact, partial(again, expect=artifact.manifest.digest))
        with artifact.limits.one_load(warmup):
            if warmup:
                model.warmup()
                if int8 is not None:
                    check_loaded(model)
    return model


@dataclass(frozen=True)
class _Opening:
    """Reads all that a load needs of an artifact, now or later.

    Another artifact may be published at the path while this one is loaded, or later.
    """

    options: LoadOptions
    verify: str
    members: Sequence[int | str] | None
    dtype: torch.dtype | None
    gate: Gate | None
    graphs: GraphPool | None

    def __call__(self, reader: Reader) -> OpenArtifact:
        if self.verify == "sizes":
            reader.check_sizes()
        elif self.verify == "hashes":
            reader.check_hashes()
        if self.members is not None:
            read_headers(reader.weights_files())
        if self.options.limit is not None:
            reader.limit = ProgramLimit(self.options.limit)
        manifest, device = reader.manifest, self.options.device
        corrections = manifest.factored.corrections
        files = Weights(
            reader.weights_files(), manifest.factored, reader.path(corrections) if corrections else None
        )
        files.check(manifest.weights, len(manifest.members))
        entries = manifest.entries.values()
        chosen = chosen_members(reader.manifest, self.members)
        cast = None if self.dtype is None else Cast.of(manifest, self.dtype)
        if self.options.int8 is not None:
            check_artifact(manifest, cast)
        artifact = OpenArtifact(
            reader, files, chosen, replace(self.options, cast=cast), self.gate, self.graphs
        )
        wides = [w for e in entries for w in e.wide if w.device == device.type]
        reader.preload(w.file for w in wides if artifact.serves(w))
        reader.preload(name for e in entries for name in e.member)
        return artifact


def opening_of(options: LoadOptions) -> Callable[[Reader], OpenArtifact]:
    """Returns what opens all members of an artifact in its own dtype."""
    return _Opening(options, "sizes", None, None, None, None)


def check_expected(expect: Any) -> None:
    """Raises: UsageError for a digest that is none."""
    if expect is not None and not (isinstance(expect, str) and _DIGEST.match(expect)):
        raise UsageError(
            f"expect={repr(expect)[:100]} is not a digest of an artifact; give sha256: and 64 hex "
            "digits in lower case, as `widepack inspect` shows it"
        )


def _check_choices(verify: Any, backend: Any, compile: Any, cache: Any, simplify: Any, memory: Any) -> None:
    """Raises: UsageError for an argument that is none of its choices."""
    if verify not in VERIFY:
        raise UsageError(f"verify={verify!r} is unknown; known: {', '.join(VERIFY)}")
    if backend != "auto" and backend not in backends.NAMES:
        raise UsageError(f"backend={backend!r} is unknown; known: auto, {', '.join(backends.NAMES)}")
    if compile not in (None, "now"):
        raise UsageError(f"compile={compile!r} is unknown; known: None, which never compiles, and 'now'")
    if cache is not None and not isinstance(cache, (str, PathLike)):
        raise UsageError(f"cache is a {type(cache).__name__}; give the folder of compiled programs")
    if memory not in MEMORY:
        raise UsageError(f"memory={memory!r} is unknown; known: {', '.join(MEMORY)}")
    if not isinstance(simplify, bool):
        raise UsageError(
            f"simplify={simplify!r} is unknown; known: True, and False, "
            "which lowers the programs again as they were captured"
        )


def _check_limit(limit: Any) -> None:
    """Raises: UsageError for a limit that is not a positive number."""
    if limit is None:
        return
    number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if number and 0 < limit <= MOST_LIMIT:
        return
    huge = isinstance(limit, int) and limit.bit_length() > 64
    text = f"a number of {limit.bit_length()} bits" if huge else repr(limit)
    raise UsageError(
        f"limit={text} is not a limit; give a number above 0 and up to {MOST_LIMIT:g} by which the "
        "usual memory and work of a load are multiplied, or None for no limit"
    )


def _set_threads(threads: Any) -> None:
    """Sets torch's threads for the process. Raises: UsageError."""
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads={threads!r} is not a number of threads; give a positive integer")
    torch.set_num_threads(threads)


def on_device(device: str | torch.device | None) -> torch.device:
    """Returns a device of this machine; the CPU for None. Raises: UsageError."""
    try:
        found = torch.device(device or "cpu")
    except RuntimeError as e:
        raise UsageError(f"device {device!r}: {str(e).splitlines()[0]}") from e
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {str(device)!r}: artifacts run on cpu and cuda")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                f"device {device!r}: this torch ({torch.__version__}) sees no CUDA device; "
                "use 'cpu', or install a CUDA build of torch"
            )
        return torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
    if found.index:
        raise UsageError(f"device {str(device)!r}: there is one CPU, 'cpu'")
    return found


def chosen_members(manifest: Manifest, members: Sequence[int | str] | None) -> list[int]:
    """Returns the numbers of the members to load. Raises: UsageError."""
    names = [m.name for m in manifest.members]
    if members is None:
        return list(range(len(names)))
    if isinstance(members, (list, tuple)) and not members:
        raise UsageError("members is empty; name at least one, or leave it out for all")
    return numbers_of(names, members)
