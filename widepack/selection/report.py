"""Defines the report of `widepack.select`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SelectReport:
    """The result of `widepack.select`.

    Attributes:
        path: The artifact that has the record; "" for a dry run.
        metric: The metric: `accuracy`, `log_loss` or `squared_error`.
        rows: The number of validation rows.
        members: The number of members of the artifact.
        weights: The weight of each selected member, by name.
        scores: The metric of `all` members with equal weights, of the `best_member`, and of the `selected`
            ones.
        best_member: The name of the best single member.
        cascade: The cascade: `order`, `stages`, `until`, `score`, `calls` (the mean number of members that
            run for a row); and `held_out`: the same figures over rows that it was not fitted on. None if
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
        """Returns the report as a dict that `json.dumps` takes."""
        return asdict(self)
