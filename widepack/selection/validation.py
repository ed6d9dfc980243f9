"""Runs the members on a validation file, reads the targets, and checks that they fit the outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.errors import some

from ..errors import InputError, UsageError
from ..inference.cascade import OF
from ..inference.model import WideModel
from ..ir.tensor_type import tensor_type
from ..prediction.csv_files import CsvForm
from ..prediction.endings import files_of, suffix_of
from ..prediction.formats import open_table
from ..prediction.input_columns import column_of
from ..prediction.outputs import default_output, output_number, row_dim_of
from ..prediction.predict import check_batch, nulls_as_nan
from ..prediction.run import Prediction
from ..prediction.table import TEXT, Table, place
from ..spec.names import names_in, path_of
from ..system.progress import Report

_NAME = "widepack.answer"  # of the column of outputs
_ROWS = 2**12  # that are read at a time
_ROUNDING = 0.02  # how far the sum of a position's probabilities may be from 1; scores are further from it


@dataclass(frozen=True)
class Validation:
    """The members' predictions on data with targets.

    predictions: [N, R, C, ...] with probabilities of classes, or [N, R, ...] with numbers. targets: [R, ...].
    entry: that ran. output: the name of the output that the predictions are of. dim: of the classes in a
    member's answer, not negative; 0 for numbers. sha256: of the file.
    """

    predictions: Tensor
    targets: Tensor
    entry: str
    output: str
    dim: int
    sha256: str


@dataclass(frozen=True)
class _Answers:
    """What the members answer. outputs: [N, R, ...]. targets: [R, ...]. entry, output: names. row_dim: of the
    rows in a member's answer.
    """

    outputs: Tensor
    targets: Tensor
    entry: str
    output: str
    row_dim: int


@dataclass(frozen=True, kw_only=True)
class ValidationRequest:
    """What runs on which data.

    source: The file, as `predict` reads it. target: The column of the targets. of: What the members answer:
    `softmax` for scores of classes, `probabilities`, or None for numbers. classes: The names of the classes,
    for targets that are names; None for numbers. form: How a CSV file is written. dim: The dim of the classes
    in a member's answer. nan: Whether a null in an input is NaN. inputs, entry, answer, batch: As `predict`
    takes them.
    """

    source: Path
    target: str
    of: str | None
    classes: list[str] | None
    form: CsvForm
    inputs: Mapping[str, str | Sequence[str]] | None
    entry: str
    answer: str | int | None
    dim: int
    batch: int | None
    nan: bool

    @classmethod
    def checked(
        cls,
        on: str | PathLike[str],
        target: str,
        of: str | None,
        classes: str | Sequence[str] | None,
        form: tuple[bool | None, str | None, str],
        nulls: str,
        **more: Any,
    ) -> ValidationRequest:
        """Returns a request.

        form: `header`, `delimiter` and `decimal` of a CSV file. nulls: As `predict` takes it.

        Raises: UsageError.
        """
        if of is not None and of not in OF:
            raise UsageError(f"of={of!r} is unknown; known: {', '.join(OF)}, or None for numbers")
        names = _checked_classes(classes, of)
        source = Path(path_of(on, "on", "the path of the data"))
        csv = CsvForm.of(source, *form)
        nan = nulls_as_nan(nulls)
        return cls(source=source, target=target, of=of, classes=names, form=csv, nan=nan, **more)

    def run(self, ens: WideModel, progress: Report | None) -> Validation:
        """Runs all members on the rows of the file.

        progress: Is called with (stage, done, total).

        Raises:
            UsageError: The file has no such column, it has no targets, or these do not fit the answers.
            InputError: The file has no rows, or a row that the model refuses, or a member answers NaN.
        """
        found = self._answers(ens, progress)
        predictions = predictions_of(found.outputs, self.of, self.dim, found.row_dim)
        _check_finite(predictions, ens.members)
        if self.of is not None:
            self._check_classes(predictions.shape[2])
        if self.of == OF[1]:
            _check_probabilities(predictions, ens.members)
        targets = checked_targets(found.targets, predictions, self.of is not None)
        dim = 0 if self.of is None else self.dim % (predictions.ndim - 1)
        return Validation(predictions, targets, found.entry, found.output, dim, _sha256(self.source))

    def _check_classes(self, count: int) -> None:
        """Raises: UsageError if the members answer another number of classes than have names."""
        if self.classes is not None and len(self.classes) != count:
            raise UsageError(f"classes= names {len(self.classes)} classes, and the members answer {count}")

    def _answers(self, ens: WideModel, progress: Report | None) -> _Answers:
        """Runs all members. Raises: UsageError, InputError."""
        check_batch(self.batch)
        suffix_of(self.source, "input")
        table = open_table(self.source, self.form)
        chosen = ens.entry(self.entry or ("forward" if "forward" in ens.entries else ens.entries[0]))
        answer = default_output(chosen.entry.outputs) if self.answer is None else self.answer
        leaf = chosen.entry.outputs[output_number(chosen.entry.outputs, answer)]
        type_ = tensor_type(leaf.type)
        if type_ is not None and -type_.rank <= self.dim < type_.rank:
            size = type_.sizes[self.dim]
            if isinstance(size, int):
                self._check_classes(size)  # before a target of the file is compared with the names
        targets = read_targets(table, self.target, self.classes)
        title = f"the model: entry {chosen.name}"
        run = Prediction(
            ens,
            chosen,
            title,
            table,
            ".safetensors",
            batch=self.batch,
            answer=answer,
            name=_NAME,
            nan=self.nan,
        )
        run.choose(self.inputs or {}, [], lambda sentence: None, unread=[self.target])
        parts: list[Tensor] = []
        rows = 0
        for block, outputs, _ in run.blocks():
            rows += block.rows
            if progress is not None:
                progress("predict", *table.position(rows))
            part = outputs.get(_NAME)
            if part is None or part.ndim < 2 or part.shape[1] != len(ens.members):
                raise UsageError("the members' answers differ in shape, so they have no mean")
            parts.append(part)
        if len(targets) != rows:
            raise InputError(f"{self.source}: the file changed while it was read")
        row_dim = row_dim_of(leaf.type, run.letter) or 0
        return _Answers(torch.cat(parts).movedim(1, 0), targets, chosen.name, leaf.name, row_dim)


def predictions_of(outputs: Tensor, of: str | None, dim: int, row_dim: int = 0) -> Tensor:
    """Returns the predictions of all members.

    Args:
        outputs: [N, R, ...].
        of: `softmax` for scores of classes, `probabilities`, or None for the outputs themselves.
        dim: The dim of the classes in a member's answer.
        row_dim: The dim of the rows in a member's answer. In `outputs` they stand before its other dims.

    Returns: [N, R, C, ...] in float32 at least; without `of` as the outputs are.

    Raises:
        UsageError: The outputs have no such dim.
    """
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    if of is None:
        return wide
    axes = wide.ndim - 1
    if not -axes <= dim < axes or dim % axes == row_dim:
        raise UsageError(f"dim={dim} is no dim of classes of answers with the shape {list(wide.shape[1:])}")
    own = dim % axes
    classes = wide.movedim(own + (2 if own < row_dim else 1), 2)
    return classes.softmax(2) if of == "softmax" else classes


def _sha256(path: Path) -> str:
    """Returns the hash of a file, or of all files of a folder one after the other."""
    digest = hashlib.sha256()
    for part in files_of(path):
        with open(part, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def _checked_classes(classes: Any, of: str | None) -> list[str] | None:
    """Returns the names of the classes; None if targets are numbers. Raises: UsageError."""
    if classes is None:
        return None
    if of is None:
        raise UsageError("classes= is for targets that are classes; give of='softmax' or of='probabilities'")
    if isinstance(classes, str):
        classes = names_in(classes, "classes=")
    if not isinstance(classes, Sequence):
        raise UsageError(f"classes={classes!r:.40} is no list of names, in the order of the answers")
    names = [str(name) for name in classes]
    if not names or len(set(names)) != len(names):
        raise UsageError(
            f"classes={some(names, 20)} does not name each class once, in the order of the answers"
        )
    return names


def _check_finite(predictions: Tensor, members: Sequence[str]) -> None:
    """Raises: InputError for NaN or infinity."""
    finite = predictions.isfinite().reshape(*predictions.shape[:2], -1).all(2)  # [N, R]
    if not bool(finite.all()):
        number, row = (int(i) for i in (~finite).nonzero()[0])
        raise InputError(
            f"member {members[number]} answers NaN or infinity in {int((~finite[number]).sum())} of "
            f"{finite.shape[1]} rows, first in row {row} (the first row is 0).\nLeave it out: "
            "`widepack drop` writes an artifact of the other members"
        )


def _check_probabilities(predictions: Tensor, members: Sequence[str]) -> None:
    """Raises: UsageError if answers are no probabilities. predictions: [N, R, C, ...]."""
    total = predictions.sum(2)
    wrong = ((total - 1).abs() > _ROUNDING) | (predictions < -_ROUNDING).any(2)  # NaN is not wrong here
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise UsageError(
            f"the answers of member {members[place[0]]} are no probabilities: those of row {place[1]} (the "
            f"first row is 0) have the sum {float(total[place]):.4g}.\nGive of='softmax' (--of softmax) for "
            "scores of classes"
        )


def read_targets(table: Table, column: str, classes: Sequence[str] | None) -> Tensor:
    """Reads the targets.

    Args:
        table: The file.
        column: Its column.
        classes: The name of each class, in the order of the answers: targets are read as names. None: they
            are numbers.

    Returns: [R, ...], in a dtype of torch that the file has; float64 for a CSV file. With `classes` int64.

    Raises:
        UsageError: There is no such column, or it holds neither numbers nor names of classes.
        InputError: There are no rows, or one has no target, or no valid one.
    """
    type_ = column_of(table, column)
    if classes is not None and (
        type_.shape or not (type_.dtype == TEXT or not table.typed or _whole(type_.dtype))
    ):
        raise UsageError(
            f"{table.path}: the column {column} is {type_.text}, and classes= names the classes of texts or "
            "whole numbers; leave classes= out"
        )
    if classes is None and type_.dtype in ("", TEXT):
        raise UsageError(
            f"{table.path}: the targets in column {column} are {type_.text}; targets must be numbers: for "
            "classes 0 to C-1.\nFor names of classes give classes= (--classes), in the order of the members' "
            "answers: classes='cat,dog'"
        )
    parts = []
    for block in table.blocks([column], {} if classes is not None else {column: torch.float64}, _ROWS):
        if not block.rows:
            continue  # a column of no values has any type
        if classes is None:
            parts.append(block.tensor(column))
            continue
        values, at = block.values(column)
        numbers = [_class_of(table, column, classes, v, at == k, block.start) for k, v in enumerate(values)]
        parts.append(torch.tensor(numbers, dtype=torch.int64)[at])
    if not parts:
        raise InputError(f"{table.path} has no rows")
    for part in parts:
        if part.shape[1:] != parts[0].shape[1:]:
            raise InputError(f"{table.path}: the targets in column {column} are lists of several lengths")
    targets = torch.cat(parts)
    return targets.long() if targets.dtype in (torch.uint16, torch.uint32, torch.uint64) else targets


def _whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _class_of(table: Table, column: str, classes: Sequence[str], value: Any, rows: Tensor, start: int) -> int:
    """Returns the number of a class. rows: where the value is. Raises: InputError for an unknown name."""
    name = str(value)
    if name in classes:
        return classes.index(name)
    raise InputError(
        f"{place(table.path, start + int(rows.nonzero()[0]), column)}: {name[:60]!r} is none of the classes "
        f"{some(list(classes))}"
    )


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
    if targets.is_complex():
        raise UsageError("the targets are complex numbers, which no metric takes")
    if targets.is_floating_point() and not bool((finite := targets.isfinite()).all()):
        row = int((~finite).nonzero()[0, 0])
        raise UsageError(
            f"the target of row {row} (the first row is 0) is {targets[~finite][0].item()}; give a number in "
            "every row, or leave the row out"
        )
    if not classes:
        if list(targets.shape) != expected and targets.numel() == predictions[0].numel():
            targets = targets.reshape(expected)
        if list(targets.shape) != expected:
            scores = len(expected) == targets.ndim + 1
            raise UsageError(
                f"the targets have the shape {list(targets.shape)}, the answers {expected}"
                + (
                    ".\nIf the members answer scores of classes, give of='softmax' (--of softmax); if "
                    "probabilities, of='probabilities' (--of probabilities)"
                    if scores
                    else ""
                )
            )
        return targets
    count = expected.pop(1)
    if list(targets.shape) != expected:
        raise UsageError(
            f"the targets have the shape {list(targets.shape)}; classes of these answers have {expected}"
        )
    whole = targets.long()
    wrong = (whole != targets) | (whole < 0) | (whole >= count)
    if bool(wrong.any()):
        raise UsageError(
            f"the targets are not all whole numbers from 0 to {count - 1}: row {int(wrong.nonzero()[0, 0])} "
            f"(the first row is 0) has {targets[wrong][0].item()}.\nIf other numbers name the classes, give "
            "classes= (--classes), in the order of the members' answers: classes='3,5,7'"
        )
    return whole
