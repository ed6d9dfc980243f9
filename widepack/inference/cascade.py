"""Runs few members on all rows, and more members only on rows of which these are not sure: `ens.cascade`.

A stage has the members that run after those of the stages before. Each stage is a loaded model of its own
over the same mapped files, so its members run wide. A row is done when the confidence of the mean of all
members that ran on it reaches the threshold.

`SelectionRecord` reads and writes what a selection recorded in an artifact: weights of members, and a
cascade.

The record is in the provenance, under `selection`. It counts only while the members are the checkpoints that
it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest

from ..errors import ArtifactError, InputError, UsageError
from ..rows.axes import row_axis_of
from ..rows.layout import RowAxis
from .call_check import NoRows
from .entry import WideEntry
from .open_artifact import OpenArtifact

OF = ("softmax", "probabilities")
"""What the members of a cascade may answer: scores of classes, or their probabilities."""


@dataclass(frozen=True)
class CascadeAnswer:
    """The answer of a cascade.

    Attributes:
        mean: The mean probabilities of the members that ran on each row, with the dims of a member's answer.
        members: How many members ran on each row, `[B]`.

    Example:
        >>> found = ens.cascade(x, first=3, until=0.9)
        >>> found.mean.argmax(-1), found.members
    """

    __module__ = "widepack"  # pickles name the public place

    mean: Tensor
    members: Tensor

    @property
    def calls(self) -> float:
        """The mean number of members that ran on a row.

        Example:
            >>> print(ens.cascade(x, first=3, until=0.9).calls)
        """
        return float(self.members.double().mean()) if self.members.numel() else 0.0


LEAST_WEIGHT, LARGEST_WEIGHT = 1e-12, 1e12
"""The bounds of a member's weight in a cascade and in a selection: sums of products fit into float32."""


@dataclass(frozen=True)
class CascadeSettings:
    """How a cascade runs.

    Attributes:
        order: The numbers of the members, in the order in which they run.
        weights: Of these members in the mean.
        stages: How many members have run after each stage; the last is the number of all.
        until: The confidence at which a row is done.
        of: As `reduce` takes it: `softmax` or `probabilities`.
        dim, output: As `reduce` takes them.
    """

    order: tuple[int, ...]
    weights: tuple[float, ...]
    stages: tuple[int, ...]
    until: float
    of: str = "softmax"
    dim: int = -1
    output: str | int | None = None

    def check(self, members: int) -> None:
        """Refuses settings that fit no model of this number of members. Raises: UsageError."""
        if self.of not in OF:
            raise UsageError(f"of={self.of!r} is unknown for a cascade; known: {', '.join(OF)}")
        if not self.order or len(set(self.order)) != len(self.order):
            raise UsageError("a cascade runs each member once, and at least one")
        if not all(0 <= i < members for i in self.order):
            raise UsageError(f"the cascade names member {max(self.order)}; the model has {members}")
        if len(self.weights) != len(self.order) or not all(w > 0 for w in self.weights):
            raise UsageError("a cascade needs a positive weight for each of its members")
        check_weights(self.weights)
        rising = all(a < b for a, b in zip((0, *self.stages), self.stages))
        if not rising or self.stages[-1:] != (len(self.order),):
            raise UsageError(
                f"the stages {list(self.stages)} do not rise from 1 or more to the {len(self.order)} members"
            )
        if not isinstance(self.until, (int, float)) or not 0 < self.until <= 1:
            raise UsageError(f"until={self.until!r:.40} is no confidence; give a number above 0 and up to 1")


def check_weights(weights: Sequence[float]) -> None:
    """Refuses weights whose sums and products are not numbers of float32. Raises: UsageError."""
    for weight in weights:
        if not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
            raise UsageError(
                f"a member has the weight {weight:g}; weights are from {LEAST_WEIGHT:g} to {LARGEST_WEIGHT:g}"
            )


def stages_from(first: int, members: int) -> tuple[int, ...]:
    """Returns the stages of a cascade: each has run twice as many members as the one before.

    Args:
        first: The number of members of the first stage, at least 1.
        members: The number of all members.

    Returns: how many members have run after each stage.
    """
    found = []
    while first < members:
        found.append(first)
        first *= 2
    return (*found, members)


def confidence(mean: Tensor) -> Tensor:
    """Returns the largest probability of each row; the smallest of these over all positions of a row.

    mean: probabilities `[R, C, ...]`.
    """
    largest = mean.amax(1)
    return largest.flatten(1).amin(1) if largest.ndim > 1 else largest


class StageModel(Protocol):
    """A loaded model of some members."""

    def entry(self, name: str) -> WideEntry: ...


@dataclass(frozen=True)
class _Stage:
    """Some members of a cascade. weights: theirs. members: how many have run after it."""

    model: StageModel
    weights: Sequence[float]
    members: int


class Cascade:
    """A cascade over the members of an entry.

    Args:
        entry: The entry of the model with all members.
        settings: How it runs. They were checked.
        load_members: Loads some members as a model of their own, by their numbers.

    Raises:
        UsageError: The entry has states, or its rows are not known to be independent.
    """

    def __init__(
        self, entry: WideEntry, settings: CascadeSettings, load_members: Callable[[list[int]], StageModel]
    ) -> None:
        self._entry, self._settings = entry, settings
        self._calls = entry.tensor_calls
        if entry.entry.state:
            raise UsageError(f"entry {entry.name} has states, which a cascade does not carry")
        rows = self._calls.rows
        if not rows.independent:
            raise UsageError(
                f"entry {entry.name} cannot run as a cascade: its rows are not known to be independent.\n"
                f"{rows.reason[:400]}"
            )
        self._letter = rows.dim
        try:
            self._axes: list[RowAxis | None] = [row_axis_of(i.type, rows.dim) for i in entry.entry.inputs]
        except ValueError as error:
            raise ArtifactError(f"entry {entry.name} has no rows along {rows.dim!r}: {error}") from None
        self._least = entry.entry.dims[rows.dim].min
        parts = [slice(a, b) for a, b in zip((0, *settings.stages), settings.stages)]
        self._stages = [
            _Stage(load_members(list(settings.order[part])), settings.weights[part], part.stop)
            for part in parts
        ]

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CascadeAnswer:
        """Runs a call.

        Raises: InputError; UsageError if the answers have no probabilities.
        """
        values, marks = self._calls.tensors(args, kwargs, "shared")
        if any(marks):
            raise InputError("a cascade gives all members one input; widepack.each is for ens(...)")
        try:
            count = self._calls.sizes(values, marks)[self._letter]
        except NoRows:  # the stages answer it, or refuse it
            count = 0
        left = torch.arange(count, device=values[0].device)
        members = torch.zeros(count, dtype=torch.int64, device=values[0].device)
        total: Tensor | None = None
        weight = 0.0
        axis = 0
        for stage in self._stages:
            mean, axis = self._mean(stage, values, left, count)
            if total is None:
                total = torch.zeros_like(mean)
            total.index_add_(axis, left, mean * sum(stage.weights))
            weight += sum(stage.weights)
            members[left] = stage.members
            done = self._confidence(total.index_select(axis, left) / weight, axis) >= self._settings.until
            if stage is self._stages[-1]:
                done = torch.ones_like(done)
            total.index_copy_(axis, left[done], total.index_select(axis, left[done]) / weight)
            left = left[~done]
            if not len(left):
                break
        assert total is not None  # there is one stage at least
        return CascadeAnswer(total, members)

    def _mean(self, stage: _Stage, values: Sequence[Tensor], rows: Tensor, count: int) -> tuple[Tensor, int]:
        """Returns the mean probabilities of a stage over some rows, and the dim of the rows."""
        given, padded = values, rows
        if len(rows) < count:
            missing = max(0, self._least - len(rows))
            padded = torch.cat([rows, rows[-1:].expand(missing)])
            given = [
                v if axis is None else v.index_select(axis.dim, padded) for v, axis in zip(values, self._axes)
            ]
        args, kwargs, _ = self._calls.arguments(given)
        s = self._settings
        found: Tensor = stage.model.entry(self._entry.name).reduce(
            *args, "mean", of=s.of, weights=stage.weights, dim=s.dim, output=s.output, **kwargs
        )["mean"]
        axis = self._row_dim(found, len(padded))
        return found.narrow(axis, 0, len(rows)), axis

    def _row_dim(self, found: Tensor, rows: int) -> int:
        """Returns the dim of the rows in an answer. Raises: UsageError if there is none."""
        for leaf in self._entry.entry.outputs:
            axis = row_axis_of(leaf.type, self._letter)
            if axis is not None and found.ndim > axis.dim and found.shape[axis.dim] == rows:
                return axis.dim
        raise UsageError(f"the answer of entry {self._entry.name} has no dim of rows")

    def _confidence(self, mean: Tensor, axis: int) -> Tensor:
        """Returns the confidence of each row."""
        dim = self._settings.dim % mean.ndim
        if dim == axis:
            raise UsageError(f"dim={self._settings.dim} is the dim of the rows, and not that of the classes")
        rows_first = mean.movedim(axis, 0)
        return confidence(rows_first.movedim(dim if dim > axis else dim + 1, 1))


KEY = "selection"
"""The key of the provenance."""
_AGAIN = "run `widepack select` again"


@dataclass(frozen=True)
class SelectionRecord:
    """What a selection recorded.

    Attributes:
        entry: The entry that it is for.
        weights: The weight of each selected member, by name.
        cascade: How the cascade runs; None if it saves nothing.
    """

    entry: str
    weights: Mapping[str, float]
    cascade: CascadeSettings | None


def record_of(
    manifest: Manifest,
    entry: str,
    weights: Sequence[float],
    cascade: CascadeSettings | None,
    text: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the record for the provenance.

    Args:
        manifest: Of the artifact.
        entry: The entry.
        weights: Of all members; those of 0 are not selected.
        cascade: How the cascade runs.
        text: Figures for people.
    """
    names = [m.name for m in manifest.members]
    found: dict[str, Any] = {
        "entry": entry,
        "checkpoints": {m.name: m.sha256 for m in manifest.members},
        "weights": {name: w for name, w in zip(names, weights) if w},
        **text,
    }
    if cascade is not None:
        found["cascade"] = {
            "order": [names[i] for i in cascade.order],
            "stages": list(cascade.stages),
            "until": cascade.until,
            "of": cascade.of,
            "dim": cascade.dim,
            "output": cascade.output,
        }
    return found


def read_record(manifest: Manifest) -> SelectionRecord:
    """Returns what a selection recorded.

    Raises: UsageError if nothing is recorded, or if members have changed since; ArtifactError if the record
    does not have the form that a selection writes.
    """
    found = manifest.provenance.get(KEY)
    if found is None:
        raise UsageError(
            "this artifact records no selection; run `widepack select` with a validation file, or give"
            " first= and until="
        )
    try:
        known = {m.name: m.sha256 for m in manifest.members}
        names = list(known)
        weights = {str(n): float(w) for n, w in found["weights"].items()}
        check_weights([*weights.values()])
        before = {str(n): str(sha) for n, sha in found["checkpoints"].items()}
        cascade = None
        if (row := found.get("cascade")) is not None:
            order = [str(n) for n in row["order"]]
            if all(n in known for n in order):
                cascade = CascadeSettings(
                    tuple(names.index(n) for n in order),
                    tuple(weights[n] for n in order),
                    tuple(int(s) for s in row["stages"]),
                    float(row["until"]),
                    str(row["of"]),
                    int(row["dim"]),
                    row["output"]
                    if row["output"] is None or isinstance(row["output"], int)
                    else str(row["output"]),
                )
        entry = str(found["entry"])
    except UsageError as error:
        raise ArtifactError(f"provenance: {KEY}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(f"provenance: {KEY} does not have the form that a selection writes") from error
    for name in weights:
        if known.get(name) != before.get(name):
            raise UsageError(
                f"the selection was made for another checkpoint of member {name[:80]}, or for a member that"
                f" is not here any more; {_AGAIN}"
            )
    return SelectionRecord(entry, weights, cascade)


def settings_of(
    artifact: OpenArtifact,
    first: int | None,
    until: float | None,
    of: str,
    dim: int,
    output: str | int | None,
) -> tuple[str, CascadeSettings]:
    """Returns the entry, "" for `forward`, and the settings of a cascade as `WideModel.cascade` takes them.

    Raises: UsageError, also if nothing is recorded and no settings are given.
    """
    count = len(artifact.members)
    if first is None and until is None:
        if not artifact.whole:
            raise UsageError(
                "the recorded cascade is of all members, and some are loaded; give first= and until="
            )
        record = read_record(artifact.manifest)
        if record.cascade is None:
            raise UsageError(
                "the recorded selection has no cascade, since none saved members; give first= and until="
            )
        record.cascade.check(count)
        return record.entry, record.cascade
    if first is None or until is None:
        raise UsageError("cascade needs both first= and until=, or neither to run the recorded one")
    if type(first) is not int or not 1 <= first <= count:
        raise UsageError(f"first={first!r:.40} is no number of members from 1 to {count}")
    everyone, stages = tuple(range(count)), stages_from(first, count)
    settings = CascadeSettings(everyone, (1.0,) * count, stages, until, of, dim, output)
    settings.check(count)
    return "", settings
