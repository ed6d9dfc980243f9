"""Finds the tensors that a member keeps in plain attributes, and compares tensors by their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_DEPTH = 3  # levels of lists, tuples and dicts under an attribute


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns every tensor in a member's plain attributes with its path, also in lists, tuples and dicts."""
    rows: list[tuple[str, torch.Tensor]] = []

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            rows.append((path, value))
        elif isinstance(value, (list, tuple)) and depth:
            for i, v in enumerate(value):
                walk(v, f"{path}.{i}", depth - 1)
        elif isinstance(value, dict) and depth:
            for k, v in value.items():
                walk(v, f"{path}.{k}", depth - 1)

    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                walk(value, f"{name}.{key}" if name else key, _DEPTH)
    return rows


def constant_path(module: nn.Module, value: torch.Tensor) -> str:
    """Returns the path of a constant's tensor in the member (`blocks.0.freqs`); empty for a literal in the
    code.
    """
    return next((path for path, tensor in tensors_of(module) if same_memory(tensor, value)), "")


def state_name(tensors: Mapping[str, torch.Tensor], value: torch.Tensor) -> str:
    """Returns the name of the parameter or buffer that a constant's tensor is; empty if it is none."""
    return next((name for name, tensor in tensors.items() if same_memory(tensor, value)), "")


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one value in memory. torch.export detaches constants, so `is` is not enough."""
    if a is b:
        return True
    address = _address(a)
    if address is None or address != _address(b):
        return False
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    return alike and a.numel() > 0


def _address(tensor: torch.Tensor) -> int | None:
    """Where a tensor is in memory. None for a tensor without memory, as a member keeps them of an export."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None
