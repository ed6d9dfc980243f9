"""Keeps a live module without its weights, to capture it and to fill it with weights again.

A skeleton has parameters and buffers on torch's meta device, which have sizes and no memory. Everything else
is copied, also functions (`module_copy.py`). The user's own module is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..capture.reachable import tensors_of
from ..errors import UsageError
from ..ir.torch_internals import memory_id
from .module_copy import copy_module


@dataclass(frozen=True)
class Owners:
    """The members that are fused together.

    Attributes:
        modules: The ids of all their modules.
        weights: For the id of each parameter and buffer, its name and the first member that has it.
    """

    modules: frozenset[int] = frozenset()
    weights: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[nn.Module]) -> Owners:
        """Returns the owners of the members' parts and weights."""
        weights: dict[int, tuple[str, int]] = {}
        for i, member in enumerate(members):
            for name, value in weights_of(member).items():
                weights.setdefault(id(value), (name, i))
        return cls(frozenset(id(part) for m in members for part in m.modules()), weights)


class ModuleSkeleton:
    """A module without its weights.

    Attributes:
        names: Each parameter and buffer name, and the first name of the same tensor. Tied weights have
        several names.
        module: The copy of the module on the meta device.
        foreign: The paths of tensors that the module holds and that are weights of another member, with the
        weight in words.
    """

    __module__ = "widepack"  # pickles name the public place

    def __init__(self, module: nn.Module, owners: Owners | None = None) -> None:
        owners = owners or Owners()
        weights = weights_of(module)
        self.names = first_names(weights)
        empty: dict[int, torch.Tensor] = {}
        for value in weights.values():
            meta = torch.empty_like(value, device="meta", requires_grad=False)
            empty[id(value)] = _like(value, meta)
        try:
            self.module, copied = copy_module(module, empty, owners.modules)
        except Exception as e:
            reason = " ".join(str(e).split())[:200]
            raise UsageError(
                f"{type(module).__name__} cannot be copied ({type(e).__name__}: {reason}), and fuse makes "
                "programs from copies of the members"
            ) from e
        others = {
            id(copied[key]): f"{name} of member {i}"
            for key, (name, i) in owners.weights.items()
            if key in copied and key not in empty
        }
        self.foreign = (
            {p: others[id(t)] for p, t in tensors_of(self.module) if id(t) in others} if others else {}
        )

    def fill(self, values: Mapping[str, torch.Tensor], device: torch.device | None = None) -> nn.Module:
        """Returns a copy of the module with these weights.

        Args:
            values: The weights by first name. Each is copied.
            device: The device of the whole copy. Default: each tensor stays on its device.
        """
        memo: dict[int, torch.Tensor] = {}
        empty = weights_of(self.module)
        for name, first in self.names.items():
            if name != first:
                continue
            target = empty[name]
            value = values[first].detach().to(device or values[first].device, copy=True)
            memo[id(target)] = _like(target, value)
        if device is not None:
            for _, other in tensors_of(self.module):
                if id(other) not in memo and other.device not in (device, torch.device("meta")):
                    memo[id(other)] = other.to(device)
        return copy_module(self.module, memo)[0]

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors in plain attributes (neither parameters nor buffers), by path."""
        return {path: value for path, value in tensors_of(self.module) if value.device.type != "meta"}

    def views(self) -> dict[str, str]:
        """Returns the paths of plain tensors that lie in the memory of a weight, with the weight's name."""
        weights = weights_of(self.module)
        by_memory = {memory_id(value): name for name, value in weights.items()}
        own = set(map(id, weights.values()))
        return {
            path: by_memory[memory_id(value)]
            for path, value in tensors_of(self.module)
            if id(value) not in own and value.layout is torch.strided and memory_id(value) in by_memory
        }


def _like(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns a value as what a weight is: a parameter of the same class, or a buffer."""
    if not isinstance(weight, nn.Parameter):
        return value
    if type(weight) is nn.Parameter:
        return nn.Parameter(value, weight.requires_grad)
    return value.detach().as_subclass(type(weight)).requires_grad_(weight.requires_grad)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns each parameter and buffer by name. A tied weight appears under each of its names."""
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if b is not None}
    return {**dict(module.named_parameters(remove_duplicate=False)), **buffers}


def first_names(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns for each name the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(value), name) for name, value in weights.items()}
