"""Runs compiled programs at the sizes for which they are valid, and the flat graph at all others.

A compiler assumes conditions on the sizes that it compiles for, such as `B < 16`. They are stored as
arithmetic over named dims and checked before every call. More than one variant may be compiled.

A size of 1 is checked as 2: whether a compiled program is right at 1 is tested by running it when it is
compiled. If it is not, the record has `least: 2` for that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.guards import Expr, holds
from widepack_artifacts.program import Slot

from ..errors import InputError
from ..ir.tensor_type import parse_slot
from ..spec.dtypes import dtype_of
from ..spec.input_spec import DimExpr
from .flat import Flat, filled
from .task import MemberFunctions, Task

_NEW: Any = object()

SEEN = 256


@dataclass(frozen=True)
class Variant:
    """One compiled program.

    run: takes a new list of contiguous inputs and returns the outputs. conditions: under which it is valid.
    least: the smallest valid size of dims at which it is wrong at 1. fixed: whether the compiler took the
    program at one size of a dim only. example: the sizes that it was compiled at.
    """

    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    conditions: Sequence[Expr] = ()
    least: Mapping[str, int] | None = None
    fixed: bool = False
    example: Mapping[str, int] | None = None

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the program is valid at these sizes."""
        if any(sizes.get(d, n) < n for d, n in (self.least or {}).items()):
            return False
        checked = {d: max(2, s) for d, s in sizes.items()}
        return all(holds(c, checked) for c in self.conditions)


class Checked:
    """A function over compiled programs.

    They check nothing, so every input is checked against its type first.

    task: the program that was bound. shape: where its outputs are among those of the compiled program.
    place: the folder of the compiled programs. flagged: whether the last output says that an index was out of
    range (`index_flags.py`). flat: the program that was compiled, with its weights, if they are kept.
    members: runs members alone, if something does.
    """

    members: MemberFunctions | None = None

    def __init__(
        self,
        task: Task,
        shape: Sequence[Any],
        variants: Sequence[Variant],
        place: Path | None = None,
        *,
        flagged: bool = False,
        flat: Flat | None = None,
    ) -> None:
        self.variants = variants
        self.place = place
        self.eager = task.eager
        self.flat = flat
        self._flagged = flagged
        self._inputs = [_Input(s, task.program.members) for s in task.program.inputs]
        self._device = task.device
        self._shape = shape
        self._plain = [getattr(s, "number", -1) for s in shape] == list(range(len(shape)))
        self._seen: dict[Any, Variant | None] = {}

    def __call__(self, *inputs: torch.Tensor) -> Any:
        like = tuple([(x.shape, x.dtype) for x in inputs])
        variant = self._seen.get(like, _NEW)  # read once: another thread may clear the dict
        if variant is _NEW:
            variant = self._choose(inputs, like)
        if variant is None:
            return self.eager(*inputs)
        outputs = variant.run(
            [x if x.is_contiguous() and not x.is_neg() and not x.is_conj() else _plain(x) for x in inputs]
        )
        if self._flagged:
            if outputs[-1]:  # an index was out of range: the flat graph raises the op's error
                return self.eager(*inputs)
            outputs = outputs[:-1]
        return outputs if self._plain else [filled(s, outputs) for s in self._shape]

    def _choose(self, inputs: Sequence[torch.Tensor], like: Any) -> Variant | None:
        """The variant for inputs of these shapes; None if no variant is valid.

        Raises: InputError for inputs of another type.
        """
        sizes: dict[str, int] = {}
        if len(inputs) != len(self._inputs):
            raise InputError(f"the program takes {len(self._inputs)} inputs, the call gives {len(inputs)}")
        for spec, x in zip(self._inputs, inputs):
            spec.check(x, self._device, sizes)
        variant = next((v for v in self.variants if v.holds(sizes)), None)
        if any(s == 0 for x in inputs for s in x.shape):
            variant = None
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen[like] = variant
        return variant


def _plain(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous in memory."""
    return x.resolve_conj().resolve_neg().contiguous()


class _Input:
    def __init__(self, slot: Slot, members: int) -> None:
        type_ = parse_slot(slot.type)
        self.name, self.type, self.dtype = slot.source or slot.name, slot.type, dtype_of(type_.dtype)
        self.dims: list[int | DimExpr] = [*([members] if slot.kind == "stacked" else []), *type_.dims]

    def check(self, x: torch.Tensor, device: torch.device, sizes: dict[str, int]) -> None:
        fits = (
            x.dtype == self.dtype
            and x.device == device
            and x.layout == torch.strided
            and x.dim() == len(self.dims)
        )
        for size, dim in zip(x.shape, self.dims):
            fits &= (
                size == dim
                if isinstance(dim, int)
                else size % dim.factor == 0
                and sizes.setdefault(dim.letter, size // dim.factor) == size // dim.factor
            )
        if not fits:
            raise InputError(
                f"input {self.name} is {str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}; "
                f"the compiled program takes {self.type}"
            )
