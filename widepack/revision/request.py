"""Holds the arguments of one revision of an artifact."""

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
from .slots import MemberSlot

PathText = str | PathLike[str]
Model = str | Callable[..., nn.Module] | None
SlotsOf = Callable[[Manifest, Callable[[MemberPlace], NewMember]], list[MemberSlot]]
"""Returns the members of the revised artifact, from the manifest and a function that opens a new checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class ReviseRequest:
    """The arguments of `update`, `append` or `drop`.

    did: the name of the function. slots_of: returns the new members. how: how their
    checkpoints are opened. base: the checkpoint that adapters
    change; None for the artifact's base. max_shard_size: as the user gave it, or None.
    """

    did: str
    path: PathText
    slots_of: SlotsOf
    out: PathText | None = None
    force: bool = False
    how: NewMemberRequest = field(default_factory=NewMemberRequest)
    base: str | Path | None = None
    max_shard_size: int | str | None = None
    progress: Report | None = None

    @property
    def target(self) -> PathText:
        """The path that is written."""
        return self.path if self.out is None else self.out
