"""Chooses the factory of the members: the one that the user names, or what the checkpoints contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..capture.pt2.factory import ExportedProgramFactory
from ..checkpoints.discovery import Checkpoint
from ..checkpoints.factory import Factory, PickledModules
from ..checkpoints.named_factory import find_factory as find_factory
from ..errors import UsageError


def choose_factory(
    model: str | Callable[..., object] | None,
    args: Mapping[str, object] | None,
    checkpoints: Sequence[Checkpoint],
    dtype: torch.dtype | None,
) -> Factory:
    """Returns the factory of a build: the named one, or the checkpoints' own programs or pickled modules.

    Raises: UsageError.
    """
    if model is not None:
        factory = find_factory(model, args, [c.path for c in checkpoints])
    elif all(c.program is not None for c in checkpoints):
        if dtype is not None:
            raise UsageError(
                "dtype: the members are torch.export programs, which fix their dtypes;"
                " export them in the dtype that you need, or name a --model"
            )
        factory = ExportedProgramFactory()
    elif all(c.module is not None for c in checkpoints):
        factory = PickledModules()
    else:
        raise _without_model(checkpoints)
    if model is None and args:
        raise UsageError("model arguments are given, but no model: the checkpoints contain the members' code")
    factory.dtype = dtype
    return factory


def _without_model(checkpoints: Sequence[Checkpoint]) -> UsageError:
    """Returns the error for checkpoints of which some contain no code."""
    whole = next((c for c in checkpoints if c.program is not None or c.module is not None), None)
    other = next((c for c in checkpoints if c.program is None and c.module is None), checkpoints[0])
    mixed = f" ({whole.path} contains its own code, {other.path} does not)" if whole is not None else ""
    return UsageError(
        f"no model: a state dict has weights and no code{mixed}, so name what makes the module:"
        " --model package.module:factory, or file.py:factory"
    )
