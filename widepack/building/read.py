"""The first stage of a build: from the paths that were given to members that fit together, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..checkpoints.discovery import LeftOut, bad_ones, open_good
from ..capture.pt2.factory import Programs, other_programs, unreadable
from .entry import fresh_member
from ..checkpoints.alignment import Alignment, Factory, align, mismatch
from .factories import choose_factory


class ReadMembers(NamedTuple):
    """left_out: the checkpoints that are no members, in order; empty unless bad ones may be skipped."""

    factory: Factory
    aligned: Alignment
    left_out: list[LeftOut]


def read_members(
    paths: Sequence[str],
    names: Sequence[str],
    model: str | Callable[..., nn.Module] | None,
    model_args: Mapping[str, object] | None,
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    trust_pickle: bool = False,
    skip_bad: bool = False,
    share: str = "auto",
    inputs: Sequence[str] | None = None,
) -> ReadMembers:
    """Open all checkpoints, find what makes the members, and bring their weights into one table.

    names: one a path. dtype: what all floating weights are converted to. skip_bad: leave out those that cannot be read or are of another model than the first
    that can; of programs, also those that differ from the first in more than weights. inputs: specs of a program's inputs. Raises: UsageError; CheckpointError and MemberMismatch, each with all that is wrong.
    """
    opened, left_out = open_good(paths, key, trust_pickle)
    numbers = [i for i in range(len(paths)) if i not in {b.number for b in left_out}]

    def leave_out(whys: Sequence[str]) -> None:
        """whys: for each open checkpoint why it cannot stay, or empty."""
        nonlocal opened, numbers, left_out
        left_out = sorted([*left_out, *(LeftOut(i, paths[i], why) for i, why in zip(numbers, whys) if why)])
        opened, numbers = [c for c, why in zip(opened, whys) if not why], [i for i, why in zip(numbers, whys) if not why]
        if not opened:
            raise bad_ones(left_out, len(paths))

    leave_out([unreadable(c) if model is None else "" for c in opened])
    if dtype is not None:
        opened = [c.as_dtype(dtype) for c in opened]
    factory = choose_factory(model, model_args, opened, dtype)
    state = fresh_member(factory, opened[0], opened[0].state_dict()).state_dict()
    if left_out or skip_bad:  # else `align` tells of all differences at once
        leave_out([mismatch(c, state, factory.takes_state_dict) for c in opened])
        if isinstance(factory, Programs):
            leave_out(other_programs(opened, inputs))
        if not skip_bad:
            raise bad_ones(left_out, len(paths))
    return ReadMembers(factory, align(opened, [names[i] for i in numbers], share, state, ragged=factory.takes_state_dict), left_out)
