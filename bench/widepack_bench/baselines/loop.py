"""Runs the members one after another: the eager loop."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..measure.answers import Run, members_of, stack


def loop(modules: Sequence[nn.Module], each: bool) -> Run:
    """Returns a call that runs the modules one after another and stacks their outputs."""
    if each:
        return lambda *args, **kwargs: stack(
            [m(*members_of(args, i), **members_of(kwargs, i)) for i, m in enumerate(modules)]
        )
    return lambda *args, **kwargs: stack([m(*args, **kwargs) for m in modules])
