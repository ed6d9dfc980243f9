"""Divides the positions of answers into blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod

Place = tuple[slice, ...]

BLOCK = 2**17
"""Numbers of all members in one block: 512 kB of float32."""


def blocks(shape: Sequence[int], whole: int | None, most: int = BLOCK) -> Iterator[Place]:
    """Yields the places of blocks that cover answers, each place once.

    Args:
        shape: Of the answers, members first.
        whole: A dim that stays whole, beside the first.
        most: The numbers in a block; more where the dims that stay whole have more.
    """
    parts = [1] * len(shape)  # how many parts each dim is divided into
    size = prod(shape)
    for dim, length in enumerate(shape):
        if dim in (0, whole) or size <= most:
            continue
        parts[dim] = min(length, ceil(size / most))
        size = ceil(size / parts[dim])
    yield from _places(shape, parts, ())


def _places(shape: Sequence[int], parts: Sequence[int], before: Place) -> Iterator[Place]:
    if len(before) == len(shape):
        yield before
        return
    length, count = shape[len(before)], parts[len(before)]
    step = ceil(length / count) if length else 1
    for start in range(0, max(length, 1), step):
        yield from _places(shape, parts, (*before, slice(start, min(start + step, length))))
