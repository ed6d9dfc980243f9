"""Defines `widepack.select`, which chooses members of an ensemble on validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader

from ..errors import UsageError
from ..inference.cascade import KEY, CascadeSettings, record_of
from ..inference.load import load
from ..revision.record import publish_record
from ..revision.revise import drop
from ..system.progress import Report
from .cascade_fit import CascadeData, CascadeFit
from .greedy import Selected, select_members
from .losses import METRICS, OF_CLASSES, means, moments, score
from .validation import Validation, ValidationRequest

ROUNDS = 100


@dataclass(frozen=True)
class SelectReport:
    """The result of `widepack.select`.

    Attributes:
        path: The artifact that has the record; "" for a dry run.
        metric: The metric: `accuracy`, `log_loss`, `squared_error` or `nll`.
        rows: The number of validation rows.
        members: The number of members of the artifact.
        weights: The weight of each selected member, by name.
        scores: The metric of `all` members with equal weights, of the `best_member`, and of the `selected`
            ones. One member has no variance, so that it has no `nll`.
        best_member: The name of the best single member.
        cascade: The cascade: `order`, `stages`, `until`, `score`, `calls` (the mean number of members that
            run for a row); and `held_out`: the same over rows that it was not fitted on. None if
            there is none.
        digest: The digest of the artifact; "" for a dry run.

    Example:
        >>> report = widepack.select("ens.wide", "val.safetensors", target="y", of="softmax")
        >>> report.weights, report.scores
    """

    __module__ = "widepack"  # pickles name the public place

    path: str
    metric: str
    rows: int
    members: int
    weights: dict[str, float]
    scores: dict[str, float]
    best_member: str
    cascade: dict[str, Any] | None
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with the fields of the report.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)


def select(
    path: str | PathLike[str],
    on: str | PathLike[str],
    *,
    target: str,
    of: str | None = None,
    metric: str | None = None,
    most: int | None = None,
    first: int | None = None,
    allowed: float = 0.0,
    rounds: int = ROUNDS,
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
    out: str | PathLike[str] | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Report | None = None,
) -> SelectReport:
    """Chooses members of an ensemble and their weights on validation data, and fits a cascade of them.

    Members are selected greedily, with replacement: each round adds the member that makes the mean of all
    added ones best. All members are selected, with equal weights, if these score better. The cascade runs the
    selected members in the order in which they were added.

    Args:
        path: The artifact.
        on: The validation data: a file or folder as `widepack.predict` reads it, with a column of targets.
        target: The column of the targets: classes from 0, names of classes with `classes`, or numbers.
        of: What the members answer: `softmax` for scores of classes, `probabilities`, or None for numbers.
        metric: `accuracy` (default) or `log_loss` with `of`; else `squared_error` (default), or `nll` of a
            normal distribution with the mean and the variance of the members.
        most: How many different members are selected at most.
        first: The number of members of the cascade's first stage. Default: it is fitted.
        allowed: How much the cascade may lose against all selected members, as a mean over the rows: 0.002
            for 0.2 points of accuracy.
        rounds: How many members are added at most.
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
        out: A folder for an artifact with the selected members alone. Default: the record is added to the
            artifact at `path`, and all members stay.
        force: Whether to replace an artifact at `out`.
        dry_run: Whether to write nothing.
        progress: A function that is called with `(stage, done, total)`.

    Returns:
        A `SelectReport`.

    Raises:
        UsageError: An argument is wrong, the targets do not fit the answers, or the best selection of `most`
            members scores worse than all members. Nothing is written then.
        InputError: The file cannot be read, has a row that the model refuses, or a member answers NaN.
        ArtifactError: The artifact is damaged or cannot be written.

    Example:
        >>> report = widepack.select("ens.wide", "val.safetensors", target="y", of="softmax", allowed=0.002)
        >>> kinds = {"target": "kind", "of": "softmax", "classes": "cat,dog,bird"}
        >>> widepack.select("ens.wide", "val.csv", inputs={"x": "f0..f63"}, **kinds)
        >>> ens = widepack.load("ens.wide")
        >>> ens.cascade(x).mean
    """
    request = ValidationRequest.checked(
        on, target, of, classes, (header, delimiter, decimal), nulls,
        inputs=inputs, entry=entry, answer=answer, dim=dim, batch=batch,
    )  # fmt: skip  # its options in two lines
    metric = _checked(of, metric, most, allowed, rounds)
    ens = load(path)
    validation = request.run(ens, progress)
    predictions, targets = _of_metric(metric, validation)
    selected = select_members(predictions, targets, METRICS[metric], rounds, most)
    scores, best, selected = _scores(metric, predictions, targets, selected, most)
    if not dry_run:
        _check_not_worse(metric, scores, selected)
    settings, measured = None, None
    if of is not None and len(selected.order) > 1:
        settings, measured = _cascade(
            CascadeData(
                predictions[selected.order], targets, [selected.weights[i] for i in selected.order],
                METRICS[metric][0],
            ),
            selected, metric, allowed, first, of, dim, answer,
        )  # fmt: skip  # one line for the rest
    text = {
        "metric": metric,
        "rows": len(targets),
        "scores": scores,
        "on": validation.sha256,
        "figures": measured,
    }
    digest, place = "", "" if dry_run else fspath(path)
    if not dry_run:
        weights, chosen = selected.weights, settings
        manifest, digest = ens.manifest, ens.manifest.digest
        if out is not None:
            place = fspath(out)
            manifest, digest = _selected_alone(path, place, selected, force, progress)
            weights, chosen = _renumbered(selected, settings)
        digest = publish_record(
            place, KEY, record_of(manifest, validation.entry, weights, chosen, text), digest
        )
    return SelectReport(
        path=place,
        metric=metric,
        rows=len(targets),
        members=len(ens.members),
        weights={ens.members[i]: selected.weights[i] for i in selected.order},
        scores=scores,
        best_member=ens.members[best],
        cascade=None if settings is None or measured is None else {
            "order": [ens.members[i] for i in settings.order], "stages": list(settings.stages),
            "until": settings.until, **measured,
        },
        digest=digest,
    )  # fmt: skip  # the cascade in three lines


def _checked(of: Any, metric: Any, most: Any, allowed: Any, rounds: Any) -> str:
    """Returns the metric. Raises: UsageError for options that are wrong."""
    chosen = metric or ("squared_error" if of is None else "accuracy")
    if chosen not in METRICS:
        raise UsageError(f"metric={chosen!r} is unknown; known: {', '.join(METRICS)}")
    if (chosen in OF_CLASSES) != (of is not None):
        raise UsageError(
            f"metric={chosen!r} needs probabilities: give of='softmax' or of='probabilities'"
            if of is None
            else f"metric={chosen!r} is for numbers; leave of= out"
        )
    if chosen == "nll" and most == 1:
        raise UsageError("metric='nll' needs the variance of two members at least, and most=1 selects one")
    for name, value in (("most", 1 if most is None else most), ("rounds", rounds)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r:.40} is not a positive whole number")
    if isinstance(allowed, bool) or not isinstance(allowed, (int, float)) or not 0 <= allowed < 1:
        raise UsageError(f"allowed={allowed!r:.40} is not a number from 0 to below 1")
    return str(chosen)


def _of_metric(metric: str, validation: Validation) -> tuple[Tensor, Tensor]:
    """Returns predictions and targets as a metric takes them. Raises: UsageError."""
    if metric != "nll":
        return validation.predictions, validation.targets
    if len(validation.predictions) < 2:
        raise UsageError("metric='nll' needs the variance of two members at least, and there is one")
    return moments(validation.predictions, validation.targets)


def _scores(
    metric: str, predictions: Tensor, targets: Tensor, selected: Selected, most: int | None
) -> tuple[dict[str, float], int, Selected]:
    """Returns the scores of all, the best and the selected members, the number of the best one, and the
    selection: all members with equal weights, where these score better and may be selected.
    """
    losses, count = METRICS[metric], len(predictions)
    single = [means(losses, p, targets) for p in predictions]
    best = min(range(count), key=single.__getitem__)
    everyone = means(losses, predictions.mean(0), targets)
    if everyone[0] < selected.losses[0] and (most is None or most >= count):
        order = list(dict.fromkeys([*selected.order, *range(count)]))
        selected = Selected([1] * count, order, everyone)
    scores = {
        "all": score(metric, everyone[0]),
        **({} if metric == "nll" else {"best_member": score(metric, single[best][0])}),
        "selected": score(metric, selected.losses[0]),
    }
    return scores, best, selected


def _check_not_worse(metric: str, scores: Mapping[str, float], selected: Selected) -> None:
    """Raises: UsageError if all members score better than those that were selected."""
    everyone, found = scores["all"], scores["selected"]
    if found < everyone if metric == "accuracy" else found > everyone:
        raise UsageError(
            f"the best {len(selected.order)} of {len(selected.counts)} members have the {metric} {found:.4g} "
            f"and all have {everyone:.4g}, so that nothing was written; select more with most= (--most), or "
            "look at it with dry_run=True (--dry-run)"
        )


def _cascade(
    data: CascadeData,
    selected: Selected,
    metric: str,
    allowed: float,
    first: int | None,
    of: str,
    dim: int,
    answer: str | int | None,
) -> tuple[CascadeSettings | None, dict[str, Any] | None]:
    """Fits a cascade. Returns: its settings, and what it costs and saves; None if none runs fewer members."""
    if first is not None and not 1 <= first <= data.members:
        raise UsageError(f"first={first} is no number of the {data.members} selected members")
    rows = torch.arange(data.losses.shape[1])
    fit: CascadeFit = data.fit(allowed, rows, first)
    if len(fit.stages) < 2:
        return None, None
    loss, calls, whole = data.held_out(allowed, first)
    weights = tuple(selected.weights[i] for i in selected.order)
    settings = CascadeSettings(
        tuple(selected.order), weights, fit.stages, min(fit.until, 1.0), of, dim, answer
    )
    measured = {
        "score": score(metric, fit.loss),
        "calls": fit.calls,
        "held_out": {"score": score(metric, loss), "of_selected": score(metric, whole), "calls": calls},
    }
    return settings, measured


def _selected_alone(
    path: str | PathLike[str], out: str, selected: Selected, force: bool, progress: Report | None
) -> tuple[Manifest, str]:
    """Writes an artifact of the selected members. Returns: its manifest and digest."""
    others = [i for i, count in enumerate(selected.counts) if not count]
    if not others:
        raise UsageError("all members were selected, so there is no smaller artifact to write; leave out=")
    report = drop(path, others, out=out, force=force, progress=progress)
    return Reader(out, report.digest).manifest, report.digest


def _renumbered(
    selected: Selected, settings: CascadeSettings | None
) -> tuple[list[float], CascadeSettings | None]:
    """Returns weights and settings for an artifact of the selected members alone."""
    kept = [i for i, count in enumerate(selected.counts) if count]
    weights = [selected.weights[i] for i in kept]
    if settings is None:
        return weights, None
    return weights, replace(settings, order=tuple(kept.index(i) for i in settings.order))
