"""Selects members greedily, with replacement (Caruana, Niculescu-Mizil, Crew and Ksikes, 2004).

Each round adds the member that makes the mean of all added ones best. A member may be added several times:
how often is its weight. The rounds up to the best one count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .losses import Loss, means


class Selected(NamedTuple):
    """What was selected.

    counts: how often each member was added. order: the selected members, as they were added first. losses: of
    the weighted mean of their predictions.
    """

    counts: list[int]
    order: list[int]
    losses: tuple[float, ...]

    @property
    def weights(self) -> list[float]:
        """The weight of each member; they sum up to 1."""
        total = sum(self.counts)
        return [count / total for count in self.counts]


def select_members(
    predictions: Tensor, targets: Tensor, losses: tuple[Loss, ...], rounds: int, most: int | None = None
) -> Selected:
    """Selects members.

    Args:
        predictions: Of all members, [N, R, ...].
        targets: Of the rows.
        losses: The first is minimised; the others decide where it is equal.
        rounds: How many members are added at most.
        most: How many different members are selected at most; None for any number.

    Returns: the members of the best round.
    """
    total = torch.zeros_like(predictions[0])
    counts, order = [0] * len(predictions), list[int]()
    best: Selected | None = None
    for done in range(1, rounds + 1):
        allowed = range(len(predictions)) if most is None or len(order) < most else order
        tried = [(means(losses, (total + predictions[i]) / done, targets), i) for i in allowed]
        value, chosen = min(tried)
        total += predictions[chosen]
        counts[chosen] += 1
        if chosen not in order:
            order.append(chosen)
        if best is None or value < best.losses:
            best = Selected(list(counts), list(order), value)
    assert best is not None  # there is one round at least
    return best
