"""Runs modules whose forward takes derivatives inside of inference mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from widepack.capture.derivatives import derivatives_watched, weights_fixed
from widepack.capture.export import clone


class WithDerivatives(nn.Module):
    """Runs a module with autograd on, as a user does whose forward takes derivatives.

    Its parameters require no gradients, so that autograd records nothing but what forward asks for.
    """

    def __init__(self, member: nn.Module) -> None:
        super().__init__()
        self.member = member.requires_grad_(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = pytree.tree_map(_usable, (args, kwargs))
            return pytree.tree_map(_detached, self.member(*args, **kwargs))


def _usable(value: Any) -> Any:
    """Returns a tensor that autograd takes, without the marks of other calls."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.is_inference() else value.detach()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def for_inference(
    modules: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[nn.Module]:
    """Returns the modules in the form that runs in inference mode. args, kwargs: an example of one member."""
    try:
        with derivatives_watched() as found, weights_fixed(modules[0]):
            modules[0](*pytree.tree_map(clone, list(args)), **pytree.tree_map(clone, dict(kwargs)))
    except Exception:  # noqa: BLE001  # the comparison reports it
        return list(modules)
    return [WithDerivatives(m) for m in modules] if found.taken else list(modules)
