"""Makes the probe of an artifact, and checks a loaded program against it.

A probe is a few inputs with every member's float64 answers. Large outputs are thinned: every k-th number is
stored, so that the file stays under `LIMIT_BYTES`. A pass is noted in the user's cache with the program, the
identity of the weights files, device, dtype and torch version. If one of them changes, the probe runs again.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.weights import Weights

from ..errors import ProbeError
from ..spec.dtypes import at_limit
from ..spec.entries import FORWARD
from .record import OutputBounds
from .tolerance import (
    ErrorStats,
    RootMeanSquare,
    floating,
    only,
    parts,
    root_mean_square,
    same_places,
    with_same_places,
)

LIMIT_BYTES = 1_000_000
Answers = tuple[Sequence[torch.Tensor | None], Sequence[Sequence[torch.Tensor]]]
"""The wide program's inputs (None: a state that begins as a weight), and for each member the float64 answers.
"""

_MOST_SCALE, _MOST_RMS, _MOST_ERROR = 1e4, 1.0, 100.0
"""How large recorded statistics may be: the scale in largest answers of the probe, the members' own errors in
scales.

Honest builds are far below: a build takes the members' own answers as the reference if float64 is off by a
thousandth of the scale (`tolerance.ErrorStats.unsteady`), more only in bfloat16.
"""

_FACTOR = 4  # another device or torch has other rounding errors: four times the bounds of the build


def prefix(entry: str) -> str:
    """Returns what precedes the pattern in the names of an entry's tensors: nothing for `forward`."""
    return "" if entry == FORWARD else f"{entry}."


def make(calls: Mapping[str, Answers]) -> dict[str, torch.Tensor]:
    """Returns the probe's tensors.

    calls: inputs and answers by `prefix(entry)` and pattern. Returns: inputs `<prefix><pattern>.x<k>` and,
    for each member, thinned answers `<prefix><pattern>.y<k>.<i>`.
    """
    room = LIMIT_BYTES / max(1, len(calls))
    tensors: dict[str, torch.Tensor] = {}
    for pattern, (inputs, truths) in calls.items():
        stored = {k: x for k, x in enumerate(inputs) if x is not None}
        for k, x in stored.items():
            tensors[f"{pattern}.x{k}"] = x.contiguous().clone()
        used = sum(x.numel() * x.element_size() for x in stored.values())
        total = sum(t.numel() * 8 for outs in truths for t in outs)
        stride = max(1, math.ceil(total / max(room - used, room / 4)))
        for i, outs in enumerate(truths):
            for k, t in enumerate(outs):
                tensors[f"{pattern}.y{k}.{i}"] = thin(t, stride)
    return tensors


def thin(t: torch.Tensor, stride: int) -> torch.Tensor:
    """Returns every `stride`-th number of a tensor as a flat float64 tensor, with the stride in front."""
    flat = t.detach().reshape(-1)[::stride]
    wide = torch.complex128 if flat.is_complex() else torch.float64
    return torch.cat([torch.tensor([stride], dtype=wide), flat.to(wide)])


def recorded(tensors: Mapping[str, torch.Tensor] | Weights, name: str) -> tuple[int, torch.Tensor]:
    """Returns the stride and the numbers of an answer of the probe. Raises: ProbeError if it has another
    form.
    """
    if name not in tensors:
        raise ProbeError(f"probe: the answer {name} is missing; build the artifact again")
    stored = tensors.get(name) if isinstance(tensors, Weights) else tensors[name]
    if stored.dim() != 1 or not stored.numel() or not floating(stored):
        raise ProbeError(
            f"probe: the answer {name} is {str(stored.dtype).removeprefix('torch.')}{list(stored.shape)}; it"
            " must be one row of floats that begins with a stride"
        )
    stride = float(stored[0].real)
    if not 1 <= stride < 2**53 or stride != int(stride):
        raise ProbeError(
            f"probe: the answer {name} has the stride {stride:g}, which is not a positive integer"
        )
    return int(stride), stored[1:]


def thinned(
    tensors: Mapping[str, torch.Tensor] | Weights, name: str, value: torch.Tensor, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same numbers of an answer and of the probe's answer of a name.

    what: the answer in words. Raises: ProbeError.
    """
    stride, truth = recorded(tensors, name)
    # The sizes are compared before the value is made contiguous, which may copy it.
    if -(-value.numel() // stride) != truth.numel() or value.is_complex() != truth.is_complex():
        raise ProbeError(
            f"probe: {what} has {value.numel()} numbers, the artifact's answer is of another size or kind; "
            "the artifact and this program do not belong together"
        )
    return value.detach().cpu().reshape(-1)[::stride], truth


def compared(
    tensors: Mapping[str, torch.Tensor],
    pattern: str,
    outputs: Sequence[Any],
    kinds: Sequence[str],
    names: Sequence[str],
    members: Mapping[int, str],
    anywhere: Container[tuple[int, int]] = (),
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Yields (output, member, its answer, the recorded answer), with the same numbers of both answers.

    tensors: the probe's answers. pattern: with the entry's prefix. outputs: the program's answers to
    `<pattern>.x*`. kinds, names: of each output. members: the name of each of the program's members, by its
    number in the artifact. anywhere: (member, output) whose NaN and inf may be at any place: both answers get
    NaN where one is not finite. Raises: ProbeError.
    """
    for k, (output, kind, name) in enumerate(zip(outputs, kinds, names)):
        for at, (i, member) in enumerate(members.items()):
            value = output if kind == "shared" else output[at]
            what = f"output {name} of member {member}"
            found, truth = thinned(tensors, f"{pattern}.y{k}.{i}", value, what)
            if (i, k) in anywhere:
                found, truth = with_same_places(found, truth)
            yield k, i, found, truth


def check(
    tensors: Mapping[str, torch.Tensor],
    pattern: str,
    outputs: Sequence[Any],
    kinds: Sequence[str],
    bounds: Sequence[OutputBounds],
    members: Sequence[int],
    anywhere: Container[tuple[int, int]] = (),
) -> str:
    """Checks a loaded program's answers against the probe. The bounds allow for another device than the
    build's.

    tensors, pattern, outputs, kinds, anywhere: as `compared` takes them. bounds: of each output. members: the
    numbers of the program's members in the artifact.

    Returns: how the first answer exceeds the narrower bounds of a build; "" if none does. Raises: ProbeError.
    """
    beyond = ""
    names = [bound.output or str(k) for k, bound in enumerate(bounds)]
    labels = {i: str(i) for i in members}
    for k, i, value, truth in compared(tensors, pattern, outputs, kinds, names, labels, anywhere):
        found = _check_output(value, truth, bounds[k], f"output {names[k]} of member {i}")
        beyond = beyond or found
    return beyond


def check_bounds(
    tensors: Mapping[str, torch.Tensor] | Weights, pattern: str, bounds: Sequence[OutputBounds]
) -> None:
    """Checks that the recorded bounds fit the recorded answers: no bound accepts every answer.

    tensors: the probe. pattern: with the entry's prefix. bounds: of each output, as recorded.
    Raises: ProbeError.
    """
    sizes = _largest(tensors, pattern)
    for k, bound in enumerate(bounds):
        largest = sizes.get(k, 0.0)
        for what, found, allowed in (
            ("scale", bound.scale, _MOST_SCALE * (largest or 1.0)),
            ("own_rms", bound.own_rms, _MOST_RMS * bound.scale),
            ("own_max", bound.own_max, _MOST_ERROR * bound.scale),
        ):
            if found > allowed:
                raise ProbeError(
                    f"probe: output {bound.output or k}: the record of the verification has {what} "
                    f"{found:.2e}, and the recorded answers are at most {largest:.2e}: its bounds would "
                    f"accept wrong answers (at most {allowed:.2e} is allowed). Build the artifact again"
                )


def fitted(entry: str, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns an entry's record with the scale that `check_bounds` allows beside the recorded answers.

    Other calls of the verification may have far larger answers, as those of `exp` are. record: of all
    comparisons. tensors: the probe.
    """
    wide: dict[str, list[dict[str, Any]]] = {}
    for key, rows in record["wide"].items():
        sizes = _largest(tensors, f"{prefix(entry)}{key.rpartition('.')[0]}")
        wide[key] = [_fitted_row(row, sizes.get(k, 0.0)) for k, row in enumerate(rows)]
    return {**record, "wide": wide}


def _fitted_row(row: dict[str, Any], largest: float) -> dict[str, Any]:
    """Returns the row of an output. largest: of its recorded answers."""
    if not largest or row["scale"] <= _MOST_SCALE * largest:
        return row
    scale = _MOST_SCALE * largest
    most_rms, most = _MOST_RMS * scale, _MOST_ERROR * scale
    return row | {
        "scale": scale,
        "own_rms": min(row["own_rms"], most_rms),
        "own_max": min(row["own_max"], most),
    }


def _largest(tensors: Mapping[str, torch.Tensor] | Weights, pattern: str) -> dict[int, float]:
    """Returns the largest finite number of the recorded answers of each output. pattern: with the prefix."""
    found: dict[int, float] = {}
    start = f"{pattern}.y"
    for name in tensors.names if isinstance(tensors, Weights) else list(tensors):
        number = name[len(start) :].partition(".")[0] if name.startswith(start) else ""
        if number.isdecimal():
            numbers = recorded(tensors, name)[1].abs()
            numbers = numbers[torch.isfinite(numbers)]
            largest = float(numbers.max()) if numbers.numel() else 0.0
            found[int(number)] = max(found.get(int(number), 0.0), largest)
    return found


def recorded_terms(
    tensors: Mapping[str, torch.Tensor] | Weights, pattern: str, bounds: Sequence[OutputBounds]
) -> list[float]:
    """Returns for each output the scale of its terms, if its recorded answers are all 0; else 0.

    Args:
        tensors: The probe.
        pattern: The pattern, with the entry's prefix.
        bounds: Those of each output, as recorded.
    """
    names = tensors.names if isinstance(tensors, Weights) else list(tensors)
    found = []
    for k, bound in enumerate(bounds):
        own = [recorded(tensors, name)[1] for name in names if name.startswith(f"{pattern}.y{k}.")]
        found.append(0.0 if any(bool(answers.any()) for answers in own) else bound.scale)
    return found


def _check_output(value: torch.Tensor, truth: torch.Tensor, bounds: OutputBounds, what: str) -> str:
    """Checks one member's output. Returns and raises: as `check`. what: the output and member, for
    messages.
    """
    flat = value.to(truth.dtype)
    if not floating(value):
        if not torch.equal(flat, truth):
            raise ProbeError(
                f"probe: {what} differs from the answer that was recorded when the artifact was built"
            )
        return ""
    stats = ErrorStats.from_bounds(bounds, float(torch.finfo(value.dtype).eps))
    most = at_limit(value)
    finite = torch.isfinite(truth) & ~most
    error = (flat[finite] - truth[finite]).abs()
    limits = (flat[most] / truth[most] - 1).abs() <= _FACTOR * stats.eps
    largest = float(error.max()) if error.numel() else float("nan")
    if (
        not same_places(flat, truth)
        or not bool(limits.all())
        or (error.numel() and not largest <= _FACTOR * stats.max_bound)
    ):
        raise ProbeError(
            f"probe: {what} is off by {largest:.2e} from the float64 answer recorded at build, the bound is"
            f" {_FACTOR * stats.max_bound:.2e}; this torch ({torch.__version__}) or device runs the program"
            " differently. Build the artifact again here, or load(strategies='loop')"
        )
    rms = root_mean_square(error)
    if not error.numel() or (rms <= stats.rms_bound() and largest <= stats.max_bound):
        return ""
    return (
        f"{what}: rms error {rms:.2e} (bound {stats.rms_bound():.2e}), largest {largest:.2e} (bound"
        f" {stats.max_bound:.2e}); a build accepts only errors within these bounds"
    )


def differs(found: Any, reference: Any, bounds: OutputBounds | None = None) -> str:
    """Returns how two programs' answers differ by more than the probe's bound; "" if they do not.

    bounds: of this output, if the manifest has them.
    """
    if not isinstance(reference, torch.Tensor):
        return "" if found == reference else f"is {found!r} and not {reference!r}"
    if found.shape != reference.shape or found.dtype != reference.dtype:
        return f"is {found.dtype}{list(found.shape)} and not {reference.dtype}{list(reference.shape)}"
    if not floating(reference):
        if torch.equal(found, reference):
            return ""
        return f"differs in {int((found != reference).sum())} of {reference.numel()} numbers"
    if not same_places(found, reference):
        return "has NaN or inf in other places"
    wide = torch.complex128 if reference.is_complex() else torch.float64
    largest, scale = 0.0, RootMeanSquare()
    for mine, right in parts(found, reference):
        mine, right = (t.to(wide) for t in only(torch.isfinite(right), mine, right))
        if right.numel():
            largest = max(largest, float((mine - right).abs().max()))
            scale.add(right)
    stats = ErrorStats.from_bounds(bounds or OutputBounds(), float(torch.finfo(reference.dtype).eps))
    stats.answers.raise_to(scale.value)
    if largest <= _FACTOR * stats.max_bound:
        return ""
    return f"is off by {largest:.2e}, the bound is {_FACTOR * stats.max_bound:.2e}"
