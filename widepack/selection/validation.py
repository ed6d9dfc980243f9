"""Runs the members on a validation file, and reads the targets."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import InputError, UsageError
from ..inference.model import WideModel
from ..prediction.predict import predict
from ..system.progress import Report

_ANSWER = "widepack.answer"


@dataclass(frozen=True)
class Validation:
    """The members' answers on validation data.

    answers: [N, R, ...], as the members give them. targets: [R, ...]. entry: that answered. sha256: of the
    file.
    """

    answers: Tensor
    targets: Tensor
    entry: str
    sha256: str


def run_members(
    ens: WideModel,
    source: Path,
    target: str,
    *,
    inputs: Mapping[str, str | Sequence[str]] | None,
    entry: str,
    answer: str | int | None,
    batch: int | None,
    progress: Report | None,
) -> Validation:
    """Runs all members on the rows of a file.

    Args:
        ens: The model.
        source: The file, as `predict` reads it.
        target: The column of the targets.
        inputs, entry, answer, batch: As `predict` takes them.
        progress: Is called with (stage, done, total).

    Raises:
        UsageError: The file has no such column, or it has no numbers.
        InputError: The file has no rows, or a row that the model refuses.
    """
    with tempfile.TemporaryDirectory(prefix="widepack-") as folder:
        out = Path(folder, "answers.safetensors")
        chosen = _leaf(ens, entry, answer)
        report = predict(
            ens,
            source,
            out,
            inputs=inputs,
            answer=chosen,
            name=_ANSWER,
            entry=entry,
            batch=batch,
            ids=[target],
            progress=progress,
        )
        found = load_file(out)
    if not report.rows:
        raise InputError(f"{source} has no rows")
    if target not in found or _ANSWER not in found:
        raise UsageError(f"{source}: the column {target} has no numbers; give the targets as numbers")
    answers, targets = found[_ANSWER], found[target]
    if answers.ndim < 2 or answers.shape[1] != len(ens.members):
        raise UsageError("the members' answers differ in shape, so they have no mean")
    return Validation(answers.movedim(1, 0), targets, report.entry, _sha256(source))


def _leaf(ens: WideModel, entry: str, answer: str | int | None) -> str | int:
    """Returns the output that predictions are read from: `logits`, else the first."""
    if answer is not None:
        return answer
    name = entry or ("forward" if "forward" in ens.entries else ens.entries[0])
    outputs: list[Any] = list(ens.entry(name).entry.outputs)
    names = [o.name for o in outputs]
    return "logits" if "logits" in names else 0


def predictions_of(answers: Tensor, of: str | None, dim: int) -> Tensor:
    """Returns the predictions of all members.

    Args:
        answers: [N, R, ...].
        of: `softmax` for scores of classes, `probabilities`, or None for the answers themselves.
        dim: The dim of the classes in a member's answer.

    Returns: [N, R, C, ...] in float32 at least; without `of` as the answers are.

    Raises:
        UsageError: The answers have no such dim.
    """
    wide = answers if answers.dtype == torch.float64 else answers.float()
    if of is None:
        return wide
    axes = wide.ndim - 1
    if not -axes <= dim < axes or dim % axes == 0:
        raise UsageError(f"dim={dim} is no dim of classes of answers with the shape {list(wide.shape[1:])}")
    classes = wide.movedim(dim % axes + 1, 2)
    return classes.softmax(2) if of == "softmax" else classes


def checked_targets(targets: Tensor, predictions: Tensor, classes: bool) -> Tensor:
    """Returns the targets in the dtype that a loss takes.

    Args:
        targets: [R, ...].
        predictions: [N, R, ...].
        classes: Whether they are classes.

    Raises:
        UsageError: Their shape or their numbers do not fit the predictions.
    """
    expected = list(predictions.shape[1:])
    if not classes:
        if list(targets.shape) != expected and targets.numel() == predictions[0].numel():
            targets = targets.reshape(expected)
        if list(targets.shape) != expected:
            raise UsageError(f"the targets have the shape {list(targets.shape)}, the answers {expected}")
        return targets
    count = expected.pop(1)
    if list(targets.shape) != expected:
        raise UsageError(
            f"the targets have the shape {list(targets.shape)}; classes of these answers have {expected}"
        )
    whole = targets.long()
    if bool((whole != targets).any()) or bool(((whole < 0) | (whole >= count)).any()):
        raise UsageError(f"the targets are not all whole numbers from 0 to {count - 1}")
    return whole


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
