"""Defines a loaded artifact whose members are in several processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from .. import errors
from ..errors import WidepackError
from ..inference.entry_access import EntryAccess
from ..inference.member import Member
from ..inference.member_access import MemberAccess
from ..inference.model import WideModel
from ..spec.names import checkpoint_of, number_of
from ..system.gate import Gate
from .collectives import Ranks
from .rank_entry import RankEntry

if TYPE_CHECKING:
    from ..inference.swap import SwapReport


class RankModel(MemberAccess, EntryAccess[RankEntry]):
    """N trained members in several processes that run in one call. `widepack.distributed.load` returns it.

    Every process of the group makes the same calls in the same order. Inputs are those of rank 0: the other
    ranks give tensors of the same shapes and dtypes, whose values are not read. Every rank gets the answer of
    all members. `reduce` moves sums of each rank instead of answers, except for quantiles, outputs whose
    shapes differ, and models with states. `route` sends each row to the rank of its member. A call that one
    rank refuses runs on no rank. If a process ends or does not answer in time, calls raise `WidepackError`.

    `member` and `state_dict` are for the members of this rank.

    Attributes:
        members: The names of all members.
        here: The part of the members in this process, as a model of its own.
        checkpoints: The checkpoint that each member is now.
        entries: The names of the entries.
        manifest: The manifest of the artifact.
        device: Where this rank's members run.
        rank: The number of this process in the group.
        parts: The places of the members of each rank.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # in processes that torchrun starts
        >>> ens = widepack.distributed.load("ens.wide")
        >>> y = ens(x)  # on every rank: x [B, 8], y [N, B, 3]
    """

    def __init__(
        self, here: WideModel, members: Sequence[int], parts: Sequence[range], ranks: Ranks, gate: Gate
    ) -> None:
        rows = [here.manifest.members[i] for i in members]
        self._members = tuple(row.name for row in rows)
        super().__init__(
            {name: RankEntry(name, here, self._members, parts, ranks, gate) for name in here.entries}
        )
        self.here, self.parts, self.rank = here, tuple(parts), ranks.rank
        self._ranks, self._checkpoints = ranks, rows

    @property
    def members(self) -> tuple[str, ...]:
        return self._members

    @property
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        return tuple(self._checkpoints)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artifact. A swap does not change it: see `checkpoints`."""
        return self.here.manifest

    @property
    def device(self) -> torch.device:
        """Where this rank's inputs, members and answers are."""
        return self.here.device

    def __repr__(self) -> str:
        return self._describe(self.members)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RankModel cannot be copied or pickled: its members are in several processes; load the "
            "artifact again on every rank"
        )

    # ---------------------------------------------------------------- members, documented in `MemberAccess`

    def member(self, member: int | str) -> Member:
        return self._forward().member(member)

    def state_dict(self, member: int | str) -> dict[str, Any]:
        place = number_of(self.members, member)
        next(iter(self._entries.values())).refuse_elsewhere(place)
        return self.here.state_dict(self.members[place])

    def stored_state(self, member: int | str) -> dict[str, Any]:
        place = number_of(self.members, member)
        next(iter(self._entries.values())).refuse_elsewhere(place)
        return self.here.stored_state(self.members[place])

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
        """Replaces a member by another checkpoint, on every rank at the same place in the order of calls.

        The rank that has the member reads the checkpoint and checks it; the others wait for it, at most the
        timeout of the load. Otherwise as `WideModel.swap`.

        Args:
            member: The member's number or name.
            checkpoint: The file or folder of the new weights, as the member's rank finds it.
            key: As `build` takes it.
            trust_pickle: As `build` takes it.
            ignore: As `WideModel.swap` takes it.
            model: As `WideModel.swap` takes it.
            model_args: As `WideModel.swap` takes them.

        Returns:
            A `SwapReport`, the same on every rank.

        Raises:
            WidepackError: As `WideModel.swap`, on every rank. The old member is kept then.
        """
        from ..inference.swap import SwapReport  # opens checkpoints, which no other part of a model does

        made = f"{model if isinstance(model, str) else type(model).__name__} {dict(model_args or {})}"
        with self._ranks.lock:
            place = self._ranks.agreed(
                lambda: (checkpoint_of(checkpoint), number_of(self.members, member))[1],
                lambda found: f"swap {found} {checkpoint} {key} {trust_pickle} {ignore} {made}",
            )
            owner = next(rank for rank, places in enumerate(self.parts) if place in places)
            error: WidepackError | None = None
            answer: dict[str, Any] = {}
            if owner == self.rank:
                name = self.members[place]
                try:
                    report = self.here.swap(
                        name,
                        checkpoint,
                        key=key,
                        trust_pickle=trust_pickle,
                        ignore=ignore,
                        model=model,
                        model_args=model_args,
                    )
                    now = self.here.checkpoints[place - self.parts[owner].start]
                    answer = {"report": asdict(report), "checkpoint": asdict(now)}
                except WidepackError as e:
                    error, answer = e, {"error": type(e).__name__, "text": str(e)}
            text = torch.tensor(list(json.dumps(answer).encode()), dtype=torch.uint8, device=self.device)
            answer = json.loads(bytes(self._ranks.gathered([text])[owner][0].tolist()))
            if error is not None:
                raise error
            if "error" in answer:
                raise getattr(errors, answer["error"], WidepackError)(f"rank {owner}: {answer['text']}")
            self._checkpoints[place] = MemberCheckpoint(**answer["checkpoint"])
            return SwapReport(**answer["report"])

    def close(self) -> None:
        """Releases this rank's programs and weights, and ends the group of the model."""
        self.here.close()
        self._ranks.close()
