"""Separates the results of dropouts from their inputs during an export in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

NAMES = {
    "dropout",
    "dropout_",
    "feature_dropout",
    "feature_dropout_",
    "alpha_dropout",
    "alpha_dropout_",
    "feature_alpha_dropout",
}
"""The ops that take `(input, p, train)`. A name that ends in `_` writes into its input."""

_FUNCTIONS = {
    getattr(functional, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
"""The functions that take `(input, p, training, inplace)`."""


class DropoutCopies(TorchFunctionMode):
    """Calls every dropout that does not write into its input with a copy of the input.

    In eval mode a dropout returns its input itself. An export then takes the input for the result of the
    dropout: in a graph in which dropout is turned on later, other places would read dropped values. The
    copies are removed when the captured program is simplified.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _FUNCTIONS:
            copies = not (given.get("inplace") or any(args[3:]))
        else:
            copies = name in NAMES and not name.endswith("_")
        if copies and args and isinstance(args[0], torch.Tensor):
            args = (args[0].clone(), *args[1:])
        elif copies and isinstance(given.get("input"), torch.Tensor):
            given["input"] = given["input"].clone()
        return func(*args, **given)
