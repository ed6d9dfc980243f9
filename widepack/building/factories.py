"""What makes the members: the factory that the user names, or, where none is named, what is in the checkpoints themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..checkpoints.discovery import Checkpoint
from ..spec.dtypes import find_dtype as find_dtype
from ..errors import UsageError
from ..capture.pt2.factory import Programs
from ..checkpoints.hugging_face import NAME, hugging_face
from ..checkpoints.alignment import Factory, load_factory
from ..checkpoints.factory import OwnModules


def find_factory(model: str | Callable[..., object], args: Mapping[str, object] | None = None, beside: str = "") -> Factory:
    """The factory that a user names: `hf`, or as `load_factory` takes it; one that is there as it is. beside: the first checkpoint. Raises: UsageError."""
    if isinstance(model, Factory):
        return model
    return hugging_face(args, beside) if model == NAME else load_factory(model, args)


def choose_factory(
    model: str | Callable[..., object] | None, args: Mapping[str, object] | None, checkpoints: Sequence[Checkpoint], dtype: torch.dtype | None
) -> Factory:
    """The factory of a build: the one that is named, else the checkpoints' own programs or pickled modules. Raises: UsageError."""
    if model is not None:
        factory = find_factory(model, args, checkpoints[0].path)
    elif all(c.program is not None for c in checkpoints):
        if dtype is not None:
            raise UsageError(
                "dtype: the members are torch.export programs, whose dtypes are part of them; export them in the dtype that they shall have, or name a --model"
            )
        factory = Programs()
    elif all(c.module is not None for c in checkpoints):
        factory = OwnModules()
    else:
        whole = next((c for c in checkpoints if c.program is not None or c.module is not None), None)
        other = next((c for c in checkpoints if c.program is None and c.module is None), checkpoints[0])
        mixed = f" ({whole.path} brings its own, {other.path} does not)" if whole is not None else ""
        raise UsageError(
            f"no model: a state dict holds weights and no code{mixed}, so name what makes the module: --model package.module:factory, or file.py:factory"
        )
    if model is None and args:
        raise UsageError("model arguments are given, but no model: the members bring their own")
    factory.dtype = dtype
    return factory
