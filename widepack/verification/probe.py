"""The probe: a few inputs and every member's float64 answers, kept in the artifact, so that what is loaded is verified too.

Outputs that are large are kept thinly: every k-th number, so that a probe stays under `LIMIT_BYTES`. A pass is remembered in the user's cache by program,
weights, device, dtype and torch version; anything else runs it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.weights import Weights

from .tolerance import Pool, floating, only, parts, same_places
from ..spec.dtypes import at_limit
from ..spec.entries import FORWARD
from ..errors import ProbeError

LIMIT_BYTES = 1_000_000
Answers = tuple[Sequence[torch.Tensor | None], Sequence[Sequence[torch.Tensor]]]
"""Inputs as the wide program takes them (None: a state that begins as a weight), and [member][output] float64 answers."""

_FACTOR = 4  # another device or torch adds errors of its own kind: four times the bounds of the build


def prefix(entry: str) -> str:
    """What stands before the pattern in the names of an entry's tensors: nothing for forward."""
    return "" if entry == FORWARD else f"{entry}."


def joined(records: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The records of a build's verification as the manifest holds them: forward's own keys, and those of other entries under `entries`."""
    others = {entry: record for entry, record in records.items() if entry != FORWARD}
    return {**records.get(FORWARD, {}), **({"entries": others} if others else {})}


def record_of(verification: Mapping[str, Any], entry: str) -> Mapping[str, Any]:
    """One entry's part of `joined` records; empty where there is none."""
    found = verification if entry == FORWARD else (verification.get("entries") or {}).get(entry)
    return found if isinstance(found, Mapping) else {}


def wide_record(verification: Mapping[str, Any], entry: str, pattern: str) -> list[Mapping[str, Any]] | None:
    """What was recorded of a pattern's first wide program, output by output; None where nothing was. Raises: ArtifactError for what is no record."""
    rows = record_of(verification, entry).get("wide", {})
    if not isinstance(rows, Mapping):
        raise ArtifactError(f"verification of {entry}: wide is a {type(rows).__name__}, where an object of records stands")
    found = next((r for k, r in rows.items() if k.startswith(pattern)), None)
    if found is None:
        return None
    if not isinstance(found, list) or not all(map(_is_record, found)):
        raise ArtifactError(f"verification of {entry}: {pattern} is no list of records with own_max, own_rms and scale")
    return found


def _is_record(row: Any) -> bool:
    return isinstance(row, Mapping) and all(type(row.get(k)) in (int, float) and row[k] >= 0 for k in ("own_max", "own_rms", "scale"))


def make(calls: Mapping[str, Answers]) -> dict[str, torch.Tensor]:
    """The probe's tensors.

    calls: `prefix(entry)` and pattern -> inputs and answers.
    Returns: `<prefix><pattern>.x<k>` inputs and `<prefix><pattern>.y<k>.<i>` answers, thinned, member by member.
    """
    room = LIMIT_BYTES / max(1, len(calls))
    made: dict[str, torch.Tensor] = {}
    for pattern, (inputs, truths) in calls.items():
        held = {k: x for k, x in enumerate(inputs) if x is not None}
        for k, x in held.items():
            made[f"{pattern}.x{k}"] = x.contiguous().clone()
        used = sum(x.numel() * x.element_size() for x in held.values())
        total = sum(t.numel() * 8 for outs in truths for t in outs)
        stride = max(1, math.ceil(total / max(room - used, room / 4)))
        for i, outs in enumerate(truths):
            for k, t in enumerate(outs):
                made[f"{pattern}.y{k}.{i}"] = thin(t, stride)
    return made


def thin(t: torch.Tensor, stride: int) -> torch.Tensor:
    """Every `stride`-th number of a tensor, flat, with one number in front that says the stride."""
    flat = t.detach().reshape(-1)[::stride]
    wide = torch.complex128 if flat.is_complex() else torch.float64
    return torch.cat([torch.tensor([stride], dtype=wide), flat.to(wide)])


def recorded(tensors: Mapping[str, torch.Tensor] | Weights, name: str) -> tuple[int, torch.Tensor]:
    """An answer of the probe: its stride, and the numbers. Raises: ProbeError for what is no such answer."""
    if name not in tensors:
        raise ProbeError(f"probe: the answer {name} is missing; build the artifact again")
    kept = tensors.get(name) if isinstance(tensors, Weights) else tensors[name]
    if kept.dim() != 1 or not kept.numel() or not floating(kept):
        raise ProbeError(
            f"probe: the answer {name} is {str(kept.dtype).removeprefix('torch.')}{list(kept.shape)}, and no row of floats with a stride in front"
        )
    stride = float(kept[0].real)
    if not 1 <= stride < 2**53 or stride != int(stride):
        raise ProbeError(f"probe: the answer {name} says that it has every {stride:g}th number, which is no stride")
    return int(stride), kept[1:]


def check(
    tensors: Mapping[str, torch.Tensor],
    pattern: str,
    outputs: Sequence[Any],
    kinds: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    members: Sequence[int],
) -> str:
    """Hold a loaded program's answers to the probe, whose bounds allow for another device than the build's.

    pattern: with the entry's prefix. outputs: what the wide program gave for `<pattern>.x*`. kinds: of each output. records: the manifest's, by output. members: which of the artifact's members these are.
    Returns: how they leave the bounds that a build holds its own programs to, in words; empty where they do not. Raises: ProbeError.
    """
    beyond = ""
    for k, (output, kind, record) in enumerate(zip(outputs, kinds, records)):
        for at, i in enumerate(members):
            stride, truth = recorded(tensors, f"{pattern}.y{k}.{i}")
            value = output if kind == "shared" else output[at]
            if (
                -(-value.numel() // stride) != truth.numel() or value.is_complex() != truth.is_complex()
            ):  # before it is brought in order, which may copy it
                raise ProbeError(
                    f"probe: output {record.get('output') or k} of member {i} has {value.numel()} numbers, the artifact's answer is of another size or kind; the artifact and this program do not belong together"
                )
            flat = value.detach().cpu().reshape(-1)[::stride]
            if not floating(value):
                if not torch.equal(flat.to(truth.dtype), truth):
                    raise ProbeError(
                        f"probe: output {record.get('output') or k} of member {i} differs from the answer that was recorded when the artifact was built"
                    )
                continue
            pool = _pool(record, value)
            most = at_limit(flat)
            fine = torch.isfinite(truth) & ~most
            error = (flat.to(truth.dtype)[fine] - truth[fine]).abs()
            limits = (flat.to(truth.dtype)[most] / truth[most] - 1).abs() <= _FACTOR * pool.eps
            if (
                not same_places(flat.to(truth.dtype), truth)
                or not bool(limits.all())
                or (error.numel() and not float(error.max()) <= _FACTOR * pool.max_bound)
            ):
                largest = float(error.max()) if error.numel() else float("nan")
                raise ProbeError(
                    f"probe: output {record.get('output') or k} of member {i} is off by {largest:.2e} from the float64 answer recorded at build, the bound is "
                    f"{_FACTOR * pool.max_bound:.2e}; this torch ({torch.__version__}) or device runs the program differently. Build the artifact again here, or load(strategies='loop')"
                )
            if not beyond and error.numel():
                rms, largest = float(error.square().mean().sqrt()), float(error.max())
                if not (rms <= pool.rms_bound() and largest <= pool.max_bound):
                    beyond = (
                        f"output {record.get('output') or k} of member {i}: rms error {rms:.2e} (bound {pool.rms_bound():.2e}), "
                        f"largest {largest:.2e} (bound {pool.max_bound:.2e}), as a build holds its programs to"
                    )
    return beyond


def _pool(record: Mapping[str, Any], value: torch.Tensor) -> Pool:
    """The members' own errors in an output, as a build has recorded them."""
    pool = Pool(
        str(record["output"]),
        float(torch.finfo(value.dtype).eps),
        own_max=float(record["own_max"]),
        scale_square=float(record["scale"]) ** 2,
        count=1,
    )
    pool.own_square = float(record["own_rms"]) ** 2
    return pool


def differs(found: Any, wanted: Any, record: Mapping[str, Any]) -> str:
    """How two programs' answers differ by more than the probe's bound, in words; empty where they do not. record: the manifest's, of this output, or empty."""
    if not isinstance(wanted, torch.Tensor):
        return "" if found == wanted else f"is {found!r} and not {wanted!r}"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"is {found.dtype}{list(found.shape)} and not {wanted.dtype}{list(wanted.shape)}"
    if not floating(wanted):
        return "" if torch.equal(found, wanted) else f"differs in {int((found != wanted).sum())} of {wanted.numel()} numbers"
    if not same_places(found, wanted):
        return "has NaN or inf in other places"
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    largest = square = 0.0
    count = 0
    for mine, right in parts(found, wanted):
        mine, right = (t.to(wide) for t in only(torch.isfinite(right), mine, right))
        if right.numel():
            largest = max(largest, float((mine - right).abs().max()))
            square += float(right.abs().square().sum())
            count += right.numel()
    pool = Pool("", float(torch.finfo(wanted.dtype).eps), own_max=float(record.get("own_max", 0.0)), count=1)
    pool.scale_square = max(float(record.get("scale", 0.0)) ** 2, square / count if count else 0.0)
    return "" if largest <= _FACTOR * pool.max_bound else f"is off by {largest:.2e}, the bound is {_FACTOR * pool.max_bound:.2e}"


def cache_folder() -> Path:
    """Where passes are remembered: `$XDG_CACHE_HOME/widepack` or `~/.cache/widepack`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widepack"


def cache_key(*parts: str) -> str:
    return hashlib.sha256("\n".join([*parts, torch.__version__]).encode()).hexdigest()


def passed(key: str, what: str = "probes") -> bool:
    """Whether this probe passed here before; what: or this walk."""
    with contextlib.suppress(OSError):
        return (cache_folder() / what / key).is_file()
    return False


def noted(key: str, what: str) -> str:
    """What was noted with a pass; empty where nothing was, or nothing passed."""
    with contextlib.suppress(OSError, ValueError):
        return (cache_folder() / what / key).read_text(encoding="ascii")
    return ""


def remember(key: str, what: str = "probes", note: str = "") -> None:
    """Note a pass, and something with it; a cache that cannot be written only means that the probe runs again."""
    with contextlib.suppress(OSError):
        folder = cache_folder() / what
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not note:
            (folder / key).touch()
            return
        aside = folder / f"{key}.{os.getpid()}-{threading.get_ident()}"
        aside.write_text(note, encoding="ascii")
        aside.replace(folder / key)


__all__ = ["ArtifactError", "cache_folder", "cache_key", "check", "differs", "make", "noted", "passed", "recorded", "remember", "thin"]
