"""A live module without its weights: what a member is beside them, kept to be captured, and to be filled again.

The copy has parameters and buffers on torch's meta device, which have sizes and no memory; all else is copied. The user's own module is never run and never kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..capture.module_tensors import tensors_of


class Hollow:
    """names: every parameter and buffer by all its names, each with the first of them (tied weights have several)."""

    def __init__(self, module: nn.Module) -> None:
        held = weights_of(module)
        self.names = first_names(held)
        memo: dict[int, Any] = {}
        for value in held.values():
            empty = torch.empty_like(value, device="meta", requires_grad=False)
            memo[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
        for _, value in tensors_of(module):
            if id(value) not in memo and not value.is_leaf:  # torch copies no tensor that an op made of one with gradients
                memo[id(value)] = value.detach().clone()
        try:
            self.module: nn.Module = copy.deepcopy(module, memo)
        except Exception as e:
            raise UsageError(
                f"{type(module).__name__} cannot be copied ({type(e).__name__}: {' '.join(str(e).split())[:200]}), and fuse works on copies of the members alone; "
                "take out of it what copy.deepcopy does not copy (an open file, a lock, a generator)"
            ) from e

    def filled(self, values: Mapping[str, torch.Tensor], device: torch.device | None = None) -> nn.Module:
        """A copy with weights of its own. values: by first name; each is copied. device: where all of it shall be; None: where it is."""
        memo: dict[int, Any] = {}
        held = weights_of(self.module)
        for name, first in self.names.items():
            if name != first:
                continue
            value = values[first].detach().to(device or values[first].device, copy=True)
            memo[id(held[name])] = nn.Parameter(value, held[name].requires_grad) if isinstance(held[name], nn.Parameter) else value
        if device is not None:
            for _, other in tensors_of(self.module):
                if id(other) not in memo and other.device not in (device, torch.device("meta")):
                    memo[id(other)] = other.to(device)
        return copy.deepcopy(self.module, memo)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors in plain attributes, by path."""
        return {path: value for path, value in tensors_of(self.module) if value.device.type != "meta"}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, tied ones under each of their names."""
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


def first_names(held: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of every name the first that the same tensor has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in held.items()}
