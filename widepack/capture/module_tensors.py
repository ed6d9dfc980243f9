"""Finds the tensors that a member holds outside its parameters and buffers, and compares them by memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .reachable import HeldValue, How, edges, is_atom, walk

_REGISTERED = ("_parameters", "_buffers", "_modules")
_HELD: tuple[How, ...] = ("strong", "class")


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns every tensor that a member holds in plain attributes, with its path.

    Also those in containers and objects there, in modules that are no submodules, in closures of functions
    and of the methods of its classes, and in arguments of partials.
    """
    rows: list[tuple[str, torch.Tensor]] = []
    parts = {id(part) for part in module.modules()}
    seen: set[int] = set()
    for name, part in module.named_modules():
        for edge in edges(part):
            if edge.how in _HELD and not _is_registered(edge, part):
                path = f"{name}.{edge.name}" if name else edge.name
                rows += _tensors_under(path, edge.value, parts, seen)
    return rows


def _is_registered(edge: HeldValue, part: nn.Module) -> bool:
    own = vars(part)
    return not edge.name and any(edge.value is own.get(key) for key in _REGISTERED)


def _tensors_under(path: str, root: Any, parts: set[int], seen: set[int]) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors under one attribute. parts: the modules of the member. seen: what was entered."""
    if id(root) in parts or is_atom(root) or (id(root) in seen and not isinstance(root, torch.Tensor)):
        return []
    rows = []
    for reached in walk(root, _HELD, parts | seen):
        if isinstance(reached.value, torch.Tensor):
            rows.append((f"{path}.{reached.path}" if reached.path else path, reached.value))
        else:
            seen.add(id(reached.value))
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
