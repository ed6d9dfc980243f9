"""Finds the factory that a user names, also `hf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .factory import Factory, load_factory
from .hugging_face import NAME, hugging_face


def find_factory(
    model: str | Callable[..., object], args: Mapping[str, object] | None = None, beside: Sequence[str] = ()
) -> Factory:
    """Returns the factory that a user names.

    model: `hf`, or as `load_factory` takes it; a `Factory` is returned as it is. beside: the
    checkpoints.
    Raises: UsageError.
    """
    if isinstance(model, Factory):
        return model
    return hugging_face(args, beside) if model == NAME else load_factory(model, args)
