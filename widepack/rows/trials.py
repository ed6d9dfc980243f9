"""Tries whether a row of a batch changes the answers to the others: another draw, NaN, and other batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..ir.tensor_type import TensorType
from ..spec.draws import InputSource, draw_all
from .axes import row_axis, row_axis_of

Run = Callable[[Sequence[torch.Tensor]], Sequence[object]]
"""Takes the inputs of a call and returns the outputs."""

CLOSE = 1e-7  # the largest difference of float64 answers in batches of different sizes, relative


FAILURES = (RuntimeError, ValueError, IndexError)
"""What torch raises for inputs that a model refuses."""


class NoTrial(Exception):
    """The model refuses the inputs of the trials. The message is that of its error."""


@dataclass(frozen=True)
class RowTrials:
    """The trials of one member program.

    run: in the program's own dtypes. run_float64: in float64. sources: of the inputs. outputs: the type of
    each output. letter: the dim of the batch.
    """

    run: Run
    run_float64: Run
    sources: Sequence[InputSource]
    outputs: Sequence[TensorType]
    letter: str

    def difference(self, sizes: Mapping[str, int], rows: int, large: int, parts: Sequence[int]) -> str:
        """Returns how a row changes the answer to another one; "" if no trial shows that.

        Args:
            sizes: The size of each other dim.
            rows: The number of rows of a call in which each row is replaced, at least 2.
            large: The number of rows of a larger call.
            parts: Smaller numbers of rows: the first and the last so many rows of the larger call are run
                alone.

        Raises:
            NoTrial: The model refuses inputs that are drawn at these sizes.
        """
        inputs, others = (draw_all(self.sources, {**sizes, self.letter: rows}, seed) for seed in (1, 2))
        try:
            right = self.run(inputs)
        except FAILURES as e:
            lines = str(e).strip().splitlines()
            raise NoTrial(lines[0][:200] if lines else type(e).__name__) from e
        for row in range(rows):
            for name, changed in self._changed(inputs, others, row):
                try:
                    found = self.run(changed)
                except FAILURES:
                    continue  # the model refuses the call, so there is no answer that could be wrong
                kept = [r for r in range(rows) if r != row]
                if not self._equal(right, found, kept):
                    return f"row {row} with {name} changes the answers to other rows"
        whole = draw_all(self.sources, {**sizes, self.letter: large}, 3)
        places = [range(start, start + n) for n in parts for start in (0, large - n)]
        return next((why for place in places if (why := self._difference_of_part(whole, place))), "")

    def _changed(
        self, inputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor], row: int
    ) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yields the inputs with another row: from another draw, and with NaN in all floats."""
        for name, change in _CHANGES.items():
            changed = []
            for source, value, other in zip(self.sources, inputs, others):
                axis = row_axis_of(source.type, self.letter)
                floats = value.is_floating_point()
                new = change(other) if floats else other
                changed.append(_with_row(value, new, axis.dim, row) if axis else value)
            yield name, changed

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
    "other values": lambda x: x,
    "NaN": lambda x: torch.full_like(x, torch.nan),
    "large values": lambda x: x * 1e4,
}
"""How the floats of a row are changed. Other numbers are drawn again."""


def _with_row(value: torch.Tensor, other: torch.Tensor, dim: int, row: int) -> torch.Tensor:
    changed = value.clone()
    changed.select(dim, row).copy_(other.select(dim, row))
    return changed


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
