"""Keeps the weights that each member of a fused module had at its best score: `widepack.BestMembers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError
from ..optim.rates import ONE_FOR_ALL

if TYPE_CHECKING:
    from .module import Fused


class BestMembers:
    """Keeps the weights and buffers that each member had at its best score, each from its own epoch.

    Members are counted as they were when they were fused, also after some were removed:
    `fused.original_numbers`. A score of NaN is never the best.

    Args:
        fused: The fused module.
        mode: `min` if a smaller score is better, as for a loss; `max` as for an accuracy. Default: `min`.
        device: Where the weights are kept. Default: the device of the module.

    Attributes:
        scores: The best score of each member.
        waited: For how many updates each member has had no better score.
        states: The state dict that each member had at its best score. A member without a score has none.

    Raises:
        UsageError: `mode` is another word, or a weight that trains is one copy for all members, so that no
            member has weights of its own epoch.

    Example:
        >>> best = widepack.BestMembers(fused)
        >>> best.update([0.31, 0.28, 0.35])  # the validation losses of one epoch
        [0, 1, 2]
        >>> best.restore()
    """

    __module__ = "widepack"

    def __init__(self, fused: Fused, *, mode: str = "min", device: torch.device | str | None = None) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode is {mode!r}; it is min for a loss, or max for an accuracy")
        shared = [
            n for n, p in fused.named_parameters() if p.requires_grad and getattr(p, ONE_FOR_ALL, False)
        ]
        if shared:
            raise UsageError(
                f"{shared[0]} trains and is one copy for all members, so no member has its own best epoch; "
                "keep fused.state_dict() of one epoch for all, or fuse without share"
            )
        self._fused, self._sign, self._device = fused, 1 if mode == "min" else -1, device
        self.scores: dict[int, float] = {}
        self.waited: dict[int, int] = dict.fromkeys(fused.original_numbers, 0)
        self.states: dict[int, dict[str, Any]] = {}

    def update(self, scores: torch.Tensor | Sequence[float]) -> list[int]:
        """Keeps the weights of the members that have a better score than before.

        Args:
            scores: One number for each member that the module has now, in their order.

        Returns:
            The numbers of those members, as they were when they were fused.

        Raises:
            UsageError: There are not as many scores as members.

        Example:
            >>> best = widepack.BestMembers(fused, mode="max")
            >>> best.update([0.81, 0.88, 0.85])
            [0, 1, 2]
        """
        values = scores.tolist() if isinstance(scores, torch.Tensor) else list(scores)
        numbers = self._fused.original_numbers
        if not isinstance(values, list) or len(values) != len(numbers):
            count = len(values) if isinstance(values, list) else "one number"
            raise UsageError(f"update takes one score for each of the {len(numbers)} members; got {count}")
        improved = []
        for i, (number, value) in enumerate(zip(numbers, map(float, values))):
            before = self.scores.get(number, self._sign * math.inf)
            if math.isnan(value) or self._sign * value >= self._sign * before:
                self.waited[number] += 1
                continue
            self.scores[number], self.waited[number] = value, 0
            self.states[number] = self._fused.member(i, self._device).state_dict()
            improved.append(number)
        return improved

    def restore(self) -> None:
        """Gives each member that the module has now the weights and buffers of its best score.

        Members that have had no score stay as they are, and so does the state of an optimizer. A member that
        was removed gets them with `module.load_state_dict(best.states[i])`.

        Example:
            >>> best = widepack.BestMembers(fused)
            >>> improved = best.update(losses)
            >>> best.restore()
        """
        for i, number in enumerate(self._fused.original_numbers):
            if number in self.states:
                self._fused.load_member(i, self.states[number])
