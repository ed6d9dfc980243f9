"""The example call of a build: from input specs, or from the user's own sample.

Sizes of dims that nobody gives: the batch (the first dim of the first input) 4, the others 16, 24, 40, ..., within their bounds: at least 2, since export
takes 1 for a constant, and even, as most code expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import guards

from ..errors import UsageError
from ..spec.draws import Source, draw
from ..spec.input_spec import Bounds, InputSpec, type_text

_OTHERS = (16, 24, 40, 56, 72)
_FACTORED = (2, 3, 4, 5, 6)
_DOUBLINGS = 6


def example_sizes(specs: Sequence[InputSpec], bounds: Mapping[str, Bounds]) -> dict[str, int]:
    """A size for every letter of the specs."""
    sizes: dict[str, int] = {}
    for spec in specs:
        for position, dim in enumerate(spec.dims):
            if isinstance(dim, int) or dim.letter in sizes:
                continue
            wish = 4 if not sizes and position == 0 else (_OTHERS if dim.factor == 1 else _FACTORED)[min(len(sizes), 4)]
            least, most = bounds.get(dim.letter, (1, None))
            size = max(wish, least, 2)
            if (
                most is not None and size >= most
            ):  # below the bound: at it, a slice that goes up to the bound would take everything, and export holds on to that
                size = min(most, max(least, 2, (most - 1) // 2 * 2))
            sizes[dim.letter] = size
    for letter, (_, most) in bounds.items():
        if letter not in sizes:
            raise UsageError(f"the bounds of {letter} are given, but no input has a dim {letter}; the inputs name {', '.join(sizes) or 'no dims'}")
        if most == 1:
            raise UsageError(f"the dim {letter} may only be 1: write 1 in its place, a dynamic dim has at least two sizes")
    return sizes


def where_nothing_is_one(sizes: Mapping[str, int], conditions: Sequence[Any], bounds: Mapping[str, Bounds]) -> dict[str, int] | None:
    """Larger sizes within the bounds, where the example's made a size inside the member 1 (`H // 32 == 1`), which export holds on to as a number.

    conditions: those of the export, as expressions. Returns: None where no size inside is 1, or no larger one is to be had.
    """
    ones = [e for e in conditions if isinstance(e, list) and e[0] == "eq" and 1 in e[1:] and guards.letters(e)]
    named = set().union(*map(guards.letters, ones)) if ones else set()
    larger = dict(sizes)
    for _ in range(_DOUBLINGS if named else 0):
        tight = {d for e in ones if guards.holds(e, larger) for d in guards.letters(e)}
        if not tight:
            return larger
        grown = {d: 2 * n if d in tight and 2 * n <= (bounds.get(d, (1, None))[1] or 2 * n) else n for d, n in larger.items()}
        if grown == larger:
            return None
        larger = grown
    return None


def from_specs(specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """Keyword inputs and their dynamic axes."""
    sources = {s.name: Source(s.name, type_text(s), s.low, s.high) for s in specs}
    values = {name: draw(source, sizes, 1 + i) for i, (name, source) in enumerate(sources.items())}
    axes = {s.name: {i: str(d) for i, d in enumerate(s.dims) if not isinstance(d, int)} for s in specs}
    return values, axes


def default_axes(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Axis 0 of every tensor is the batch, unless the sizes there differ: then that of the first tensor's size only."""
    first = next((x for x in pytree.tree_leaves((list(args), dict(kwargs))) if isinstance(x, torch.Tensor) and x.ndim), None)
    if first is None:
        return {}

    def axes(x: Any) -> Any:
        return {0: "B"} if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == first.shape[0] else None

    return {n: pytree.tree_map(axes, v) for n, v in {**dict(zip(names, args)), **kwargs}.items()}
