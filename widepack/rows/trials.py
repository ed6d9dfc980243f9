"""Tries whether a row of a batch changes the answers to the others: another draw, NaN, and other batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import LoweringError
from ..ir.tensor_type import TensorType, parse_slot
from ..spec.draws import InputSource, draw_all
from ..spec.dtypes import dtype_of
from ..system import deadline
from .axes import row_axis, row_axis_of

Run = Callable[[Sequence[torch.Tensor]], Sequence[object]]
"""Takes the inputs of a call and returns the outputs."""

CLOSE = 1e-7  # the largest difference of float64 answers in batches of different sizes, relative

FAILURES = (RuntimeError, ValueError, IndexError)
"""What torch raises for inputs that a model refuses."""


_COPIES, _LARGE_COPIES = 4, 5
"""How many times the inputs of a call of few rows, and of a larger one, are in memory at a time."""


class NoTrial(Exception):
    """The model refuses the inputs of the trials. The message is that of its error."""


@dataclass(frozen=True)
class RowTrials:
    """The trials of one member program.

    run: in the program's own dtypes. run_float64: in float64. sources: of the inputs. outputs: the type of
    each output. letter: the dim of the batch. most_bytes: that the inputs of all trials may take.
    """

    run: Run
    run_float64: Run
    sources: Sequence[InputSource]
    outputs: Sequence[TensorType]
    letter: str
    most_bytes: float = math.inf

    def difference(self, sizes: Mapping[str, int], rows: int, large: int, parts: Sequence[int]) -> str:
        """Returns how a row changes the answer to another one; "" if no trial shows that.

        Args:
            sizes: The size of each other dim.
            rows: The number of rows of a call in which each row is replaced, at least 2.
            large: The number of rows of a larger call.
            parts: Smaller numbers of rows: the first and the last so many rows of the larger call are run
                alone.

        Raises:
            NoTrial: The model refuses inputs that are drawn at these sizes, or they take too much memory.
            LoweringError: The trials of a program of a file take too long.
        """
        size = _COPIES * self._bytes({**sizes, self.letter: rows})
        size += _LARGE_COPIES * self._bytes({**sizes, self.letter: large})
        if size > self.most_bytes:
            raise NoTrial(f"the inputs of trials would take {size:,} bytes")
        inputs, others = (draw_all(self.sources, {**sizes, self.letter: rows}, seed) for seed in (1, 2))
        try:
            right = self._run(inputs)
        except FAILURES as e:
            lines = str(e).strip().splitlines()
            raise NoTrial(lines[0][:200] if lines else type(e).__name__) from e
        for row in range(rows):
            for why, compared, changed in self._changes(inputs, others, row, rows):
                try:
                    found = self._run(changed)
                except FAILURES:
                    continue  # the model refuses the call, so there is no answer that could be wrong
                if not self._equal(right, found, compared):
                    return why
        whole = draw_all(self.sources, {**sizes, self.letter: large}, 3)
        places = [range(start, start + n) for n in parts for start in (0, large - n)]
        return next((why for place in places if (why := self._difference_of_part(whole, place))), "")

    def _run(self, inputs: Sequence[torch.Tensor]) -> Sequence[object]:
        """Runs a trial. Raises: LoweringError if the time is over."""
        _refuse_late()
        return self.run(inputs)

    def _bytes(self, sizes: Mapping[str, int]) -> int:
        """Returns how much memory the inputs of a call take."""
        types = [parse_slot(source.type) for source in self.sources]
        return sum(math.prod(t.shape(sizes)) * dtype_of(t.dtype).itemsize for t in types)

    def _changes(
        self, inputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor], row: int, rows: int
    ) -> Iterator[tuple[str, list[int], list[torch.Tensor]]]:
        """Yields what would be wrong, the rows whose answers must stay the same, and the changed inputs.

        A row is from another draw, has NaN, large values or zeros in all floats, or is equal to the next row.
        At last all rows are equal to it.
        """
        kept, following = [r for r in range(rows) if r != row], (row + 1) % rows
        axes = [row_axis_of(source.type, self.letter) for source in self.sources]

        def changed(new: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
            values = zip(inputs, others, axes)
            return [new(value, other, axis.dim) if axis else value for value, other, axis in values]

        others_are = "changes the answers to other rows"
        drawn = changed(lambda value, other, dim: _with_row(value, other.select(dim, row), dim, row))
        yield f"row {row} with other values {others_are}", kept, drawn
        if any(axis and value.is_floating_point() for value, axis in zip(inputs, axes)):
            for name, change in _CHANGES.items():
                yield f"row {row} with {name} {others_are}", kept, changed(partial(_changed, row, change))
        copied = changed(lambda value, _, dim: _with_row(value, value.select(dim, following), dim, row))
        yield f"row {row} with the values of row {following} {others_are}", kept, copied
        repeated = changed(lambda value, _, dim: _rows(value, dim, [row] * rows))
        yield f"the answer to row {row} changes where all rows are equal to it", [row], repeated

    def _equal(self, right: Sequence[object], found: Sequence[object], rows: Sequence[int]) -> bool:
        """Returns whether rows of all outputs have the same bits."""
        for type_, a, b in zip(self.outputs, right, found):
            axis = row_axis(type_, self.letter)
            if axis is None or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                continue
            if a.shape != b.shape or not _same(_rows(a, axis.dim, rows), _rows(b, axis.dim, rows)):
                return False
        return True

    def _difference_of_part(self, inputs: Sequence[torch.Tensor], rows: range) -> str:
        """Returns whether some rows of a call have other answers alone than in the call."""
        whole, part = [_raised(v) for v in inputs], []
        for source, value in zip(self.sources, whole):
            axis = row_axis_of(source.type, self.letter)
            part.append(_rows(value, axis.dim, rows) if axis is not None else value)
        _refuse_late()
        try:
            together, alone = self.run_float64(whole), self.run_float64(part)
        except FAILURES:
            return ""
        for type_, a, b in zip(self.outputs, together, alone):
            axis = row_axis(type_, self.letter)
            if axis is None or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                continue
            if not _close(_rows(a, axis.dim, rows), b):
                return f"the answers to {len(rows)} rows alone differ from those in a larger batch"
        return ""


_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "large values": lambda x: x * 1e4,
    "zeros": torch.zeros_like,
}
"""How the floats of a row are changed. Other numbers are drawn again."""


def _changed(
    row: int,
    change: Callable[[torch.Tensor], torch.Tensor],
    value: torch.Tensor,
    other: torch.Tensor,
    dim: int,
) -> torch.Tensor:
    """Returns a value with a row of another one, whose floats are changed."""
    new = other.select(dim, row)
    return _with_row(value, change(new) if new.is_floating_point() else new, dim, row)


def _with_row(value: torch.Tensor, new: torch.Tensor, dim: int, row: int) -> torch.Tensor:
    """Returns a value with another row."""
    found = value.clone()
    found.select(dim, row).copy_(new)
    return found


def _refuse_late() -> None:
    """Raises: LoweringError if the time of the enclosing limit is over."""
    if deadline.over():
        raise LoweringError("trying whether its rows are independent takes too long")


def _rows(value: torch.Tensor, dim: int, rows: Sequence[int]) -> torch.Tensor:
    return value.index_select(dim, torch.tensor(list(rows), dtype=torch.int64, device=value.device))


def _raised(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = a.abs()[torch.isfinite(a.abs())]
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)
