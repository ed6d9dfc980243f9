"""Loads an artifact on one device and returns a `WideModel`: `widepack.load` does it for each device.

Only JSON and safetensors are read. No module that a file names is imported. The rules are imported only if a
program has to be lowered.

`check_opens` opens an artifact before it is published, as `load` will open it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import ProgramLimit, Reader, opened
from widepack_artifacts.weights import Weights

from .. import backends
from ..errors import ArtifactError, ProbeError, UsageError, VerificationError
from ..ir import ops
from ..runtime.admission import guarded
from ..spec.dtypes import find_dtype
from ..spec.entries import PATTERNS
from ..spec.names import numbers_of, path_of
from ..system.autocast import plain_modes
from ..system.gate import Gate
from ..system.memory import keep_freed
from ..system.progress import Report
from ..system.readahead import read_headers
from .calibration_record import read_calibration
from .cast import Cast
from .entry import WideEntry
from .feature_record import read_features
from .graph_pool import GraphPool, graph_pool
from .model import WideModel
from .open_artifact import LoadOptions, OpenArtifact
from .programs.merged_weights import MEMORY

if TYPE_CHECKING:
    from widepack_artifacts.writer import Writer

MOST_LIMIT = 1e12
"""The largest `limit` of a load."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
VERIFY = ("sizes", "hashes", "off")
_NOT_REPEATED = ("path", "expect", "threads", "progress", "gate")
"""The arguments with which a copy of a model is not loaded."""


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
    trusted: bool | None = None,
) -> WideModel:
    """Loads an artifact on one device.

    Args:
        path, device: The artifact's folder, and one device.
        dtype, members, strategies, simplify, backend, verify, expect, prologue, warmup, threads, compile: As
            `widepack.load` takes them.
        cache, progress, limit, allow_ops, memory, weights, max_error, graph: The same.
        gate: What calls pass and a swap closes. Models that answer calls together share one.
        trusted: Whether a user vouches for the artifact; default whether `expect` is given.

    Raises:
        ArtifactError, UsageError, VerificationError: As `widepack.load`.
    """
    given: dict[str, Any] = {n: v for n, v in locals().items() if n not in _NOT_REPEATED}
    int8 = wants_int8(weights, max_error)
    _check_choices(verify, backend, compile, cache, simplify, memory)
    _check_limit(limit)
    check_expected(expect)
    trusted = given["trusted"] = expect is not None if trusted is None else trusted
    if threads is not None:
        _set_threads(threads)
    path, place = path_of(path), on_device(device)
    again = partial(load, Path(path).absolute(), **{**given, "warmup": False})
    extra = ops.allow(allow_ops)
    if int8:
        check_options(place, backend, compile, strategies, prologue, verify)
    options = LoadOptions(
        device=place,
        prologue=prologue,
        strategies="auto" if strategies is None and not simplify else strategies,
        simplify=simplify,
        verified=verify != "off",
        backend="eager" if int8 else backend,
        compile=compile == "now",
        cache=None if cache is None else Path(cache),
        progress=progress,
        limit=limit,
        memory=memory,
        int8=int8,
        max_error=max_error,
        trusted=trusted,
    )
    if place.type == "cpu" and memory != "least":
        keep_freed()
    opening = partial(
        _open, options, verify, members, find_dtype(dtype), gate=gate, graphs=graph_pool(graph, place)
    )
    with plain_modes(), guarded(str(path)):
        artifact = opened(path, opening, expect, extra)[1]
        model = WideModel(artifact, partial(again, expect=artifact.manifest.digest))
        with artifact.limits.one_load(warmup):
            if warmup:
                model.warmup()
                if int8:
                    check_loaded(model)
    return model


def _open(
    options: LoadOptions,
    verify: str,
    members: Sequence[int | str] | None,
    dtype: torch.dtype | None,
    reader: Reader,
    gate: Gate | None = None,
    graphs: GraphPool | None = None,
) -> OpenArtifact:
    """Reads all that a load needs of an artifact, now or later.

    Another artifact may be published at the path while this one is loaded, or later.
    """
    if verify == "sizes":
        reader.check_sizes()
    elif verify == "hashes":
        reader.check_hashes()
    if members is not None:
        read_headers(reader.weights_files())
    if options.limit is not None:
        reader.limit = ProgramLimit(options.limit)
    manifest = reader.manifest
    read_calibration(manifest)  # refuses a record that no evaluation writes
    read_features(manifest)
    corrections = manifest.factored.corrections
    files = Weights(
        reader.weights_files(), manifest.factored, reader.path(corrections) if corrections else None
    )
    files.check(manifest.weights, len(manifest.members))
    entries = manifest.entries.values()
    chosen = chosen_members(manifest, members)
    cast = None if dtype is None else Cast.of(manifest, dtype)
    if options.int8:
        check_artifact(manifest, cast)
    artifact = OpenArtifact(reader, files, chosen, replace(options, cast=cast), gate, graphs)
    wides = [w for e in entries for w in e.wide if w.device == options.device.type]
    reader.preload(w.file for w in wides if artifact.serves(w))
    reader.preload(name for e in entries for name in e.member)
    return artifact


def check_expected(expect: Any) -> None:
    """Raises: UsageError for a digest that is none."""
    if expect is not None and not (isinstance(expect, str) and _DIGEST.match(expect)):
        raise UsageError(
            f"expect={repr(expect)[:100]} is not a digest of an artifact; give sha256: and 64 hex "
            "digits in lower case, as `widepack inspect` shows it"
        )


def _check_choices(verify: Any, backend: Any, compile: Any, cache: Any, simplify: Any, memory: Any) -> None:
    """Raises: UsageError for an argument that is none of its choices."""
    choices = (
        ("verify", verify, VERIFY),
        ("backend", backend, ("auto", *backends.NAMES)),
        ("memory", memory, MEMORY),
    )
    for name, value, known in choices:
        if value not in known:
            raise UsageError(f"{name}={value!r} is unknown; known: {', '.join(known)}")
    if compile not in (None, "now"):
        raise UsageError(f"compile={compile!r} is unknown; known: None, which never compiles, and 'now'")
    if cache is not None and not isinstance(cache, (str, PathLike)):
        raise UsageError(f"cache is a {type(cache).__name__}; give the folder of compiled programs")
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
    return torch.device("cpu")  # torch says that its tensors are on `cpu`, also if they were sent to `cpu:0`


def chosen_members(manifest: Manifest, members: Sequence[int | str] | None) -> list[int]:
    """Returns the numbers of the members to load. Raises: UsageError."""
    names = [m.name for m in manifest.members]
    if members is None:
        return list(range(len(names)))
    if isinstance(members, (list, tuple)) and not members:
        raise UsageError("members is empty; name at least one, or leave it out for all")
    return numbers_of(names, members)


INT8 = "int8"


def wants_int8(weights: Any, max_error: Any) -> bool:
    """Returns whether int8 weights are requested.

    Raises: UsageError for unknown weights, and for a limit that is not a positive number.
    """
    if weights is None:
        if max_error is not None:
            raise UsageError(
                f"max_error={max_error!r:.40} limits what int8 weights may change; give weights='int8' too"
            )
        return False
    if weights != INT8:
        raise UsageError(
            f"weights={weights!r:.40} is unknown; known: 'int8', and None for the weights as they are stored"
        )
    number = isinstance(max_error, (int, float)) and not isinstance(max_error, bool)
    if max_error is not None and (not number or not 0 < max_error < math.inf):
        raise UsageError(
            f"max_error={max_error!r:.40} is not a limit; give a number above 0, for example 0.02 for 2% of"
            " the answer's rms"
        )
    return True


def check_options(
    device: torch.device, backend: str, compile: str | None, strategies: Any, prologue: bool, verify: str
) -> None:
    """Refuses options that int8 weights exclude. Raises: UsageError."""
    refused = {
        f"device={str(device)!r}": (device.type != "cpu", "int8 weights run only on the CPU"),
        f"backend={backend!r}": (backend not in ("auto", "eager"), "int8 weights run only on 'eager'"),
        f"compile={compile!r}": (compile is not None, "int8 weights run only on 'eager'"),
        "strategies": (strategies is not None, "the plans of int8 weights are made at load"),
        "prologue=False": (not prologue, "weights are quantized once, at load"),
        "verify='off'": (verify == "off", "the error of int8 weights is measured on the probe"),
    }
    for option, (excluded, why) in refused.items():
        if excluded:
            raise UsageError(f"weights='int8' cannot be used with {option}: {why}; leave out one of the two")


def check_artifact(manifest: Manifest, cast: Cast | None) -> None:
    """Refuses artifacts that have no int8 form. Raises: UsageError."""
    if manifest.factored.weights:
        raise UsageError(
            "weights='int8': this artifact stores factors of a base of all members, and reads few bytes"
            " already; load without weights"
        )
    if not manifest.probe:
        raise UsageError(
            "weights='int8': this artifact has no probe, so the error of int8 weights cannot be measured;"
            " build it again"
        )
    dtypes = {cast.table.get(w.dtype, w.dtype) if cast else w.dtype for w in manifest.weights}
    if "float32" not in dtypes:
        raise UsageError(
            "weights='int8' quantizes float32 weights, and those of this load are "
            f"{', '.join(sorted(dtypes))}; load with dtype='fp32'"
        )


def check_loaded(model: WideModel) -> None:
    """Refuses a model in which no program that is bound reads int8 weights. Raises: UsageError."""
    if not any(b.int8 for name in model.entries for _, b in model.entry(name).programs.bound()):
        raise UsageError(
            "weights='int8': no linear layer of this artifact would be faster with int8 weights: the layers"
            " have few weights, or the smallest batch has many rows for each member. Load without weights"
        )


_MEMBER = re.compile(r"of member (\d+)")


def check_opens(writer: Writer, manifest: Manifest) -> None:
    """Opens the files of a writer with the manifest that it will publish, and runs the probe.

    Programs of other devices than the CPU are not run.

    Raises:
        VerificationError: `load` would refuse the artifact. The message names the member's checkpoint.
    """
    sealed = manifest.sealed(writer.files)
    reader = Reader(writer.path, manifest=sealed)
    artifact: OpenArtifact | None = None
    options = LoadOptions(torch.device("cpu"), limit=None)
    try:
        with plain_modes(), guarded(str(writer.path)):
            artifact = _open(options, "sizes", None, None, reader)
            for name, entry in sealed.entries.items():
                programs = WideEntry(artifact, name).programs
                for pattern in PATTERNS:
                    if any(w.device == "cpu" and w.pattern == pattern and w.part is None for w in entry.wide):
                        programs.of(pattern)
    except (ProbeError, ArtifactError) as e:
        raise VerificationError(
            f"{writer.path}: load would refuse this artifact: {str(e).splitlines()[0]}\n"
            f"{_checkpoint(sealed, str(e), artifact)}"
            "Nothing was published, and an artifact that was there is unchanged."
        ) from e


def _checkpoint(manifest: Manifest, message: str, artifact: OpenArtifact | None) -> str:
    """Returns a line about the member in the message, or about the first one with huge weights.

    It says that a checkpoint is at fault only if its weights are huge. "" if no member is known.
    """
    found, members = _MEMBER.search(message), range(len(manifest.members))
    named = [int(found[1])] if found and int(found[1]) in members else []
    if (place := _huge(manifest, artifact, named or members)) is not None:
        member = manifest.members[place[0]]
        return (
            f"Member {member.name} is the checkpoint {member.source}, and the squares of its weights"
            f" {place[1]} leave their dtype: correct it, or leave it out.\n"
        )
    if not named:
        return ""
    member = manifest.members[named[0]]
    return f"It is the answer of member {member.name}, the checkpoint {member.source}; please report it.\n"


def _huge(
    manifest: Manifest, artifact: OpenArtifact | None, members: Sequence[int]
) -> tuple[int, str] | None:
    """Returns the first of these members with a weight whose square leaves its dtype, and the weight."""
    if artifact is not None:
        for number in members:
            for row in manifest.member_weights:
                weight = artifact.weights.of_member(row.name, number)
                if weight.is_floating_point() and weight.numel():
                    largest = float(weight.abs().max())
                    if not largest <= math.sqrt(torch.finfo(weight.dtype).max):
                        return number, row.name
    return None
