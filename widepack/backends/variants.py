"""A compiled program and the sizes that it holds for.

A compiler looks at the sizes that it is given and takes for granted what they have in common with others: `B < 16`. Those conditions are kept as arithmetic
over named dims and asked before every call; more than one variant may be compiled, and at sizes that none holds for the flat graph runs.

Conditions that hold at 2 are asked of 2 where a size is 1: that a compiled program is right at 1 is found out by running it there when it is compiled, and where
it is not the record says `least: 2` of that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.guards import Expr, holds
from widepack_artifacts.program import Slot

from ..ir.encoding import dtype_of
from ..errors import InputError
from ..spec.input_spec import DimExpr, parse_type
from .flat import Flat
from .task import Function

_NEW: Any = object()

SEEN = 256


@dataclass(frozen=True)
class Variant:
    """run: flat inputs, contiguous, in a list that is its own -> flat outputs. conditions: under which it holds. least: of the dims that it does not hold for at 1."""

    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    conditions: Sequence[Expr] = ()
    least: Mapping[str, int] | None = None

    def holds(self, sizes: Mapping[str, int]) -> bool:
        if any(sizes.get(d, n) < n for d, n in (self.least or {}).items()):
            return False
        asked = {d: max(2, s) for d, s in sizes.items()}
        return all(holds(c, asked) for c in self.conditions)


class Checked:
    """A call of compiled programs, which check nothing themselves: every input is held to its type before native code sees it.

    flat: the program that they were made of, with its weights. place: where the programs lie.
    """

    def __init__(self, device: torch.device, flat: Flat, variants: Sequence[Variant], eager: Function, place: Path | None = None) -> None:
        slots, members = flat.program.inputs, flat.program.members
        self.variants = variants
        self.place = place
        self.eager = eager
        self._inputs = [_Input(s, members) for s in slots]
        self._device = device
        self.flat = flat
        self._plain = [getattr(s, "number", -1) for s in flat.shape] == list(range(len(flat.program.outputs)))
        self._seen: dict[Any, Variant | None] = {}

    def __call__(self, *inputs: torch.Tensor) -> Any:
        like = tuple([(x.shape, x.dtype) for x in inputs])
        variant = self._seen.get(like, _NEW)  # once: another thread may clear it
        if variant is _NEW:
            variant = self._choose(inputs, like)
        if variant is None:
            return self.eager(*inputs)
        found = variant.run([x if x.is_contiguous() and not x.is_neg() and not x.is_conj() else _plain(x) for x in inputs])
        return found if self._plain else self.flat.outputs(found)

    def _choose(self, inputs: Sequence[torch.Tensor], like: Any) -> Variant | None:
        """The variant for inputs of these shapes; None: no variant holds there. Raises: InputError for what the program is not for."""
        sizes: dict[str, int] = {}
        if len(inputs) != len(self._inputs):
            raise InputError(f"the program takes {len(self._inputs)} inputs, the call gives {len(inputs)}")
        for spec, x in zip(self._inputs, inputs):
            spec.check(x, self._device, sizes)
        found = next((v for v in self.variants if v.holds(sizes)), None)
        if any(s == 0 for x in inputs for s in x.shape):
            found = None
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen[like] = found
        return found


def _plain(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as memory holds them, in order."""
    return x.resolve_conj().resolve_neg().contiguous()


class _Input:
    def __init__(self, slot: Slot, members: int) -> None:
        name, dims = parse_type(slot.type)
        self.name, self.type, self.dtype = slot.source or slot.name, slot.type, dtype_of(name)
        self.dims: list[int | DimExpr] = [*([members] if slot.kind == "stacked" else []), *dims]

    def check(self, x: torch.Tensor, device: torch.device, sizes: dict[str, int]) -> None:
        fits = x.dtype == self.dtype and x.device == device and x.layout == torch.strided and x.dim() == len(self.dims)
        for size, dim in zip(x.shape, self.dims):
            fits &= (
                size == dim
                if isinstance(dim, int)
                else size % dim.factor == 0 and sizes.setdefault(dim.letter, size // dim.factor) == size // dim.factor
            )
        if not fits:
            raise InputError(
                f"input {self.name} is {str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}; the compiled program takes {self.type}"
            )
