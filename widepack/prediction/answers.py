"""Runs a batch of rows, and gives the answers as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import tree
from widepack_artifacts.entry import OutputLeaf

from ..errors import InputError, UsageError
from ..inference.entry import WideEntry
from ..inference.reduced_answer import MIXTURE
from ..rows.axes import row_axis_of
from ..spec.output_names import output_name


@dataclass(frozen=True)
class NamedAnswer:
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


@dataclass(frozen=True)
class Figures:
    """The figures that replace the members' answers. The fields are arguments of `reduce`."""

    names: tuple[str, ...]
    of: str | None
    dim: int


class AnswerColumns:
    """The columns that an entry gives, and how a batch is run.

    Args:
        entry: The entry.
        letter: The dim of the rows.
        answer: The output that is wanted, by name or number; None for all, and for the default of `reduce`.
        name: What the output is called in the file; None for its own name.
        figures: The figures; None for the answers of members.

    Raises:
        UsageError: An output has no row for each row of the inputs, or there is no such output.
    """

    def __init__(
        self,
        entry: WideEntry,
        letter: str,
        answer: str | int | None,
        name: str | None,
        figures: Figures | None,
    ) -> None:
        self._entry, self._figures, self._answer = entry, figures, answer
        leaves = entry.entry.outputs
        self._chosen = list(range(len(leaves))) if answer is None else [_number(leaves, answer)]
        if figures is not None and answer is None:
            self._chosen = [_default(leaves)]
        if name is not None and len(self._chosen) > 1:
            raise UsageError(
                f"name={name!r} is for one output, and the members have {len(leaves)}; "
                "choose one with answer="
            )
        self._names = {k: name or output_name(entry.entry, k) for k in self._chosen}
        self._row_dims = {k: _row_dim(leaves[k], letter) for k in self._chosen}

    @property
    def output(self) -> str | int | None:
        """The output as `reduce` takes it."""
        if self._answer is None:
            return None
        (k,) = self._chosen
        name = self._entry.entry.outputs[k].name
        return name if name == self._answer and "output" in self._entry.entry.result else k

    def row_bytes(self) -> int:
        """Returns about how many bytes the answers to a row have."""
        entry, total = self._entry.entry, 0
        for k in self._chosen:
            numbers = 1
            for d in (
                _sizes(entry.outputs[k])[: self._row_dims[k]]
                + _sizes(entry.outputs[k])[self._row_dims[k] + 1 :]
            ):
                numbers *= int(d) if d.isdigit() else entry.dims[d].example if d in entry.dims else 16
            total += 4 * numbers * (len(self._figures.names) if self._figures else len(self._entry.members))
        return total

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], members: Sequence[int] | None
    ) -> list[NamedAnswer]:
        """Runs a batch. members: the member of each row; None for all members."""
        if members is not None:
            answer = self._entry.route(*args, member=members, **kwargs)
            return [self._routed(k, value) for k, value in self._leaves(answer)]
        if self._figures is not None:
            return self._reduced(args, kwargs, self._figures)
        return [
            part for k, value in self._leaves(self._entry(*args, **kwargs)) for part in self._whole(k, value)
        ]

    def _leaves(self, answer: Any) -> list[tuple[int, Any]]:
        values: dict[int, Any] = {}
        _collect(self._entry.entry.result, answer, values)
        return [(k, values[k]) for k in self._chosen]

    def _routed(self, k: int, value: Any) -> NamedAnswer:
        if not isinstance(value, Tensor):
            raise UsageError(
                f"the answers {self._names[k]} of the members differ in shape, so that they are no column; "
                "run members of one shape, or all members without member="
            )
        return NamedAnswer(self._names[k], value, self._row_dims[k])

    def _whole(self, k: int, value: Any) -> list[NamedAnswer]:
        name, dim = self._names[k], self._row_dims[k]
        if isinstance(value, Tensor):
            return [NamedAnswer(name, value, dim + 1, per_member=True)]
        return [NamedAnswer(f"{name}.{m}", v, dim) for m, v in zip(self._entry.members, value)]

    def _reduced(self, args: Sequence[Any], kwargs: Mapping[str, Any], figures: Figures) -> list[NamedAnswer]:
        found = self._entry.reduce(
            *args, *figures.names, of=figures.of, dim=figures.dim, output=self.output, **kwargs
        )
        (k,) = self._chosen
        rank, row_dim = len(_sizes(self._entry.entry.outputs[k])), self._row_dims[k]
        parts = []
        for figure, value in found.items():
            if figure == MIXTURE:
                pair = zip(("mean", "var"), value)
                parts += [NamedAnswer(f"{self._names[k]}.{figure}.{n}", v, row_dim) for n, v in pair]
                continue
            lost = value.dim() < rank and figures.dim % rank < row_dim  # the classes stood before the rows
            parts.append(NamedAnswer(f"{self._names[k]}.{figure}", value, row_dim - lost))
        return parts


class Collected:
    """The answers to the batches of a block, side by side.

    Args:
        rows: The number of rows of the block.
        members: The members' names.
        split: Whether members become columns of their own. False: they are a dim of one column.
    """

    def __init__(self, rows: int, members: Sequence[str], split: bool) -> None:
        self._rows, self._members, self._split = rows, members, split
        self._parts: dict[str, NamedAnswer] = {}

    def add(self, first: int, count: int, answers: Sequence[NamedAnswer], where: str) -> None:
        """Adds the answers to a batch. first: its first row. count: the rows that count. where: the batch in
        the file. Raises: InputError for answers of another shape than those before.
        """
        for a in answers:
            if a.name not in self._parts:
                shape = list(a.value.shape)
                shape[a.row_dim] = self._rows
                memory = torch.empty(shape, dtype=a.value.dtype)
                self._parts[a.name] = NamedAnswer(a.name, memory, a.row_dim, a.per_member)
            memory = self._parts[a.name].value
            value, place = a.value.narrow(a.row_dim, 0, count), memory.narrow(a.row_dim, first, count)
            if value.shape != place.shape:
                raise InputError(
                    f"{where}: the answer {a.name} has the shape {list(value.shape)}, and those before had "
                    f"{list(place.shape)}; the rows of a column have one shape"
                )
            place.copy_(value)

    def columns(self) -> dict[str, Tensor]:
        """Returns the columns, `[rows, ...]`."""
        found = {}
        for a in self._parts.values():
            if a.per_member and self._split:
                for member, value in zip(self._members, a.value.unbind(0)):
                    found[f"{a.name}.{member}"] = value.movedim(a.row_dim - 1, 0)
            else:
                found[a.name] = a.value.movedim(a.row_dim, 0)
        return found


def _collect(shape: tree.Tree, value: Any, found: dict[int, Any]) -> None:
    """Puts the leaves of an answer into `found`, by number."""
    ((form, inner),) = shape.items()
    if form == "leaf":
        found[inner] = value
    elif form in ("tuple", "list"):
        for part, v in zip(inner, value):
            _collect(part, v, found)
    elif form != "const":
        rows = inner[1] if form == "output" else inner
        for at, (key, part) in enumerate(rows):
            # a named tuple of torch is read by number
            _collect(part, value[at] if isinstance(value, tuple) else value[key], found)


def _number(leaves: Sequence[OutputLeaf], answer: str | int) -> int:
    names = [leaf.name for leaf in leaves]
    if answer in names:
        return names.index(str(answer))
    number = int(answer) if isinstance(answer, str) and answer.isdecimal() else answer
    if type(number) is int and 0 <= number < len(leaves):
        return number
    raise UsageError(f"answer={answer!r} is unknown; the members answer {', '.join(names)}")


def _default(leaves: Sequence[OutputLeaf]) -> int:
    """Returns the output that `reduce` reduces by default."""
    names = [leaf.name for leaf in leaves]
    return names.index("logits") if "logits" in names else 0


def _sizes(leaf: OutputLeaf) -> list[str]:
    return [d for d in leaf.type.partition("[")[2].partition("]")[0].split(",") if d]


def _row_dim(leaf: OutputLeaf, letter: str) -> int:
    """Returns the dim of the rows in a member's answer. Raises: UsageError."""
    text = leaf.type.partition("|")[0]
    try:
        axis = row_axis_of(text, letter)
    except ValueError:
        axis = None
    if axis is None or not axis.plain:
        raise UsageError(
            f"the output {leaf.name} is {leaf.type}: it has no row for each row of the inputs along "
            f"{letter}; choose another output with answer= (--answer), or call the model in your own code"
        )
    return axis.dim
