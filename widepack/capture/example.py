"""Makes the example call of a build from input specs, and names the batch of a user's sample.

Sizes of dims without a given size: 4 for the batch (the first dim of the first input), and 16, 24, 40, ...
for the others, within their bounds. They are at least 2, because torch.export takes 1 for a constant, and
even, because most code expects that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import guards

from ..errors import UsageError
from ..spec.draws import InputSource, draw
from ..spec.input_spec import Bounds, InputSpec, type_text

_BATCH = 4
_OTHERS = (16, 24, 40, 56, 72)
_FACTORED = (2, 3, 4, 5, 6)  # of dims such as 32*H
_DOUBLINGS = 6


def example_sizes(specs: Sequence[InputSpec], bounds: Mapping[str, Bounds]) -> dict[str, int]:
    """Returns a size for every letter of the specs, within its bounds. Raises: UsageError."""
    sizes: dict[str, int] = {}
    for spec in specs:
        for position, dim in enumerate(spec.dims):
            if isinstance(dim, int) or dim.letter in sizes:
                continue
            wish = (_OTHERS if dim.factor == 1 else _FACTORED)[min(len(sizes), 4)]
            if not sizes and position == 0:
                wish = _BATCH
            least, most = bounds.get(dim.letter, (1, None))
            size = max(wish, least, 2)
            # Stay below the bound: a slice up to the bound would take the whole dim, and torch.export would
            # fix that.
            if most is not None and size >= most:
                size = min(most, max(least, 2, (most - 1) // 2 * 2))
            sizes[dim.letter] = size
    for letter, (_, most) in bounds.items():
        if letter not in sizes:
            raise UsageError(
                f"the bounds of {letter} are given, but no input has a dim {letter}; "
                f"the inputs name {', '.join(sizes) or 'no dims'}"
            )
        if most == 1:
            raise UsageError(
                f"the dim {letter} may only be 1: write 1 in its place, a dynamic dim has at least two sizes"
            )
    return sizes


def sizes_without_ones(
    sizes: Mapping[str, int], conditions: Sequence[Any], bounds: Mapping[str, Bounds]
) -> dict[str, int] | None:
    """Returns larger sizes, if the example's sizes make a size inside the member 1 (`H // 32 == 1`).

    torch.export takes such a 1 for a constant. Returns None if no size inside the member is 1, or if the
    bounds allow no larger sizes. conditions: those of the export, as expressions.
    """
    ones = [
        e for e in conditions if isinstance(e, list) and e[0] == "eq" and 1 in e[1:] and guards.letters(e)
    ]
    if not ones:
        return None
    larger = dict(sizes)
    for _ in range(_DOUBLINGS):
        tight = {d for e in ones if guards.holds(e, larger) for d in guards.letters(e)}
        if not tight:
            return larger
        doubled = {
            d: 2 * n if d in tight and 2 * n <= (bounds.get(d, (1, None))[1] or 2 * n) else n
            for d, n in larger.items()
        }
        if doubled == larger:
            return None
        larger = doubled
    return None


def from_specs(
    specs: Sequence[InputSpec], sizes: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """Returns drawn keyword inputs, and the letters of their dynamic axes."""
    sources = {s.name: InputSource(s.name, type_text(s), s.low, s.high) for s in specs}
    values = {name: draw(source, sizes, 1 + i) for i, (name, source) in enumerate(sources.items())}
    axes = {s.name: {i: str(d) for i, d in enumerate(s.dims) if not isinstance(d, int)} for s in specs}
    return values, axes


def default_axes(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the letters of a sample: axis 0 of every tensor is the batch B.

    If the sizes there differ, only tensors with the size of the first tensor have a batch.
    """
    first = next(
        (x for x in pytree.tree_leaves((list(args), dict(kwargs))) if isinstance(x, torch.Tensor) and x.ndim),
        None,
    )
    if first is None:
        return {}

    def axes(x: Any) -> Any:
        return {0: "B"} if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == first.shape[0] else None

    return {n: pytree.tree_map(axes, v) for n, v in {**dict(zip(names, args)), **kwargs}.items()}
