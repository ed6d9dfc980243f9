"""What a rule did, to be done again without it: the ops that it called, in order, over the places of their values.

A rule looks at kinds, sizes, strides, dtypes and the device, never at data; so for inputs that agree in these its steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir import ops
from ..ir.values import Shared, Stacked, Value
from ..registry.writer import EagerWriter, unwrap


@dataclass(frozen=True, slots=True)
class Place:
    """The number of a value: those given, then each step's."""

    number: int


@dataclass(frozen=True, slots=True)
class Steps:
    """steps: op, arguments, keywords. result: its structure over places."""

    steps: Sequence[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]]
    result: Any

    def run(self, given: Sequence[torch.Tensor]) -> Any:
        """The result for values that are given in the same order."""
        values: list[Any] = list(given)
        for op, args, kwargs in self.steps:
            filled = [values[a.number] if type(a) is Place else _filled(a, values) for a in args]
            values.append(op(*filled, **{k: _filled(v, values) for k, v in kwargs.items()}) if kwargs else op(*filled))
        return _filled(self.result, values)


class Recorder(EagerWriter):
    """Runs each op at once and notes it."""

    def __init__(self, members: int, device: str, given: Sequence[Value]) -> None:
        super().__init__(members, device)
        self._places = {value: Place(i) for i, value in enumerate(given)}
        self._steps: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []
        self._whole = True  # whether all that was done can be done again

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        function = ops.function(op)
        value = Value(None, function(*unwrap(args), **unwrap(kwargs)))
        self._steps.append((function, [self._placed(a) for a in args], {k: self._placed(v) for k, v in kwargs.items()}))
        self._places[value] = Place(len(self._places))
        return value

    def recorded(self, result: Any) -> Steps | None:
        """The steps so far. result: a structure of Values; None where one is of elsewhere."""
        made = Steps(self._steps, self._placed(result))
        return made if self._whole else None

    def _placed(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            if arg not in self._places:
                self._whole = False
            return self._places.get(arg)
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._placed(a) for a in arg)
        if isinstance(arg, (torch.Tensor, Shared, Stacked)):
            self._whole = False
        return arg


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    if type(arg) is Place:
        return values[arg.number]
    if isinstance(arg, (list, tuple)):
        return type(arg)([_filled(a, values) for a in arg])
    return arg
