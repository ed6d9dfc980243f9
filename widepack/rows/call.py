"""Defines `Call`: one node of a member program, with the layouts of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from widepack_artifacts.program import Node, Ref, refs

from ..ir import ops
from ..ir.size_terms import is_large
from ..ir.torch_internals import known_expression
from .layout import EVEN, UNKNOWN, Layout, RowAxis, RowNumbers

_NO_END = 2**62
"""The least end of a slice that no dim reaches."""


class MixesRows(Exception):
    """A node by which one row changes another. args: the node and how, as a clause."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(node, why)
        self.node, self.why = node, why


class NoRule(MixesRows):
    """A node of which no rule says that its rows are independent."""


def expression(number: Any) -> Any:
    """Returns a number of a symbolic value as an expression."""
    symbolic = isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return known_expression(number) if symbolic else number


@dataclass(frozen=True)
class Batch:
    """The values of a program at one size of the batch, and how they depend on that size.

    values: the fake value of each weight, input and node, by name, with numbers as sizes. symbolic: the same
    with sizes as expressions over the dims. symbol: of the batch in these. rows: its size in `values`.
    least: the smallest batch that the program may get.
    """

    values: Mapping[str, Any]
    symbolic: Mapping[str, Any]
    symbol: Any
    rows: int
    least: int

    def depends(self, number: Any) -> bool:
        """Returns whether a number, or a size, is an expression of the number of rows."""
        return self.symbol in getattr(expression(number), "free_symbols", ())

    def is_multiple(self, size: Any) -> bool:
        """Returns whether a size is a multiple of the number of rows, the same for every number of rows."""
        if not self.depends(size) or is_large(expression(size)):
            return False
        expanded = expression(size).expand()
        factor = expanded.coeff(self.symbol)
        return self.symbol not in factor.free_symbols and (expanded - factor * self.symbol).expand() == 0

    def dims(self, value: Any) -> list[int]:
        """Returns the dims of a symbolic value whose size depends on the number of rows."""
        return [d for d, size in enumerate(value.shape) if self.depends(size)]


@dataclass(frozen=True)
class Call:
    """A node with its arguments.

    given: the arguments by name, with defaults. layouts: of each value of the program, by name. batch: the
    values of the program.
    """

    node: Node
    given: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    batch: Batch

    @classmethod
    def of(cls, node: Node, layouts: Mapping[str, Layout], batch: Batch) -> Call:
        """Binds the arguments of a node to the names of the op's schema. Python's operators have numbers."""
        defaults = {name: default for name, _, default in ops.arguments(node.op)}
        if not defaults:
            defaults = {str(i): argument for i, argument in enumerate(node.args)}
        return cls(node, {**defaults, **ops.bind(node.op, node.args, node.kwargs)}, layouts, batch)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.batch.rows

    # ---------------------------------------------------------------- arguments

    @property
    def first(self) -> str:
        """The name of the first argument."""
        return next(iter(self.given))

    def get(self, name: str) -> Any:
        """Returns an argument. A reference becomes the fake value or number at the first size."""
        return self._value(self.given.get(name))

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.batch.values[argument.name]
        if isinstance(argument, (list, tuple)):
            return [self._value(a) for a in argument]
        return argument

    def layout(self, name: str) -> Layout:
        """Returns the layout of an argument; None for a number or a missing argument."""
        return self._layout(self.given.get(name))

    def _layout(self, argument: Any) -> Layout:
        if isinstance(argument, Ref):
            return self.layouts[argument.name]
        if isinstance(argument, (list, tuple)):
            return [self._layout(a) for a in argument]
        return None

    def rank(self, name: str) -> int:
        """Returns the number of dims of an argument."""
        return len(self.get(name).shape)

    def shape(self, name: str) -> list[int]:
        """Returns the sizes of an argument at the first size of the batch."""
        return [int(s) for s in self.get(name).shape]

    def dim(self, name: str) -> int:
        """Returns an argument that is the number of a dim of the first one, counted from 0."""
        dim = int(self.get(name))
        return dim + self.rank(self.first) if dim < 0 else dim

    def dims(self, name: str) -> list[int] | None:
        """Returns an argument that is a dim of the first one, or a list of dims, from 0; None for all."""
        given = self.get(name)
        if given is None or (isinstance(given, (list, tuple)) and not given):
            return None
        listed = given if isinstance(given, (list, tuple)) else [given]
        rank = max(1, self.rank(self.first))
        return [int(d) % rank for d in listed]

    def tensors(self) -> list[tuple[torch.Tensor, Layout]]:
        """Returns each argument that is a tensor, also those in lists, with its layout."""
        found: list[tuple[torch.Tensor, Layout]] = []

        def add(argument: Any) -> None:
            if isinstance(argument, (list, tuple)):
                for a in argument:
                    add(a)
            elif isinstance(argument, Ref):
                value, layout = self.batch.values[argument.name], self.layouts[argument.name]
                if isinstance(value, (list, tuple)) and isinstance(layout, list):
                    found.extend((p, own) for p, own in zip(value, layout) if isinstance(p, torch.Tensor))
                elif isinstance(value, torch.Tensor):
                    found.append((value, layout))

        for argument in self.given.values():
            add(argument)
        return found

    def reads_rows(self) -> bool:
        """Returns whether an argument is a tensor that depends on the rows or on their number."""
        return any(layout is not None for _, layout in self.tensors())

    def reads_unknown_numbers(self) -> bool:
        """Returns whether an argument is a number that follows a comparison of the number of rows."""
        found = refs(list(self.given.values()))
        return any(
            self.layouts[n] is UNKNOWN and not isinstance(self.batch.values[n], torch.Tensor) for n in found
        )

    def counts_rows(self, *names: str) -> bool:
        """Returns whether a number among the arguments depends on the size of the batch.

        names: of the arguments; default all.
        """
        return any(self._counts(self.given[n]) for n in names or self.given if n in self.given)

    def _counts(self, argument: Any) -> bool:
        if isinstance(argument, Ref):
            return self.batch.depends(self.batch.symbolic[argument.name])
        if isinstance(argument, (list, tuple)):
            return any(map(self._counts, argument))
        return False

    def batch_dims(self, name: str) -> list[int]:
        """Returns the dims of an argument whose size depends on the number of rows."""
        argument = self.given.get(name)
        found = self.batch.symbolic[argument.name] if isinstance(argument, Ref) else None
        return self.batch.dims(found) if isinstance(found, torch.Tensor) else []

    def batch_sizes(self, name: str) -> dict[int, Any]:
        """Returns the sizes of an argument that depend on the number of rows, as expressions, by dim."""
        dims = self.batch_dims(name)
        if not dims:
            return {}
        shape = self.batch.symbolic[self.given[name].name].shape
        return {d: expression(shape[d]) for d in dims}

    def is_whole(self, dim: int) -> bool:
        """Returns whether `start`, `end` and `step` take all places of a dim, for every number of rows."""
        start, end = self.given.get("start"), self.given.get("end")
        if isinstance(end, Ref):
            size = self.batch.symbolic[self.given["self"].name].shape[dim]
            all_places = expression(self.batch.symbolic[end.name]) == expression(size)
        else:
            all_places = end is None or end >= _NO_END
        return all_places and start in (None, 0) and self.given.get("step") in (None, 1)

    # ---------------------------------------------------------------- results

    @property
    def result(self) -> Any:
        """The fake result, with numbers as sizes."""
        return self.batch.values[self.node.name]

    def _part(self, values: Mapping[str, Any], number: int) -> Any:
        """Returns the result, or one of several, among the values of the program."""
        found = values[self.node.name]
        return found if isinstance(found, torch.Tensor) else found[number]

    @property
    def first_result(self) -> torch.Tensor:
        """The result, or the first of several."""
        found: torch.Tensor = self._part(self.batch.values, 0)
        return found

    def result_dims(self, number: int = 0) -> list[int]:
        """Returns the dims of the result, or of one of several, whose size depends on the number of rows."""
        return self.batch.dims(self._part(self.batch.symbolic, number))

    def has_shape(self, number: int = 0) -> bool:
        """Returns whether the result, or one of several, is a tensor."""
        return isinstance(self._part(self.batch.values, number), torch.Tensor)

    def dtype(self, number: int = 0) -> torch.dtype:
        """Returns the dtype of the result, or of one of several."""
        found: torch.dtype = self._part(self.batch.values, number).dtype
        return found

    def is_size(self, number: int, axis: RowAxis) -> bool:
        """Returns whether a dim of the result has the size of an axis, for every number of rows."""
        size = int(self._part(self.batch.values, number).shape[axis.dim])
        symbolic = self._part(self.batch.symbolic, number).shape[axis.dim]
        return size == axis.before * self.rows * axis.after and self.batch.is_multiple(symbolic)

    def even(self, number: int = 0) -> Layout:
        """Returns the layout of a result that does not change along its dims of the batch."""
        return EVEN if self.result_dims(number) else None

    def placed(self, layout: Layout, number: int = 0) -> Layout:
        """Returns the layout of an argument in the result, or in one of several, whose dims are others.

        The rows are in the only dim of the result that depends on the batch, in the same order. Raises:
        NoRule if there are other such dims.
        """
        axis = layout.axis if isinstance(layout, RowNumbers) else layout
        if not isinstance(axis, RowAxis):
            return layout
        dims = self.result_dims(number) if self.has_shape(number) else []
        if len(dims) != 1:
            self.unknown("has another size that depends on the number of rows")
        axis = replace(axis, dim=dims[0])
        return RowNumbers(axis) if isinstance(layout, RowNumbers) else axis

    def several(self, layout: Layout) -> Layout:
        """Returns a layout of the result, or one for each of several results. The rows are as in `placed`."""
        if isinstance(self.result, torch.Tensor):
            return self.placed(layout)
        return [
            self.even(i) if layout is EVEN and self.has_shape(i) else self.placed(layout, i)
            for i in range(len(self.result))
        ]

    # ---------------------------------------------------------------- refusals

    def mixes(self, why: str) -> NoReturn:
        """Raises: MixesRows."""
        raise MixesRows(self.node, why)

    def unknown(self, why: str = "no rule for this op") -> NoReturn:
        """Raises: NoRule."""
        raise NoRule(self.node, why)

    def axis(self, name: str) -> RowAxis | None:
        """Returns the axis of the rows of an argument; None if it does not change with the row.

        Raises: NoRule for row numbers.
        """
        found = self.layout(name)
        if isinstance(found, (RowNumbers, list)):
            self.unknown("uses the number of the row")
        return found if isinstance(found, RowAxis) else None

    def even_dims(self, name: str) -> list[int]:
        """Returns the dims of the batch of an argument that does not change along them; none of another."""
        return self.batch_dims(name) if self.layout(name) is EVEN else []

    def apart(self, *names: str, dims: Sequence[int]) -> None:
        """Checks that arguments have no dim of the batch but some. Raises: NoRule."""
        for name in names:
            if set(self.even_dims(name)) - set(dims):
                self.unknown(f"computes along a dim of its {name} whose size is the number of rows")

    def agreed(
        self, layouts: Iterable[Layout], refuse: Callable[[str], NoReturn], why: str
    ) -> RowAxis | None:
        """Returns the one axis that layouts give; None if none of them is one. Refuses several."""
        axes = [layout for layout in layouts if isinstance(layout, RowAxis)]
        if any(axis != axes[0] for axis in axes):
            refuse(why)
        return axes[0] if axes else None

    def fixed(self, *names: str) -> None:
        """Checks that arguments do not depend on the rows. Raises: NoRule."""
        for name in names:
            found = self.layout(name)
            if any(x is not None for x in (found if isinstance(found, list) else [found])):
                self.unknown(f"its {name} depends on the rows")


Rule = Callable[[Call], Layout]
"""Returns the layout of a node's result. Raises: MixesRows; NoRule."""
