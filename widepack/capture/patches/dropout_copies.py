"""Keeps dropouts whole, and apart from their inputs, during an export with dropout on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

NAMES = {f"{of}dropout{end}" for of in ("", "feature_", "alpha_", "feature_alpha_") for end in ("", "_")}
"""The ops that take `(input, p, train)`. A name that ends in `_` writes into its input."""

_FUNCTIONS = {
    getattr(functional, name): inspect.signature(getattr(functional, name))
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}
"""The functions that take `(input, p, training, inplace)`."""
_OF_OPS = inspect.signature(lambda input, p, train: None)


class DropoutCopies(TorchFunctionMode):
    """Calls every dropout in eval mode, with a copy of its input.

    The captured program turns it on again. Torch writes a dropout in train mode (`training=True` in the code
    of a member) as several ops, of which nobody can tell any more that they are a dropout. In eval mode a
    dropout returns its input itself. An export then takes the input for the result of the dropout: in a graph
    in which dropout is turned on later, other places would read dropped values. The copies are removed when
    the captured program is simplified.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        signature = _FUNCTIONS.get(func) or (_OF_OPS if name in NAMES else None)
        if signature is None:
            return func(*args, **(kwargs or {}))
        try:
            given = signature.bind(*args, **(kwargs or {})).arguments
        except TypeError:  # the op raises its own error
            return func(*args, **(kwargs or {}))
        x, writes = given["input"], name.endswith("_") or given.get("inplace", False)
        op = getattr(torch, name.rstrip("_")) if signature is _OF_OPS else func
        rest = [given["p"]] if "p" in given else []
        y = op(x.clone(), *rest, **{"train" if signature is _OF_OPS else "training": False})
        return x.copy_(y) if writes else y
