"""Defines `ReviseReport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReviseReport:
    """What `widepack.update`, `widepack.append` or `widepack.drop` changed.

    Args:
        path: The folder of the revised artifact.
        did: `update`, `append` or `drop`.
        members: The names of all members, in order.
        changed: One dict for each changed member: `member`, `source` and `sha256` of a new one; `member` and
            `left` of a removed one.
        kinds: One dict for each weight whose kind changed: `weight`, `was`, `kind`, and its bytes `before`
            and `after`.
        lowered: The entries whose programs were lowered again.
        left_out: The measured plans that are no longer in the artifact, and why.
        written: How the weights files were made: `reflink`, `kernel`, `copy`, `streamed` or `kept`.
        asked: The names of the new members whose own modules were compared with the captured program.
        weights: The bytes of the weights, by kind.
        bytes_disk: The size of all files of the artifact, in bytes.
        seconds: The time of each stage, in seconds.
        before: The digest of the artifact before the change.
        digest: The digest of the artifact after the change.
        verification: The record of the comparisons, as the manifest has it.
        not_finite: The members whose own answers have NaN or inf, as in `BuildReport`.
        unused: How many names in the new checkpoints no member uses, as in `BuildReport`.

    Example:
        >>> report = widepack.update("ens.wide", {"fold0": "new.pt"})
        >>> report.did
        'update'
    """

    __module__ = "widepack"  # pickles name the public place

    path: str
    did: str
    members: tuple[str, ...]
    changed: list[dict[str, Any]]
    kinds: list[dict[str, Any]]
    lowered: list[str]
    left_out: list[str]
    written: str
    asked: list[str]
    weights: dict[str, int]
    bytes_disk: int
    seconds: dict[str, float]
    before: str
    digest: str
    verification: dict[str, Any] = field(default_factory=dict)
    not_finite: list[dict[str, Any]] = field(default_factory=list)
    unused: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with a key for each field.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)
