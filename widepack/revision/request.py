"""Defines the arguments of one revision of an artifact, and the members of the revised artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

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
