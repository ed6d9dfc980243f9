"""Runs the members on a validation file."""

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
from ..prediction.csv_form import CsvForm
from ..prediction.formats import open_table, suffix_of
from ..prediction.predict import Prediction
from ..prediction.request import Files, check_batch
from ..system.progress import Report
from .targets import read_targets

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
    classes: Sequence[str] | None,
    form: CsvForm,
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
        classes: The names of the classes, for targets that are names; None for numbers.
        form: How a CSV file is written.
        progress: Is called with (stage, done, total).

    Raises:
        UsageError: The file has no such column, or it has no targets.
        InputError: The file has no rows, or a row that the model refuses.
    """
    check_batch(batch)
    suffix_of(source, "input")
    table = open_table(source, form)
    name = entry or ("forward" if "forward" in ens.entries else ens.entries[0])
    targets = read_targets(table, target, classes)
    with tempfile.TemporaryDirectory(prefix="widepack-") as folder:
        files = Files(source, Path(folder, "answers.safetensors"), ".safetensors")
        run = Prediction(
            ens, ens.entry(name), f"the model: entry {name}", table, None, batch, False, None,
            _leaf(ens, name, answer), _ANSWER,
        )  # fmt: skip  # in the order of its arguments
        run.choose(inputs or {}, [], files, lambda sentence: None, unread=[target])
        report = run.run(files, False, progress)
        found = load_file(files.output)
    if not report.rows:
        raise InputError(f"{source} has no rows")
    if _ANSWER not in found:
        raise UsageError("the members' answers differ in shape, so they have no mean")
    answers = found[_ANSWER]
    if len(targets) != report.rows:
        raise InputError(f"{source}: the file changed while it was read")
    if answers.ndim < 2 or answers.shape[1] != len(ens.members):
        raise UsageError("the members' answers differ in shape, so they have no mean")
    return Validation(answers.movedim(1, 0), targets, report.entry, _sha256(source))


def _leaf(ens: WideModel, entry: str, answer: str | int | None) -> str | int:
    """Returns the output that predictions are read from: `logits`, else the first."""
    if answer is not None:
        return answer
    outputs: list[Any] = list(ens.entry(entry).entry.outputs)
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


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
