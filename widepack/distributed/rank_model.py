"""Loads this process's part of an artifact: `widepack.distributed.load`. Defines the model and entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint
from widepack_artifacts.reader import Reader

from .. import errors
from ..errors import Unavailable, UsageError, WidepackError
from ..inference.load import load as load_here
from ..inference.load import on_device
from ..inference.loaded_model import LoadedModel
from ..inference.model import WideModel
from ..inference.reduced_answer import Reduction
from ..inference.routing.row_groups import RowGroups
from ..reduction.sums import StreamedSums
from ..spec.names import checkpoint_of, number_of
from ..system.gate import Gate
from .collectives import Ranks, described
from .device_load import divided_members, opened_in_parts
from .part_calls import PartReduction, PreparedCall, PreparedReduction, Sums, Together, join_rows
from .split_entry import SplitEntry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from ..inference.members.swap import SwapReport
    from .device_load import LoadArguments


def load(
    path: str | PathLike[str],
    group: ProcessGroup | None = None,
    *,
    timeout: float = 300.0,
    device: str | torch.device | None = None,
    **options: Unpack[LoadArguments],
) -> RankModel:
    """Loads an artifact in the processes of a group: each loads a part of the members.

    The parts are adjacent members of about equal bytes of weights. Every process of the group calls this
    function, and after it makes the same calls in the same order. The path must name the same artifact in
    every process.

    Args:
        path: The folder that `widepack.build` wrote.
        group: The process group. Default: all processes. The model uses a new group of the same processes and
            backend.
        timeout: The seconds after which a call that waits for another process raises. A call waits while
            another rank binds a program or checks a swap, so do not make it too short.
        device: Where this process's members run. With the backend `nccl` it is a CUDA device, one for each
            process. Default: the CPU.
        **options: The options of `widepack.load`, except `weights` and `max_error`. `members` names the
            members of all ranks together.

    Returns:
        A `RankModel`.

    Raises:
        ArtifactError: As `widepack.load`.
        InputError: Another rank could not load its part, or loads another artifact or with other options.
        Unavailable: This torch has no torch.distributed.
        UsageError: torch.distributed is not initialized, an argument is not valid, or there are more
            processes than members.
        WidepackError: Another process ended, or did not answer within the timeout.

    Example:
        >>> torch.distributed.init_process_group("gloo")  # in processes that torchrun starts
        >>> ens = widepack.distributed.load("ens.wide")
        >>> y = ens(x)  # on every rank: x [B, 8], y [N, B, 3]
    """
    if not torch.distributed.is_available():
        raise Unavailable("this torch was built without torch.distributed; install another build of torch")
    where = on_device(device)
    ranks, gate = Ranks(group, timeout, where), Gate()

    def opening(reader: Reader) -> tuple[Any, Sequence[int], Sequence[range]]:
        """Opens this rank's part from the files of one digest."""
        chosen, parts = divided_members(reader, options, ranks.size, "processes")
        mine: LoadArguments = {**options, "members": [chosen[i] for i in parts[ranks.rank]]}
        mine["expect"] = reader.manifest.digest
        trusted = options.get("expect") is not None
        return load_here(path, device=where, gate=gate, trusted=trusted, **mine), chosen, parts

    here, chosen, parts = ranks.agreed(
        lambda: opened_in_parts(path, options, opening),
        lambda found: f"{found[0].manifest.digest} {found[1]}",
    )
    return RankModel(here, chosen, parts, ranks, gate)


ADDED = ("mean", "expected_entropy", "counts")
"""Sums that the group adds up. Others are gathered and merged."""


class RankEntry(SplitEntry):
    """One entry of a model in several processes. All ranks make the same calls, with the inputs of rank 0.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry.
        members: The names of all members.
        parts: The places of the members of each rank.
        device: Where this rank's inputs, members and answers are.
    """

    def __init__(
        self,
        name: str,
        model: WideModel,
        members: tuple[str, ...],
        parts: Sequence[range],
        ranks: Ranks,
        gate: Gate,
    ) -> None:
        here = {ranks.rank: model.entry(name)}
        super().__init__(name, here, model.manifest, members, parts, gate, model.device)
        self._ranks, self._lock = ranks, ranks.lock
        self._places = parts[ranks.rank]

    @property
    def runs_on(self) -> str:
        return f"rank {self._ranks.rank} of {self._ranks.size}: {super().runs_on}"

    def refuse_elsewhere(self, place: int) -> None:  # documented in `SplitEntry`
        if place not in self._places:
            raise UsageError(
                f"member {self.members[place]} is on rank {self._part_of[place]}, this is rank "
                f"{self._ranks.rank}; take it there, or load it with widepack.load(members=[{place}])"
            )

    def state(self, **sizes: int) -> dict[str, Tensor]:
        with self._lock:
            text = f"{self.name} state {sorted(sizes.items())}"
            found = self._ranks.agreed(lambda: self._first.state(**sizes), lambda _: text)
            shapes = [[(len(p), *v.shape[1:]) for v in found.values()] for p in self.parts]
            gathered = self._ranks.gathered(list(found.values()), shapes)
            return dict(zip(found, map(torch.cat, zip(*gathered))))

    def _checked(self, check: Callable[[], Any]) -> Any:
        return self._ranks.agreed(check, lambda found: f"{self.name} {_call(found)}")

    def _through(self, call: Any) -> Any:
        """Runs this rank's part inside the gate. The caller makes sure that all ranks know if it fails."""
        return Together([call]).through(self._gate)[0]

    # ---------------------------------------------------------------- all ranks

    def _inputs(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[Tensor]:
        """Returns the inputs of this rank's members, from rank 0."""
        found = []
        for value, stacked in zip(values, per_member):
            if stacked:
                part = self._ranks.parts_from_first([value[p.start : p.stop] for p in self.parts])
                assert part is not None  # every rank has members
                found.append(part)
            else:
                found.append(self._ranks.from_first(value))
        return found

    def _outputs(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[Any]:
        inputs = self._inputs(values, per_member)

        def run() -> list[Any]:
            call = PreparedCall(self._first, inputs, per_member)
            return call.leaves(self._through(call))

        leaves = self._ranks.agreed(run, lambda _: "ran")
        flat = [t for leaf in leaves for t in (leaf if isinstance(leaf, list) else [leaf])]
        shapes = None
        if not any(isinstance(leaf, list) for leaf in leaves):
            shapes = [[(len(p), *leaf.shape[1:]) for leaf in leaves] for p in self.parts]
        gathered = [iter(tensors) for tensors in self._ranks.gathered(flat, shapes)]
        return [
            [next(t) for t, p in zip(gathered, self.parts) for _ in p]
            if isinstance(leaf, list)
            else torch.cat([next(t) for t in gathered])
            for leaf in leaves
        ]

    def _sums(self, values: Sequence[Tensor], per_member: Sequence[bool], reduction: Reduction) -> Sums:
        parts = [PartReduction(reduction, p.start, len(self.members)) for p in self.parts]
        inputs = self._inputs(values, per_member)

        def run() -> Sums:
            call = PreparedReduction(self._first, inputs, per_member, parts[self._ranks.rank])
            return call.sums(self._through(call))

        mine = self._ranks.agreed(run, lambda _: "summed")
        empty = torch.empty(0)
        shares = [list(part.shares(empty, len(p)).values()) for part, p in zip(parts, self.parts)]
        return {name: self._total(one, shares) for name, one in mine.items()}

    def _total(self, mine: StreamedSums, shares: Sequence[Sequence[float]]) -> StreamedSums:
        """Returns the sums of all ranks. shares: the weights of the members of each rank."""
        tensors = mine.tensors
        added = {n: self._ranks.summed(t) for n, t in tensors.items() if n in ADDED}
        others = {n: t for n, t in tensors.items() if n not in ADDED}
        total = StreamedSums(mine.of, mine.dim, mine.equal, mine.reads)
        if others:
            shapes = [[t.shape for t in others.values()]] * self._ranks.size
            for rank, weights in zip(self._ranks.gathered(list(others.values()), shapes), shares):
                part = StreamedSums(mine.of, mine.dim, mine.equal, mine.reads)
                part.put(dict(zip(others, rank)), len(weights), sum(weights))
                total.merge(part)
        every = [w for weights in shares for w in weights]
        total.put({**total.tensors, **added}, len(every), sum(every))
        total.dtype = mine.dtype
        return total

    def _rows(self, values: Sequence[Tensor], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        router, size = self._first.router, self._ranks.size
        inputs: list[Any] = []
        for value, axis in zip(values, router.axes):
            if axis is None:
                inputs.append(self._ranks.from_first(value))
                continue
            parts: list[Tensor | None] = [None] * size
            for rank, part in zip(groups.members, groups.split(value, axis)):
                parts[rank] = part
            inputs.append(self._ranks.parts_from_first(parts))
        found: list[Any] = self._ranks.agreed(
            lambda: self._part_of_rows(inputs, numbers, groups), lambda _: "ran"
        )
        # A leaf is a tensor, or a list with one tensor for each row if their shapes differ.
        counts = torch.tensor(
            [len(leaf) if isinstance(leaf, list) else 0 for leaf in found], device=self.device
        )
        flat = [t for leaf in found for t in (leaf if isinstance(leaf, list) else [leaf])]
        gathered = self._ranks.gathered([counts, *flat])
        leaves = []
        for rank in groups.members:
            tensors = iter(gathered[rank])
            lists = next(tensors).tolist()
            leaves.append([[next(tensors) for _ in range(n)] if n else next(tensors) for n in lists])
        return [
            join_rows(groups, parts_, axis.dim, self.device)
            for parts_, axis in zip(zip(*leaves), router.dims)
            if axis is not None
        ]

    def _part_of_rows(self, inputs: Sequence[Any], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        """Runs the rows of this rank's members. Returns: the outputs; [] without rows."""
        if self._ranks.rank not in groups.members:
            return []
        rows = groups.rows[groups.members.index(self._ranks.rank)]
        call = self._first.router.prepared(inputs, [numbers[row] - self._places.start for row in rows])
        found: list[Any] = self._through(call)
        return found


def _call(found: Any) -> str:
    """Returns what ranks must agree on: the call without what follows from it."""
    return described([part for part in found if not isinstance(part, RowGroups)])


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
        return self.here.manifest

    @property
    def device(self) -> torch.device:
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

    def _swap(
        self, member: int | str, checkpoint: str | PathLike[str] | Mapping[str, Any], how: Mapping[str, Any]
    ) -> SwapReport:
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
        """Releases this rank's programs and weights, and ends the group of the model.

        Example:
            >>> ens.close()
        """
        self.here.close()
        self._ranks.close()


def _described(how: Mapping[str, Any]) -> str:
    """Returns the options of a swap in words: a factory of another process has another address."""
    model = how["model"]
    made = model if isinstance(model, str) else type(model).__name__
    return str({**how, "model": made})
