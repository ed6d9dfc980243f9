"""Explains a call of a fused module that failed at an index out of range. Only a call that fails needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..errors import InputError
from ..inference.programs.failed_call import Run, unknown_row
from ..ir.torch_internals import in_transform
from .programs import FusedEntry


def index_out_of_range(
    entry: FusedEntry,
    weights: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    stacked: Sequence[bool],
) -> InputError | None:
    """Returns the error of a call in which a member looks up a row that a table does not have.

    Args:
        entry: The programs of the call.
        weights: The weights by name.
        inputs: The inputs of the call, and the buffers that members change.
        stacked: For each input of the call whether it has a member axis. Buffers have one.

    Returns:
        An error that names the input, the value, the possible values, and the line of the model. None if the
        call failed for another reason, or inside a transform of `torch.func`, which hides values.
    """
    if in_transform():
        return None
    with torch.random.fork_rng(devices=[]):  # members that draw run once more
        return unknown_row("fused", _runs(entry, weights, inputs, stacked))


def _runs(
    entry: FusedEntry,
    weights: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    stacked: Sequence[bool],
) -> Iterator[Run]:
    """Yields the program of each member with its weights and inputs."""
    (program,) = entry.programs
    per_member = [*stacked, *(True for _ in entry.carried)]
    for i in range(entry.count):
        own = [
            weights[s.source][i] if entry.kinds[s.source] == "stacked" else weights[s.source]
            for s in program.weights
        ]
        yield program, own, [x[i] if split else x for x, split in zip(inputs, per_member)]
