"""Defines the part of a loaded model that is about single members: their modules, checkpoints, and swaps."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from widepack_artifacts.manifest import Member as MemberCheckpoint

from ..errors import UsageError
from ..spec.entries import FORWARD
from ..spec.names import checkpoint_of, whole_number
from .entry import WideEntry
from .member import Member
from .open_artifact import OpenArtifact

if TYPE_CHECKING:
    from .swap import SwapReport


class MemberAccess:
    """The members of a loaded model, one at a time. `WideModel` is one."""

    def __init__(self, artifact: OpenArtifact) -> None:
        self._artifact = artifact
        self._entries = {name: WideEntry(artifact, name) for name in artifact.manifest.entries}

    def __len__(self) -> int:
        return len(self.members)

    @property
    def members(self) -> tuple[str, ...]:
        """The members' names."""
        return self._artifact.members

    @property
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        """The checkpoint that each loaded member is now, also after a swap.

        Each has `name` (of the member), `source` (the path as it was given), `sha256` and `bytes` of the
        file.

        Example:
            >>> ens.swap("fold3", "fold3-new.pt")
            >>> ens.checkpoints[3].source
            'fold3-new.pt'
        """
        return self._artifact.checkpoints

    def member(self, member: int | str) -> Member:
        """Returns one member as a plain module. Its weights share memory with this model.

        Args:
            member: The member's number or name.

        Returns:
            A `Member`.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.
        """
        return self._forward().member(member)

    def __getitem__(self, member: int | str) -> Member:
        """Returns one member, as `member`. A negative number counts from the end. Raises: UsageError."""
        number = whole_number(member)
        if number is not None and -len(self) <= number < 0:
            return self.member(len(self) + number)
        return self.member(member)

    def __iter__(self) -> Iterator[Member]:
        return (self.member(i) for i in range(len(self)))

    def state_dict(self, member: int | str) -> dict[str, torch.Tensor]:
        """Returns one member's state dict, with every name of its checkpoint, bit for bit.

        Args:
            member: The member's number or name.

        Returns:
            Views of the mapped weights. A swap of this member writes into them.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.
        """
        self._artifact.check_open()
        i = self._artifact.chosen[self._artifact.index(member)]
        saved = [w for w in self._artifact.manifest.weights if w.role != "constant"]
        return {name: self._artifact.part(w.name, i) for w in saved for name in (w.name, *w.aliases)}

    def swap(
        self,
        member: int | str,
        checkpoint: str | PathLike[str],
        *,
        key: str | None = None,
        trust_pickle: bool = False,
    ) -> SwapReport:
        """Replaces a member by another checkpoint while other threads call.

        First the checkpoint is compared with the artifact (names, shapes, dtypes, ties) and its answers are
        checked with the probe. All new values of programs are computed. Then new calls wait until calls in
        flight have ended and the member's slices are written. Every answer is wholly of the old member or of
        the new one. From then on programs, `member(i)`, `state_dict(i)` and `state()` have the new weights.
        The artifact does not change.

        Args:
            member: The member's number or name.
            checkpoint: The file or folder of the new weights.
            key: As `build` takes it.
            trust_pickle: As `build` takes it.

        Returns:
            A `SwapReport`: what was written, the seconds of each stage, and how long calls waited.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            MemberMismatch: It does not fit, or differs in a weight that all members share.
            VerificationError: Its answers are too far from float64, or a wide program answers wrongly for it.
                Then the old member is restored.
            UsageError: No loaded member has this number or name, a program cannot take another member, or the
                model was closed.

        Example:
            >>> report = ens.swap("fold0", "new.pt")
            >>> print(report)
        """
        checkpoint_of(checkpoint)
        from .swap import swap  # opens checkpoints, which no other part of a loaded model does

        return swap(
            self._artifact,
            [e.programs for e in self._entries.values()],
            member,
            Path(checkpoint),
            key,
            trust_pickle,
        )

    def _forward(self) -> WideEntry:
        """Returns the entry `forward`. Raises: UsageError if the artifact has none."""
        found = self._entries.get(FORWARD)
        if found is None:
            first = next(iter(self._entries))
            raise UsageError(
                f"this model has no entry {FORWARD}; its entries are {', '.join(self._entries)}; "
                f"choose one, for example ens.{first}(...)"
            )
        return found
