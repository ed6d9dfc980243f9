"""Defines the part of a loaded model that is about single members: their modules, checkpoints, and swaps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from ..spec.names import whole_number
from .member import Member

if TYPE_CHECKING:
    from .swap import SwapReport


class MemberAccess(ABC):
    """The members of a loaded model, one at a time, wherever they are."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """The members' names."""

    @property
    @abstractmethod
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        """The checkpoint that each loaded member is now, also after a swap.

        Each has `name` (of the member), `source` (the path as it was given), `sha256` and `bytes` of the
        file.

        Example:
            >>> ens.swap("fold3", "fold3-new.pt")
            >>> ens.checkpoints[3].source
            'fold3-new.pt'
        """

    @abstractmethod
    def member(self, member: int | str) -> Member:
        """Returns one member as a plain module. Its weights share memory with this model.

        Args:
            member: The member's number or name.

        Returns:
            A `Member`.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.
        """

    def __getitem__(self, member: int | str) -> Member:
        """Returns one member, as `member`. A negative number counts from the end. Raises: UsageError."""
        number = whole_number(member)
        if number is not None and -len(self) <= number < 0:
            return self.member(len(self) + number)
        return self.member(member)

    def __iter__(self) -> Iterator[Member]:
        return (self.member(i) for i in range(len(self)))

    @abstractmethod
    def state_dict(self, member: int | str) -> dict[str, Any]:
        """Returns one member's state dict, as `state_dict()` of the module that has loaded its checkpoint.

        It has the versions of the submodules (`_metadata`) and their extra state too, so `load_state_dict` of
        the model takes it as its own.

        Args:
            member: The member's number or name.

        Returns:
            Views of the mapped weights. A swap of this member writes into them.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed. Or the model
                changes its own state dict when it loads it, or the build ignored extra state: the model would
                load another member.
        """

    @abstractmethod
    def stored_state(self, member: int | str) -> dict[str, Any]:
        """Returns one member's tensors, versions and extra state, as the artifact has them.

        Other than `state_dict`, it does not refuse what `load_state_dict` of the model would change: for
        comparisons with a checkpoint after it was loaded.

        Args:
            member: The member's number or name.

        Returns:
            Views of the mapped weights.

        Raises:
            UsageError: No loaded member has this number or name, or the model was closed.
        """

    @abstractmethod
    def swap(
        self,
        member: int | str,
        checkpoint: str | PathLike[str],
        *,
        key: str | None = None,
        trust_pickle: bool = False,
        ignore: str | Sequence[str] = (),
        model: str | Callable[..., nn.Module] | None = None,
        model_args: Mapping[str, Any] | None = None,
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
            ignore: As `build` takes it. What the build ignored is ignored too.
            model: The factory of one member, as `build` takes it, for a checkpoint that the model changes
                when it loads it (older versions, other names), or that its own code may change.
            model_args: Keyword arguments of the factory.

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

    def _refuse_copy_of_swapped(self, manifest: Manifest) -> None:
        """Refuses a copy of a model in which members were swapped. Raises: TypeError."""
        if swapped := [c.name for c in self.checkpoints if c not in manifest.members]:
            raise TypeError(
                f"this {type(self).__name__} cannot be copied or pickled: {', '.join(swapped)} was swapped "
                "in this process only, and a copy loads the artifact again; put the checkpoint into the "
                "artifact with widepack.update, and load that"
            )
