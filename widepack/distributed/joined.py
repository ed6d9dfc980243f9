"""Joins what the parts of the members answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import WidepackError
from ..inference.output import writable
from ..inference.part_reduction import Sums
from ..inference.prepared_call import PreparedCall
from ..inference.row_groups import RowGroups
from ..system.gate import Gate


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
