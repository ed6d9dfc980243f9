"""Sums up the answers of some of the members, for figures of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .block import Block, entropies, squared
from .positions import BLOCK, blocks
from .precision import wide
from .stream import StreamedSums

BY_CLASS = frozenset({"counts", "entropy", "expected_entropy"})
"""What is computed over the classes of an answer."""


def add_answers(
    sums: StreamedSums, answers: torch.Tensor, weights: Sequence[float], most: int = BLOCK
) -> None:
    """Sums up the answers of several members at one time: block after block, as `reduced` reads them.

    Args:
        sums: What is summed up; empty before.
        answers: `[n, ...]`, at least one member.
        weights: The weight of each, above 0; all 1 where members count the same.
        most: The numbers in a block.
    """
    by_class = (sums.of == "softmax" or bool(sums.reads & BY_CLASS)) and sums.of != "sigmoid"
    whole = sums.dim + 1 if by_class else None
    places = list(blocks(answers.shape, whole, most * torch.get_num_threads()))
    found: dict[str, torch.Tensor] = {}
    for place in places:
        for name, part in _of_block(sums, wide(answers[place]), weights).items():
            if len(places) == 1:
                found[name] = part
                continue
            lost = name == "expected_entropy" and by_class
            at = tuple(s for d, s in enumerate(place) if d and not (lost and d == whole))
            if name not in found:
                shape = [n for d, n in enumerate(answers.shape) if d and not (lost and d == whole)]
                found[name] = part.new_empty(shape)
            found[name][at] = part
    sums.put(found, len(weights), float(sum(weights)))
    sums.dtype = wide(answers[:0]).dtype


def _of_block(sums: StreamedSums, answers: torch.Tensor, weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Returns the sums of a block by name."""
    given = None if sums.equal else torch.tensor(weights, dtype=_real(answers.dtype), device=answers.device)
    block = Block(answers, sums.of, sums.dim, given)
    total = _total(given)
    found = {}
    if sums.reads & {"mean", "entropy"}:
        found["mean"] = total(block.values)
    if "var" in sums.reads:
        first = block.values[0]
        distances = block.values - first
        shift = total(distances) / float(sum(weights))
        found["first"], found["shift"] = first.clone(), shift
        found["squares"] = total(squared(distances - shift))
    if "expected_entropy" in sums.reads:
        found["expected_entropy"] = total(entropies(block.values, sums.of, sums.dim + 1))
    if "counts" in sums.reads:
        found["counts"] = block.counts
    if "least" in sums.reads:
        found["least"] = block.least
    if "greatest" in sums.reads:
        found["greatest"] = block.greatest
    return found


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _total(weights: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that sums `[n, ...]` over members."""

    def total(values: torch.Tensor) -> torch.Tensor:
        if weights is None:
            return values.sum(0)
        found: torch.Tensor = torch.tensordot(weights.to(values.dtype), values, 1)
        return found

    return total
