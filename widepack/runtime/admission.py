"""What a program of an artifact is held to before it runs: its slots, its budget (walk.py), its outputs. And one class of error for whatever torch says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.manifest import Entry, Weight
from widepack_artifacts.program import Program

from ..errors import ArtifactError, WidepackError
from .graph_module import split
from .walk import Budget, NeedsValues, Walk, drawn_size

Inputs = Callable[[bool], Sequence[Any]]
"""A program's inputs: with True as they are, with False it is enough that their sizes are right."""


@contextlib.contextmanager
def guarded(said: str, first: Callable[[Exception], WidepackError | None] = lambda error: None) -> Iterator[None]:
    """Whatever is raised over what a file says is an ArtifactError. A device without memory is not the file's fault.

    first: what knows a better word for some errors.
    """
    try:
        yield
    except (WidepackError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        if (better := first(e)) is not None:
            raise better from e
        lines = str(e).strip().splitlines()
        raise ArtifactError(f"{said}: {type(e).__name__}: {lines[0][:300] if lines else 'nothing more is known'}") from e


def check_slots(said: str, program: Program, entry: Entry, table: Mapping[str, Weight], members: int) -> None:
    """Refuse a wide program that is not over this table and of this entry. Raises: ArtifactError."""
    if program.members != members:
        raise ArtifactError(f"{said} is for {program.members} members, the artifact has {members}")
    for slot in program.weights:
        row = table.get(slot.source)
        if row is None:
            raise ArtifactError(f"{said} reads the weight {slot.source[:80]!r}, which the manifest's table does not have")
        if slot.kind != row.kind:
            raise ArtifactError(f"{said} takes the weight {row.name} as {slot.kind}, in the manifest's table it is {row.kind}")
    for what, found, wanted in (("inputs", program.inputs, entry.inputs), ("outputs", program.outputs, entry.outputs)):
        if len(found) != len(wanted):
            raise ArtifactError(f"{said} has {len(found)} {what}, the entry {len(wanted)}")


def admit(
    budget: Budget, said: str, program: Program, weights: Mapping[str, Any], inputs: Inputs, device: torch.device, prologue: bool
) -> tuple[list[Any], float]:
    """Walk a program before it runs. weights: a value for each source. prologue: whether nodes of weights alone run beforehand.

    Returns: its outputs, on meta or as they are, and the most bytes that it takes at one time. Raises: ArtifactError naming the node that is refused.
    """
    given = [weights[s.source] for s in program.weights]
    spent = budget.spent
    for values in (False, True):
        if values and (wrong := drawn_size(program)[0]) is not None:
            raise ArtifactError(
                f"{said}: node {wrong.name[:80]} ({wrong.op}) has a result whose size random numbers tell; load(limit=None) lifts all limits"
            )
        walk = Walk(budget, said, device, values=values)
        try:
            if not prologue:
                return walk.run(program, [*given, *inputs(values)]), walk.peak - budget.held
            parts = split(program)
            made = walk.run(parts.prologue, given, read=False)
            kept = walk.kept
            return walk.run(parts.main, [*made, *inputs(values)], kept), max(walk.peak, budget.held + kept) - budget.held
        except NeedsValues:
            budget.spent = spent
    raise ArtifactError(f"{said} cannot be walked")  # with values nothing needs more


def check_outputs(said: str, program: Program, outputs: Sequence[Any], entry: Entry, members: int) -> None:
    """Refuse outputs that are not of their kind. Raises: ArtifactError."""
    for slot, value, leaf in zip(program.outputs, outputs, entry.outputs):
        if slot.kind == "stacked" and not (isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == members):
            raise ArtifactError(f"{said}: the output {leaf.name or 0} is stacked, and no tensor of {members} members")
        if slot.kind == "ragged" and not (isinstance(value, (list, tuple)) and len(value) == members):
            raise ArtifactError(f"{said}: the output {leaf.name or 0} is ragged, and no list of {members}")
