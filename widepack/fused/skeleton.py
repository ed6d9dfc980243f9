"""Keeps a live module without its weights, to capture it and to fill it with weights again.

A skeleton has parameters and buffers on torch's meta device, which have sizes and no memory. Everything else
is copied. The user's own module is neither run nor kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..capture.module_tensors import tensors_of
from ..errors import UsageError


class ModuleSkeleton:
    """A module without its weights.

    Attributes:
        names: Each parameter and buffer name, and the first name of the same tensor. Tied weights have
        several names.
        module: The copy of the module on the meta device.
    """

    __module__ = "widepack"  # pickles name the public place

    def __init__(self, module: nn.Module) -> None:
        weights = weights_of(module)
        self.names = first_names(weights)
        memo: dict[int, Any] = {}
        for value in weights.values():
            empty = torch.empty_like(value, device="meta", requires_grad=False)
            is_parameter = isinstance(value, nn.Parameter)
            memo[id(value)] = nn.Parameter(empty, value.requires_grad) if is_parameter else empty
        for _, value in tensors_of(module):
            if id(value) not in memo and not value.is_leaf:  # torch copies only leaves of the autograd graph
                memo[id(value)] = value.detach().clone()
        try:
            self.module: nn.Module = copy.deepcopy(module, memo)
        except Exception as e:
            reason = " ".join(str(e).split())[:200]
            raise UsageError(
                f"{type(module).__name__} cannot be copied ({type(e).__name__}: {reason}), and fuse works on "
                "copies of the members. Remove from the module what copy.deepcopy does not copy (an open "
                "file, a lock, a generator)"
            ) from e

    def fill(self, values: Mapping[str, torch.Tensor], device: torch.device | None = None) -> nn.Module:
        """Returns a copy of the module with these weights.

        Args:
            values: The weights by first name. Each is copied.
            device: The device of the whole copy. Default: each tensor stays on its device.
        """
        memo: dict[int, Any] = {}
        empty = weights_of(self.module)
        for name, first in self.names.items():
            if name != first:
                continue
            target = empty[name]
            value = values[first].detach().to(device or values[first].device, copy=True)
            is_parameter = isinstance(target, nn.Parameter)
            memo[id(target)] = nn.Parameter(value, target.requires_grad) if is_parameter else value
        if device is not None:
            for _, other in tensors_of(self.module):
                if id(other) not in memo and other.device not in (device, torch.device("meta")):
                    memo[id(other)] = other.to(device)
        return copy.deepcopy(self.module, memo)

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors in plain attributes (neither parameters nor buffers), by path."""
        return {path: value for path, value in tensors_of(self.module) if value.device.type != "meta"}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns each parameter and buffer by name. A tied weight appears under each of its names."""
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


def first_names(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns for each name the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in weights.items()}
