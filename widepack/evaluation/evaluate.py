"""Defines `widepack.evaluate`, which measures the members of an ensemble and their mean on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..inference.calibration_record import CALIBRATION, calibration_record
from ..inference.load import load
from ..inference.model import WideModel
from ..reduction.calibration import Calibration
from ..revision.record import publish_record
from ..selection.validation import Validation, ValidationRequest
from ..system.progress import Report
from . import class_metrics, number_metrics
from .calibration_fit import calibrated_classes, calibrated_numbers

DRAWS = 10
"""How many ensembles of each size the learning curve averages over."""

Figures = dict[str, float | None]


@dataclass(frozen=True)
class EvaluateReport:
    """The result of `widepack.evaluate`.

    Attributes:
        path: The artifact.
        digest: Its digest.
        kind: `classes` or `numbers`.
        rows: The number of rows of the data.
        members: The figures of each member, by name: `accuracy`, `nll`, `brier`, `ece` and `error_auroc` of
            classes; `rmse` and `mae` of numbers.
        ensemble: The same of the mean of all members; of numbers also `nll` and `error_rank`.
        disagreement: Of classes the part of the pairs of members that choose different ones; of numbers
            the mean deviation of the members.
        curve: For rising numbers of members, the mean `nll` (classes) or `rmse` (numbers) of ensembles of so
            many members: a list of `{"members": ..., "nll": ...}`.
        reliability: Of classes, the bins of the ensemble's reliability diagram: `least`, `most`, `count`,
            `confidence`, `accuracy`.
        intervals: Of numbers, for each `level` the `coverage` and `width` of the ensemble's intervals.
        sha256: Of the data.
        calibration: None without `calibrate`. `kind` (`temperature` of classes, `variance` of numbers) and
            `value`; the number of `rows` that it was fitted on, and of those `held_out`; the ensemble's
            figures of these `before` and `after`; whether it `improves` their nll; whether the value is
            `at_bound`; and `saved`, the digest of the artifact that has it, or "".

    Figures are None where they do not exist: an AUROC without errors, a deviation of one member.

    Example:
        >>> report = widepack.evaluate("ens.wide", "val.safetensors", target="y", of="softmax")
        >>> report.ensemble["nll"], [m["nll"] for m in report.members.values()]
    """

    __module__ = "widepack"  # pickles name the public place

    path: str
    digest: str
    kind: str
    rows: int
    members: dict[str, Figures]
    ensemble: Figures
    disagreement: float
    curve: list[dict[str, float | int]]
    reliability: list[dict[str, float | int]] = field(default_factory=list)
    intervals: list[dict[str, float]] = field(default_factory=list)
    sha256: str = ""
    calibration: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with the fields of the report.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)


def evaluate(
    path: str | PathLike[str],
    on: str | PathLike[str],
    *,
    target: str,
    of: str | None = None,
    classes: str | Sequence[str] | None = None,
    inputs: Mapping[str, str | Sequence[str]] | None = None,
    entry: str = "",
    answer: str | int | None = None,
    dim: int = -1,
    batch: int | None = None,
    header: bool | None = None,
    delimiter: str | None = None,
    decimal: str = ".",
    nulls: str = "refuse",
    calibrate: bool = False,
    save: bool = False,
    progress: Report | None = None,
) -> EvaluateReport:
    """Measures how good each member of an ensemble is, and how good their mean is.

    With `calibrate` it also fits one number on half of the rows, and measures on the other half what it does:
    a temperature of the mean probabilities, or a factor of the variance of numbers.

    Args:
        path: The artifact.
        on: The data: a file or folder as `widepack.predict` reads it, with a column of targets.
        target: The column of the targets: classes from 0, names of classes with `classes`, or numbers.
        of: What the members answer: `softmax` for scores of classes, `probabilities`, or None for numbers.
        classes: The name of each class that the targets are given as, in the order of the members' answers:
            `"cat,dog"` or a list. Default: targets are classes 0 to C-1.
        inputs: The columns of each input, as `widepack.predict` takes them.
        entry: The entry. Default: `forward`, or the first entry.
        answer: The output that predictions are read from. Default: `logits`, else the first.
        dim: The dim of the classes in a member's answer.
        batch: The rows of a batch. Default: 256.
        header: Whether the first line of a CSV file has names, as `widepack.predict` takes it.
        delimiter: What stands between the values of a CSV file.
        decimal: What stands before the decimals of a number in a CSV file: `"."` or `","`.
        nulls: `"nan"` reads a null in an input of floats as NaN. Default: it is refused.
        calibrate: Whether to fit a calibration. The halves are drawn with a fixed seed.
        save: Whether to record the calibration in the artifact, for `calibrated=True` of `mean`, `std` and
            `reduce`. It needs `calibrate`.
        progress: A function that is called with `(stage, done, total)`.

    Returns:
        An `EvaluateReport`.

    Raises:
        UsageError: An argument is wrong, or the targets do not fit the answers.
        InputError: The file cannot be read, has a row that the model refuses, or a member answers NaN.
        ArtifactError: The artifact is damaged, or cannot be written.

    Example:
        >>> kinds = {"target": "kind", "of": "softmax", "classes": "cat,dog,bird"}
        >>> report = widepack.evaluate("ens.wide", "val.csv", inputs={"x": "f0..f63"}, **kinds)
        >>> [(b["confidence"], b["accuracy"]) for b in report.reliability if b["count"]]
    """
    request = ValidationRequest.checked(
        on, target, of, classes, (header, delimiter, decimal), nulls,
        inputs=inputs, entry=entry, answer=answer, dim=dim, batch=batch,
    )  # fmt: skip  # its options in two lines
    if save and not calibrate:
        raise UsageError("save= records a calibration; give calibrate=True (--calibrate) too")
    ens = load(path)
    validation = request.run(ens, progress)
    predictions, targets = validation.predictions, validation.targets
    found = _of_numbers(predictions, targets) if of is None else _of_classes(predictions, targets)
    report = EvaluateReport(
        path=fspath(path),
        digest=ens.manifest.digest,
        rows=len(targets),
        members=dict(zip(ens.members, found.pop("members"), strict=True)),
        sha256=validation.sha256,
        **found,
    )
    if not calibrate:
        return report
    fitted = _calibrated(predictions, targets, of)
    fitted["saved"] = _saved(path, ens, validation, fitted, of) if save else ""
    return replace(report, calibration=fitted)


def _calibrated(predictions: Tensor, targets: Tensor, of: str | None) -> dict[str, Any]:
    """Returns the calibration of a report."""
    if of is None:
        return calibrated_numbers(predictions, targets)
    return calibrated_classes(lambda rows: _mean(predictions[:, rows], class_metrics.positions), targets)


def _saved(
    path: str | PathLike[str],
    ens: WideModel,
    validation: Validation,
    fitted: Mapping[str, Any],
    of: str | None,
) -> str:
    """Records a calibration in the artifact. Returns: the new digest. Raises: ArtifactError."""
    rank = validation.predictions.ndim - 1
    calibration = Calibration(fitted["kind"], fitted["value"], validation.output, of, validation.dim, rank)
    record = calibration_record(ens.manifest, validation.entry, calibration)
    figures = {
        k: {n: f for n, f in v.items() if not isinstance(f, list)} if isinstance(v, dict) else v
        for k, v in fitted.items()
        if k not in record
    }
    return publish_record(
        path, CALIBRATION, {**record, "on": validation.sha256, **figures}, ens.manifest.digest
    )


def _of_classes(predictions: Tensor, targets: Tensor) -> dict[str, Any]:
    """Returns the fields of a report on classes. predictions: [N, R, C, ...]; targets: [R, ...]."""
    truth, flat = targets.flatten(), class_metrics.positions
    mean = _mean(predictions, flat)
    return {
        "kind": "classes",
        "members": [class_metrics.figures(flat(one), truth) for one in predictions],
        "ensemble": class_metrics.figures(mean, truth),
        "disagreement": class_metrics.disagreement([flat(one).argmax(1) for one in predictions]),
        "curve": _curve(predictions, "nll", lambda some: class_metrics.nll(_mean(some, flat), truth)),
        "reliability": [asdict(b) for b in class_metrics.reliability(mean, truth)],
    }


def _of_numbers(predictions: Tensor, targets: Tensor) -> dict[str, Any]:
    """Returns the fields of a report on numbers. predictions: [N, R, ...]; targets: [R, ...]."""
    y, truth = predictions.flatten(1).double(), targets.double().flatten()
    spread, intervals = number_metrics.spread_figures(y, truth)
    return {
        "kind": "numbers",
        "members": [number_metrics.figures(one, truth) for one in y],
        "ensemble": {**number_metrics.figures(y.mean(0), truth), **spread},
        "disagreement": number_metrics.disagreement(y),
        "curve": _curve(y, "rmse", lambda some: number_metrics.rmse(some.mean(0), truth)),
        "intervals": [asdict(i) for i in intervals],
    }


def _mean(members: Tensor, flat: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the mean of members, with one of them in float64 at a time. members: [K, R, ...]."""
    total = flat(members[0]).clone()
    for one in members[1:]:
        total += flat(one)
    return total / len(members)


def _curve(members: Tensor, name: str, figure: Callable[[Tensor], float]) -> list[dict[str, float | int]]:
    """Returns a figure of ensembles of 1, 2, 4, ... members, as the mean over draws of members.

    members: the predictions, [N, R, ...]. figure: of the mean of some members, from their predictions.
    """
    count, generator = members.shape[0], torch.Generator().manual_seed(0)
    curve: list[dict[str, float | int]] = []
    sizes = sorted({*(2**k for k in range(count.bit_length()) if 2**k <= count), count})
    for size in sizes:
        draws = [torch.randperm(count, generator=generator)[:size] for _ in range(DRAWS)]
        if size == 1:
            draws = list(torch.arange(count).unsqueeze(1))
        elif size == count:
            draws = [torch.arange(count)]
        found = [figure(members[d]) for d in draws]
        curve.append({"members": size, name: sum(found) / len(found)})
    return curve
