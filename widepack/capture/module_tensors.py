"""The tensors that a member holds beside its parameters and buffers, and whether two tensors are one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every tensor in a member's plain attributes, lists, tuples and dicts included, with its path."""
    found: list[tuple[str, torch.Tensor]] = []

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found.append((path, value))
        elif isinstance(value, (list, tuple)) and depth:
            for i, v in enumerate(value):
                walk(v, f"{path}.{i}", depth - 1)
        elif isinstance(value, dict) and depth:
            for k, v in value.items():
                walk(v, f"{path}.{k}", depth - 1)

    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                walk(value, f"{name}.{key}" if name else key, 3)
    return found


def constant_path(module: nn.Module, value: torch.Tensor) -> str:
    """Where a lifted tensor lives in the member's objects (`blocks.0.freqs`), by identity; empty for a literal in the code."""
    return next((path for path, found in tensors_of(module) if same_memory(found, value)), "")


def state_name(tensors: Mapping[str, torch.Tensor], value: torch.Tensor) -> str:
    """The parameter or buffer that a lifted tensor is; empty where it is none."""
    return next((name for name, found in tensors.items() if same_memory(found, value)), "")


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: export detaches what it lifts."""
    if a is b:
        return True
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    return alike and a.numel() > 0 and a.data_ptr() == b.data_ptr()
