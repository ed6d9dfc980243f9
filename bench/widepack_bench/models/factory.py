"""Finds the factory of a reference network by its name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

MODELS = "widepack_bench.models"


def factory_of(model: str) -> Callable[..., nn.Module]:
    """Returns a factory. model: its name as `--model` takes it, `module:function`."""
    module, _, function = model.partition(":")
    factory: Callable[..., nn.Module] = getattr(import_module(module), function)
    return factory
