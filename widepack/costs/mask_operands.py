"""Describes one node of a program, as the rules of mask_steps.py and mask_views.py read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Ref

from .expressions import World
from .mask_indices import Index
from .mask_values import Constant, Known


@dataclass(frozen=True)
class Step:
    """One node of a program.

    world: names the dims. known_of: what is known of values, by name. name: of the op, without its library
    and overload. bound: the arguments by name. values: the symbolic values, by name. result: the node's own.
    """

    world: World
    known_of: Mapping[str, Known]
    name: str
    bound: Mapping[str, Any]
    values: Mapping[str, Any]
    result: Any

    def value(self, argument: str) -> Known:
        """Returns what is known of an argument."""
        found = self.bound.get(argument)
        if isinstance(found, Ref):
            if (known := self.known_of.get(found.name)) is not None:
                return known
            found = self.values.get(found.name)
        if isinstance(found, (bool, int, float)):
            return Constant(float(found))
        return Index((), self.world.expr(found)) if isinstance(found, torch.SymInt) else None

    def tensor(self, argument: str) -> Tensor | None:
        """Returns the symbolic tensor of an argument."""
        found = self.bound.get(argument)
        found = self.values.get(found.name) if isinstance(found, Ref) else None
        return found if isinstance(found, Tensor) else None

    def size(self, number: Any) -> Any:
        """Returns a number or a symbolic size as an expression."""
        if isinstance(number, Ref):
            number = self.values.get(number.name)
        return self.world.expr(number) if isinstance(number, (int, torch.SymInt)) else None
