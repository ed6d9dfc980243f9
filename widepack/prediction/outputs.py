"""Runs a batch of rows, and gives the outputs as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.entry import OutputLeaf

from ..errors import InputError, UsageError
from ..inference.entry import WideEntry
from ..inference.reduced_answer import MIXTURE, Reduction
from ..rows.axes import row_axis_of
from ..spec.output_names import output_name


@dataclass(frozen=True)
class NamedOutput:
    """One part of the answer to a batch.

    Attributes:
        name: The name of the column.
        value: The numbers.
        row_dim: The dim of the rows.
        per_member: Whether dim 0 is the member axis.
    """

    name: str
    value: Tensor
    row_dim: int
    per_member: bool = False


class OutputColumns:
    """The columns that an entry gives, and how a batch is run.

    Args:
        entry: The entry.
        letter: The dim of the rows.
        answer: The output that is wanted, by name or number; None for all, and for the default of `reduce`.
        name: What the output is called in the file; None for its own name.
        statistics: The statistics that replace the members' outputs; None for the outputs.

    Raises:
        UsageError: An output has no row for each row of the inputs, or there is no such output.
    """

    def __init__(
        self,
        entry: WideEntry,
        letter: str,
        answer: str | int | None,
        name: str | None,
        statistics: Reduction | None,
    ) -> None:
        self._entry, self._statistics = entry, statistics
        leaves = entry.entry.outputs
        if answer is not None:
            self._chosen = [output_number(leaves, answer)]
        else:
            self._chosen = list(range(len(leaves))) if statistics is None else [default_output(leaves)]
        if name is not None and len(self._chosen) > 1:
            raise UsageError(
                f"name={name!r} is for one output, and the members have {len(leaves)}; "
                "choose one with answer="
            )
        self._names = {k: name or output_name(entry.entry, k) for k in self._chosen}
        self._row_dims = {k: _row_dim(leaves[k], letter) for k in self._chosen}
        # the output as `reduce` takes it
        self._reduced: str | int | None = None
        if answer is not None:
            (k,) = self._chosen
            by_name = leaves[k].name == answer and "output" in entry.entry.result
            self._reduced = leaves[k].name if by_name else k

    def calibrate(self) -> None:
        """Applies the recorded calibration to the statistics. Raises: UsageError if it is not of these."""
        assert self._statistics is not None  # `predict` takes it with statistics only
        self._statistics.calibrate(self._entry.calibration, [self._entry.entry.outputs[self._chosen[0]]])

    def row_bytes(self) -> int:
        """Returns about how many bytes the outputs for a row have."""
        entry, total = self._entry.entry, 0
        for k in self._chosen:
            numbers = 1
            for dim, size in enumerate(_sizes(entry.outputs[k])):
                if dim != self._row_dims[k]:
                    known = entry.dims[size].example if size in entry.dims else 16
                    numbers *= int(size) if size.isdigit() else known
            count = len(self._statistics.names) if self._statistics else len(self._entry.members)
            total += 4 * numbers * count
        return total

    def run(self, inputs: Sequence[Tensor], members: Sequence[int] | None) -> Iterator[NamedOutput]:
        """Runs a batch, and yields its columns. members: the member of each row; None for all members."""
        args, kwargs, _ = self._entry.tensor_calls.arguments(inputs)
        if members is None and self._statistics is not None:
            s, output = self._statistics, self._reduced
            options: dict[str, Any] = {"of": s.of, "dim": s.dim, "calibrated": s.calibration is not None}
            values = self._entry.reduce(*args, *s.names, output=output, **options, **kwargs)
            yield from self._statistic_columns(values, s.dim)
            return
        if members is None:
            answer = self._entry(*args, **kwargs)
        else:
            answer = self._entry.route(*args, member=members, **kwargs)
        leaves = self._entry.tensor_calls.numbered_leaves(answer)
        for k in self._chosen:
            name, dim, value = self._names[k], self._row_dims[k], leaves[k]
            if isinstance(value, Tensor):
                per_member = members is None
                yield NamedOutput(name, value, dim + per_member, per_member)
            elif members is None:  # a tensor of another shape for each member
                for member, own in zip(self._entry.members, value):
                    yield NamedOutput(f"{name}.{member}", own, dim)
            else:
                raise UsageError(
                    f"the answers {name} of the members differ in shape, so that they are no column; "
                    "run members of one shape, or all members without member="
                )

    def _statistic_columns(self, values: Any, dim: int) -> Iterator[NamedOutput]:
        (k,) = self._chosen
        rank, row_dim = len(_sizes(self._entry.entry.outputs[k])), self._row_dims[k]
        for statistic, value in values.items():
            name = f"{self._names[k]}.{statistic}"
            if statistic == MIXTURE:
                for part, one in zip(("mean", "var"), value):
                    yield NamedOutput(f"{name}.{part}", one, row_dim)
                continue
            lost = value.dim() < rank and dim % rank < row_dim  # the classes stood before the rows
            yield NamedOutput(name, value, row_dim - lost)


class Collected:
    """The outputs for the batches of a block, side by side.

    Args:
        rows: The number of rows of the block.
        members: The members' names.
        split: Whether members become columns of their own. False: they are a dim of one column.
        shapes: The shape of a row of each output; filled by the first batch of a file.
    """

    def __init__(self, rows: int, members: Sequence[str], split: bool, shapes: dict[str, list[int]]) -> None:
        self._rows, self._members, self._split, self._shapes = rows, members, split, shapes
        self._parts: dict[str, NamedOutput] = {}

    def add(self, first: int, count: int, outputs: Sequence[NamedOutput], where: str) -> None:
        """Adds the outputs for a batch. first: its first row. count: the rows that count. where: the batch in
        the file. Raises: InputError for outputs of another shape than those before.
        """
        shapes = {a.name: [n for k, n in enumerate(a.value.shape) if k != a.row_dim] for a in outputs}
        self._shapes.update({} if self._shapes else shapes)
        for name in (*shapes, *self._shapes):
            now, before = shapes.get(name, "(none)"), self._shapes.get(name, "(none)")
            if now != before:
                raise InputError(
                    f"{where}: the answer {name} has the shape {now}, and those before had {before}; "
                    "the rows of a column have one shape"
                )
        for a in outputs:
            if a.name not in self._parts:
                shape = list(a.value.shape)
                shape[a.row_dim] = self._rows
                memory = torch.empty(shape, dtype=a.value.dtype)
                self._parts[a.name] = NamedOutput(a.name, memory, a.row_dim, a.per_member)
            place = self._parts[a.name].value.narrow(a.row_dim, first, count)
            place.copy_(a.value.narrow(a.row_dim, 0, count))

    def columns(self) -> dict[str, Tensor]:
        """Returns the columns, `[rows, ...]`."""
        columns = {}
        for a in self._parts.values():
            if a.per_member and self._split:
                for member, value in zip(self._members, a.value.unbind(0)):
                    columns[f"{a.name}.{member}"] = value.movedim(a.row_dim - 1, 0)
            else:
                columns[a.name] = a.value.movedim(a.row_dim, 0)
        return columns


def output_number(leaves: Sequence[OutputLeaf], answer: str | int) -> int:
    """Returns the number of an output. answer: its name or its number. Raises: UsageError."""
    names = [leaf.name for leaf in leaves]
    if answer in names:
        return names.index(str(answer))
    number = int(answer) if isinstance(answer, str) and answer.isdecimal() else answer
    if type(number) is int and 0 <= number < len(leaves):
        return number
    raise UsageError(f"answer={answer!r} is unknown; the members answer {', '.join(names)}")


def default_output(leaves: Sequence[OutputLeaf]) -> int:
    """Returns the number of the output that `reduce` and `select` read by default."""
    names = [leaf.name for leaf in leaves]
    return names.index("logits") if "logits" in names else 0


def _sizes(leaf: OutputLeaf) -> list[str]:
    return [d for d in leaf.type.partition("[")[2].partition("]")[0].split(",") if d]


def row_dim_of(type_: str, letter: str) -> int | None:
    """Returns the dim of the rows in a tensor of a type; None if it has no row for each row of a file."""
    try:
        axis = row_axis_of(type_, letter)
    except ValueError:
        return None
    return axis.dim if axis is not None and axis.plain else None


def _row_dim(leaf: OutputLeaf, letter: str) -> int:
    """Returns the dim of the rows in a member's output. Raises: UsageError."""
    dim = row_dim_of(leaf.type.partition("|")[0], letter)
    if dim is None:
        raise UsageError(
            f"the output {leaf.name} is {leaf.type}: it has no row for each row of the inputs along "
            f"{letter}; choose another output with answer= (--answer), or call the model in your own code"
        )
    return dim
