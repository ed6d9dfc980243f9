"""Returns the dicts of an `nn.Module` that have no public name: submodules, parameters and buffers by name.

`add_module`, `register_parameter` and `register_buffer` refuse a name that is a method of the class
(`train`), and a member's layer may have such a name. So stacked modules write into the dicts.
"""

from __future__ import annotations

import torch
from torch import nn


def submodule_dict(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the submodules of one module by name."""
    return module._modules  # torch has no public name for it


def parameter_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the parameters of one module by name, with those that are None."""
    return module._parameters  # torch has no public name for it


def buffer_dict(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the buffers of one module by name, with those that are None."""
    return module._buffers  # torch has no public name for it


def unsaved_buffer_names(module: nn.Module) -> set[str]:
    """Returns the names of the buffers that `state_dict` leaves out."""
    return module._non_persistent_buffers_set  # torch has no public name for it


def write_count(tensor: torch.Tensor) -> int:
    """Returns how many times torch has written into a tensor in place."""
    return tensor._version  # torch has no public name for it


def hooks_of_gradients(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has hooks that see or change its gradient."""
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)  # no public names
    return any(hooks)
