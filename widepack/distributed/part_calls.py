"""Defines calls of an entry that are checked and have not passed the gate: for models over several devices
or processes, which run one of them on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.entry import OutputLeaf

from ..errors import WidepackError
from ..inference.entry import WideEntry
from ..inference.output import build_answer, writable
from ..inference.reduced_answer import MIXTURE, AnswerStream, Reduction, means_and_variances
from ..inference.routing.row_groups import RowGroups
from ..reduction.figures import Requested, requested
from ..reduction.sums import StreamedSums, add_answers
from ..system.gate import Gate

FIGURES, MEANS, VARIANCES = "figures", "means", "variances"
"""The names of the sums: of the leaf of the figures, and of the two leaves of `mixture`."""
Sums = dict[str, StreamedSums]


class PartReduction(Reduction):
    """A reduction of which adjacent members answer here.

    Args:
        reduction: Of all members.
        first: The number of the first of them.
        total: N of the whole model.
    """

    def __init__(self, reduction: Reduction, first: int, total: int) -> None:
        vars(self).update(vars(reduction))  # it was checked
        self.first, self.total = first, total

    def shares(self, answer: Tensor, members: int) -> dict[int, float]:
        """Returns the weight of each member that counts, by its number here. members: how many are here."""
        every = super().shares(answer, self.total)
        return {n: every[self.first + n] for n in range(members) if self.first + n in every}

    def of_answer(self, answer: Any, leaves: Sequence[OutputLeaf]) -> Sums:
        """Returns the sums of an answer, in which every leaf is a tensor `[n, ...]`.

        leaves: the outputs in the manifest. Raises: InputError, UsageError.
        """
        found: Sums = {}
        if self.wanted:
            values = self.leaf(answer, leaves, False)
            found[FIGURES] = self._sums(self.wanted, self.of, self.dim_of_classes(values, leaves), values)
        if MIXTURE in self.names:
            means, variances = means_and_variances(answer, False)
            weighted = self.weights is not None
            found[MEANS] = self._sums(requested(["mean", "var"], None, weighted), None, 1, means)
            found[VARIANCES] = self._sums(requested(["mean"], None, weighted), None, 1, variances)
        return found

    def _sums(self, wanted: Sequence[Requested], of: str | None, dim: int, values: Tensor) -> StreamedSums:
        sums = StreamedSums(of, dim - 1, self.weights is None, reads_of(wanted))
        shares = self.shares(values, values.shape[0])
        if not shares:
            add_answers(sums, values[:1], [1.0])
            sums.put({name: t.zero_() for name, t in sums.tensors.items()}, 0, 0.0)
        elif len(shares) == values.shape[0]:
            add_answers(sums, values, list(shares.values()))
        else:
            add_answers(sums, values[list(shares)], list(shares.values()))
        return sums


def reads_of(wanted: Sequence[Requested]) -> frozenset[str]:
    """Returns what figures read: names of properties of sums."""
    return frozenset(r for w in wanted for r in w.figure.reads)


def figures_of(reduction: Reduction, sums: Mapping[str, StreamedSums]) -> dict[str, Any]:
    """Returns the requested figures of the sums of all members, in the order of the caller."""
    found: dict[str, Any] = {w.text: w.figure.compute(sums[FIGURES], w.number) for w in reduction.wanted}
    if MIXTURE in reduction.names:
        means, variances = sums[MEANS], sums[VARIANCES]
        found[MIXTURE] = means.mean, means.var + variances.mean
    return reduction.ordered(found)


class PreparedCall:
    """A checked call of the members that are here.

    Args:
        entry: The entry.
        values: The tensors of the call, as `TensorCalls.tensors` returns them.
        per_member: For each whether it has one value for each member.

    Raises:
        InputError: The call does not match the entry.
    """

    def __init__(self, entry: WideEntry, values: Sequence[Tensor], per_member: Sequence[bool]) -> None:
        self.entry, self.values, self.per_member = entry, values, per_member
        self.program = entry.bound(values, per_member)

    def run(self) -> Any:
        """Runs the program, inside the gate. Returns: its outputs."""
        return self.program.run(*self.values)

    def leaves(self, found: Sequence[Any]) -> list[Any]:
        """Returns each output as `[n, ...]`, or as a list of n tensors if the members' shapes differ."""
        members = len(self.entry)
        return [
            v.expand(members, *v.shape) if o.kind == "shared" else list(v) if k in self.program.lists else v
            for k, (v, o) in enumerate(zip(found, self.program.program.outputs))
        ]

    @property
    def shared(self) -> frozenset[int]:
        """The numbers of the outputs that are the same for all members."""
        return frozenset(k for k, o in enumerate(self.program.program.outputs) if o.kind == "shared")

    def explained(self, error: Exception) -> WidepackError:
        """Returns the error of a call that an op refused. No swap may wait for this call meanwhile."""
        return self.entry.explained(self.program, self.values, self.per_member, error)


class PreparedReduction(PreparedCall):
    """A checked call whose answers are summed up. The sums are computed while members run, where they run
    one after the other.
    """

    def __init__(
        self,
        entry: WideEntry,
        values: Sequence[Tensor],
        per_member: Sequence[bool],
        reduction: PartReduction,
    ) -> None:
        super().__init__(entry, values, per_member)
        self.reduction = reduction
        self._stream: AnswerStream | None = None
        streamed = reduction.streamed and not entry.entry.state
        if streamed and not reduction.shares(torch.empty(0), len(entry)):
            streamed = False  # no member that is here counts, and the sums need the form of an answer
        looped = self.program.looped if streamed else None
        if looped is not None:
            leaves = entry.entry.outputs
            self._stream = AnswerStream(reduction, leaves, len(entry), self.program, looped)

    def run(self) -> Any:
        return super().run() if self._stream is None else self._stream.run(*self.values)

    def sums(self, found: Any) -> Sums:
        """Returns the sums. found: what `run` returned. Raises: InputError, UsageError."""
        leaves, answer = self.entry.entry.outputs, None
        if self._stream is not None:
            answer = self._stream.sums()
            if isinstance(answer, StreamedSums):
                return {FIGURES: answer}
        else:
            outputs = self.program.program.outputs
            answer = build_answer(found, outputs, len(self.entry), self.entry.entry.result)
        return self.reduction.of_answer(answer, leaves)


class Together:
    """Calls of several parts that pass the gate as one, so that no swap comes between them.

    Args:
        calls: The calls, each with `run` and `explained`.
    """

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls
        self._running = calls[0]

    def run(self) -> list[Any]:
        """Runs the calls one after the other, inside the gate. On CUDA each returns when it is launched."""
        found = []
        for call in self._calls:
            self._running = call
            found.append(call.run())
        return found

    def through(self, gate: Gate) -> list[Any]:
        """Passes the gate and runs the calls. Raises: InputError for a call that an op refused."""
        try:
            found: list[Any] = gate.run(self, ())
        except (WidepackError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise self._running.explained(e) from e
        return found


def join_members(calls: Sequence[PreparedCall], found: Sequence[Any], device: torch.device) -> list[Any]:
    """Returns the outputs of all members: `[N, ...]`, or a list of N tensors if the members' shapes differ.

    calls: one for each part. found: what each returned. device: where the outputs are joined.
    """
    members = sum(len(c.entry) for c in calls)
    parts = [c.leaves(outputs) for c, outputs in zip(calls, found)]
    same = frozenset.intersection(*(c.shared for c in calls))
    return [
        one[0][0].to(device).expand(members, *one[0].shape[1:]) if k in same else _join(one, device)
        for k, one in enumerate(zip(*parts))
    ]


def _join(leaves: Sequence[Any], device: torch.device) -> Any:
    if any(isinstance(leaf, list) for leaf in leaves):
        return [value.to(device) for leaf in leaves for value in leaf]
    return torch.cat([leaf.to(device) for leaf in leaves])


def states_of(leaves: Sequence[Any], states: Sequence[tuple[int, int, str]]) -> dict[str, Tensor]:
    """Returns the new states of a call by name. leaves: its outputs. states: as in `Binder.states`."""
    found = {}
    for _, output, name in states:
        value = leaves[output]
        whole = value.clone(memory_format=torch.contiguous_format) if 0 in value.stride() else value
        found[name] = writable(whole)
    return found


def join_rows(groups: RowGroups, parts: Sequence[Any], dim: int, device: torch.device) -> Any:
    """Returns one leaf of a routed call in the order of the rows; a list of B tensors if shapes differ.

    groups: the rows of each part. parts: its leaves. dim: where the rows are.
    """
    if not any(isinstance(p, list) for p in parts):
        leaves = [p.to(device) for p in parts]
        if len({(*p.shape[:dim], *p.shape[dim + 1 :]) for p in leaves}) == 1:
            return groups.join(leaves, dim)
    found: list[Any] = [None] * groups.count
    for part, rows in zip(parts, groups.rows):
        for row, value in zip(rows, part if isinstance(part, list) else part.unbind(dim)):
            found[row] = value.to(device, copy=True)
    return found


def merge_sums(parts: Sequence[Sums], device: torch.device) -> Sums:
    """Returns the sums of all members. parts: those of each part, the first on the device."""
    first = parts[0]
    for sums in parts[1:]:
        for name, one in sums.items():
            first[name].merge(one.to(device))
    return first
