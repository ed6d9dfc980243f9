"""Defines a loaded artifact whose members are in several processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from .. import errors
from ..errors import WidepackError
from ..inference.loaded_model import LoadedModel
from ..inference.model import WideModel
from ..spec.names import checkpoint_of, number_of
from ..system.gate import Gate
from .collectives import Ranks
from .rank_entry import RankEntry

if TYPE_CHECKING:
    from ..inference.members.swap import SwapReport


class RankModel(LoadedModel[RankEntry]):
    """N trained members in several processes that run in one call. `widepack.distributed.load` returns it.

    Every process of the group makes the same calls in the same order. Inputs are those of rank 0: the other
    ranks give tensors of the same shapes and dtypes, whose values are not read. Every rank gets the answer of
    all members. `reduce` moves sums of each rank instead of answers, except for quantiles, outputs whose
    shapes differ, and models with states. `route` sends each row to the rank of its member. A call that one
    rank refuses runs on no rank. If a process ends or does not answer in time, calls raise `WidepackError`.

    `member` and `state_dict` are for the members of this rank. `swap` replaces a member at the same place in
    the order of calls of every rank: the rank that has the member reads the checkpoint and checks it, the
    others wait for it, at most the timeout of the load, and every rank gets its report or its error.

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

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RankModel cannot be copied or pickled: its members are in several processes; load the "
            "artifact again on every rank"
        )

    # ---------------------------------------------------------------- members, documented in `LoadedModel`

    def state_dict(self, member: int | str) -> dict[str, Any]:
        place = number_of(self.members, member)
        next(iter(self._entries.values())).refuse_elsewhere(place)
        return self.here.state_dict(self.members[place])

    def stored_state(self, member: int | str) -> dict[str, Any]:
        place = number_of(self.members, member)
        next(iter(self._entries.values())).refuse_elsewhere(place)
        return self.here.stored_state(self.members[place])

    def _swap(self, member: int | str, checkpoint: str | PathLike[str], how: Mapping[str, Any]) -> SwapReport:
        from ..inference.members.swap import SwapReport  # opens checkpoints, which no other part does

        with self._ranks.lock:
            place = self._ranks.agreed(
                lambda: (checkpoint_of(checkpoint), number_of(self.members, member))[1],
                lambda found: f"swap {found} {checkpoint} {_described(how)}",
            )
            owner = next(rank for rank, places in enumerate(self.parts) if place in places)
            error: WidepackError | None = None
            answer: dict[str, Any] = {}
            if owner == self.rank:
                try:
                    report = self.here.swap(self.members[place], checkpoint, **how)
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


def _described(how: Mapping[str, Any]) -> str:
    """Returns the options of a swap in words: a factory of another process has another address."""
    model = how["model"]
    made = model if isinstance(model, str) else type(model).__name__
    return str({**how, "model": made})
