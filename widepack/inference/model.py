"""Defines a loaded artifact: N members that run as one, with an entry for each method that was built."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from ..spec.names import checkpoint_of
from .entry import WideEntry
from .entry_access import EntryAccess
from .member import Member
from .member_access import MemberAccess
from .open_artifact import OpenArtifact

if TYPE_CHECKING:
    from .swap import SwapReport


class WideModel(MemberAccess, EntryAccess[WideEntry]):
    """N trained members that run in one call. `widepack.load` returns it.

    Calls may come from several threads at once. A call, `each`, `route`, `reduce`, `mean`, `std`, `vote`,
    `only`, `plans` and `member` are those of the entry `forward`. Other entries are attributes:
    `ens.encode(x)`, or `ens.entry("encode")(x)`.

    Attributes:
        members: The members' names.
        checkpoints: The checkpoint that each member is now.
        entries: The names of the entries.
        manifest: The manifest of the artifact. A swap does not change it.
        device: Where the members run.
        plan: The plan of pattern `shared` at the smallest batch class.
        backend: What runs the programs.

    Example:
        >>> ens = widepack.load("ens.wide")
        >>> y = ens(x)  # all members on one input: x [B, 8], y [N, B, 3]
        >>> z = ens.each(xs)  # each member on its own input: xs [N, B, 8]
        >>> y0 = ens["fold0"](x)  # one member as a plain module
    """

    __module__ = "widepack"  # pickles name the public place

    def __init__(self, artifact: OpenArtifact, again: Callable[[], WideModel]) -> None:
        super().__init__({name: WideEntry(artifact, name) for name in artifact.manifest.entries})
        self._artifact = artifact
        self._again = again

    @property
    def members(self) -> tuple[str, ...]:
        return self._artifact.members

    @property
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        return self._artifact.checkpoints

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artifact. A swap does not change it: see `checkpoints`."""
        return self._artifact.manifest

    @property
    def device(self) -> torch.device:
        """Where the members run."""
        return self._artifact.device

    def __repr__(self) -> str:
        return self._describe(self.members)

    def __reduce__(self) -> tuple[Callable[[], WideModel], tuple[()]]:
        """Copies and pickles by the path: the copy loads the same artifact with the same arguments.

        Raises: TypeError after a swap, which is of this process only; UsageError after `close`.
        """
        self._artifact.check_open()
        self._refuse_copy_of_swapped(self.manifest)
        return self._again, ()

    # ---------------------------------------------------------------- members, documented in `MemberAccess`

    def member(self, member: int | str) -> Member:
        return self._forward().member(member)

    def state_dict(self, member: int | str) -> dict[str, torch.Tensor]:
        self._artifact.check_open()
        i = self._artifact.chosen[self._artifact.index(member)]
        saved = [w for w in self._artifact.manifest.member_weights if w.role != "constant"]
        return {name: self._artifact.part(w.name, i) for w in saved for name in (w.name, *w.aliases)}

    def swap(
        self,
        member: int | str,
        checkpoint: str | PathLike[str],
        *,
        key: str | None = None,
        trust_pickle: bool = False,
    ) -> SwapReport:
        checkpoint_of(checkpoint)
        from .swap import swap  # opens checkpoints, which no other part of a loaded model does

        programs = [e.programs for e in self._entries.values()]
        return swap(self._artifact, programs, member, Path(checkpoint), key, trust_pickle)

    def close(self) -> None:
        """Releases programs and weights.

        Calls, `member`, `state`, `state_dict` and `swap` raise `UsageError` afterwards. Members and tensors
        that were returned before stay valid. The mapped files stay open as long as one of these exists.
        """
        self._artifact.close()
        for entry in self._entries.values():
            entry.forget()


RESERVED = frozenset({n for n in dir(WideModel) if not n.startswith("__")})
"""Names that an entry cannot have: those of the model's attributes."""
