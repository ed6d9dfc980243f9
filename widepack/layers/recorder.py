"""Records the ops that a strategy calls, and repeats them without the strategy.

A strategy looks at kinds, sizes, strides, dtypes and the device, never at data. For inputs that agree in
these, its steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ir import ops
from ..ir.encoding import map_arguments
from ..ir.values import Shared, Stacked, Value
from ..registry.writer import EagerWriter, unwrap


@dataclass(frozen=True, slots=True)
class ValueIndex:
    """The number of a value. Inputs are counted first, then the result of each step."""

    number: int


@dataclass(frozen=True, slots=True)
class Steps:
    """A recorded strategy.

    Attributes:
        steps: For each step the op, its arguments and its keyword arguments. A `ValueIndex` stands for a
        tensor.
        result: The structure of the result, with a `ValueIndex` for each tensor.
    """

    steps: Sequence[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]]
    result: Any

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Runs the steps on other inputs, in the order of the recorded ones, and returns the result."""
        values: list[Any] = list(inputs)
        for op, args, kwargs in self.steps:
            positional = [values[a.number] if type(a) is ValueIndex else _fill(a, values) for a in args]
            if kwargs:
                values.append(op(*positional, **{k: _fill(v, values) for k, v in kwargs.items()}))
            else:
                values.append(op(*positional))
        return _fill(self.result, values)


class Recorder(EagerWriter):
    """Runs each op of a strategy at once, and records it. `inputs` are the values that the strategy reads."""

    def __init__(self, members: int, device: str, inputs: Sequence[Value]) -> None:
        super().__init__(members, device)
        self._indices = {value: ValueIndex(i) for i, value in enumerate(inputs)}
        self._steps: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []
        self._repeatable = True  # False once an argument is a tensor that no input and no step gave

    def run(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        function = ops.function(op)
        value = Value(None, function(*unwrap(args), **unwrap(kwargs)))
        positional = [self._with_indices(a) for a in args]
        self._steps.append((function, positional, {k: self._with_indices(v) for k, v in kwargs.items()}))
        self._indices[value] = ValueIndex(len(self._indices))
        return value

    def recorded(self, result: Any) -> Steps | None:
        """Returns the steps that computed `result`, or None if they cannot be repeated."""
        steps = Steps(self._steps, self._with_indices(result))
        return steps if self._repeatable else None

    def _with_indices(self, argument: Any) -> Any:
        """Returns an argument with a `ValueIndex` for each value."""
        return map_arguments(argument, self._index_of)

    def _index_of(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            if leaf not in self._indices:
                self._repeatable = False
            return self._indices.get(leaf)
        if isinstance(leaf, (torch.Tensor, Shared, Stacked)):
            self._repeatable = False
        return leaf


def _fill(argument: Any, values: Sequence[Any]) -> Any:
    """Returns an argument with the values in place of their indices."""
    if type(argument) is ValueIndex:
        return values[argument.number]
    if isinstance(argument, (list, tuple)):
        return type(argument)([_fill(a, values) for a in argument])
    return argument
