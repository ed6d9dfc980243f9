"""Defines the arguments of one revision of an artifact, the revised members, and `ReviseReport`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from widepack_artifacts.manifest import Manifest

from ..checkpoints.discovery import MemberPlace
from ..checkpoints.new_member import NewMember, NewMemberRequest
from ..system.progress import Report

PathText = str | PathLike[str]
Model = str | Callable[..., nn.Module] | None


@dataclass(frozen=True)
class MemberSlot:
    """A member of the revised artifact.

    place: its number in the old artifact; of a new member that of the old one whose inputs in the probe it
    takes. new: the checkpoint of a new member.
    """

    name: str
    place: int
    new: NewMember | None = None

    @property
    def like(self) -> int:
        """The number of an old member with its shapes."""
        return self.place if self.new is None else self.new.like


SlotsOf = Callable[[Manifest, Callable[[MemberPlace], NewMember]], list[MemberSlot]]
"""Returns the members of the revised artifact, from the manifest and a function that opens a new checkpoint.
"""


@dataclass(frozen=True)
class ReviseRequest:
    """The arguments of `update`, `append` or `drop`.

    did: the name of the function. slots_of: returns the new members. how: how their checkpoints are opened.
    base: the checkpoint that adapters change; None for the artifact's base. max_shard_size: as the user gave
    it, or None.
    """

    did: str
    path: PathText
    slots_of: SlotsOf
    out: PathText | None
    force: bool
    max_shard_size: int | str | None
    progress: Report | None
    how: NewMemberRequest = field(default_factory=NewMemberRequest)
    base: Path | None = None

    @property
    def target(self) -> PathText:
        """The path that is written."""
        return self.path if self.out is None else self.out


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
        uncalibrated: Whether the artifact had a calibration, which was of the members before.

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
    uncalibrated: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` takes.

        Returns:
            A dict with a key for each field.

        Example:
            >>> print(json.dumps(report.to_json(), indent=2))
        """
        return asdict(self)
