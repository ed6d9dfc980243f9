"""Fits the threshold of a cascade, and measures what it costs and saves.

A cascade runs a few members on all rows. Rows whose largest mean probability reaches the threshold are done;
the next members run on the others. The threshold is the one that runs fewest members while the loss is at
most what is allowed over that of all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..inference.cascade import confidence, stages_from
from .losses import Loss

FOLDS = 5
_THRESHOLDS = 256  # that are tried for each number of first members


@dataclass(frozen=True)
class CascadeFit:
    """A fitted cascade.

    stages: the numbers of members that have run after each stage. until: the threshold. loss: of its answers.
    calls: the mean number of members that run for a row.
    """

    stages: tuple[int, ...]
    until: float
    loss: float
    calls: float


class CascadeData:
    """The predictions from which a cascade is fitted.

    Args:
        predictions: Of the members in the order of the cascade, [K, R, C, ...].
        targets: Of the rows.
        weights: Of the members.
        loss: Of each row.
    """

    def __init__(self, predictions: Tensor, targets: Tensor, weights: Sequence[float], loss: Loss) -> None:
        scale = torch.tensor(weights, dtype=predictions.dtype)
        total = torch.zeros_like(predictions[0])
        losses, sure = [], []
        for k in range(len(predictions)):
            total = total + predictions[k] * scale[k]
            mean = total / scale[: k + 1].sum()
            losses.append(loss(mean, targets))
            sure.append(confidence(mean))
        self.losses, self.sure = torch.stack(losses), torch.stack(sure)  # [K, R]

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.losses)

    def measured(self, stages: Sequence[int], until: float, rows: Tensor) -> tuple[float, float]:
        """Returns the mean loss of a cascade over some rows, and the mean number of members."""
        at = torch.tensor([s - 1 for s in stages])
        sure = self.sure[at][:, rows] >= until
        sure[-1] = True  # the last stage answers whatever is left
        stopped = sure.int().argmax(0)
        losses = self.losses[at][:, rows].gather(0, stopped.unsqueeze(0))
        return float(losses.mean()), float(torch.tensor(stages, dtype=torch.float64)[stopped].mean())

    def fit(self, allowed: float, rows: Tensor, first: int | None = None) -> CascadeFit:
        """Returns the cascade that runs fewest members.

        Args:
            allowed: How much larger its loss may be than that of all members.
            rows: The rows that it is fitted on.
            first: The number of members of the first stage; None to choose it.
        """
        everything = float(self.losses[-1][rows].mean())
        best = CascadeFit((self.members,), 1.0, everything, float(self.members))
        firsts = range(1, self.members) if first is None else [min(first, self.members)]
        for count in firsts:
            stages = stages_from(count, self.members)
            for until in self._thresholds(stages, rows):
                loss, calls = self.measured(stages, until, rows)
                if loss - everything <= allowed and (calls, loss) < (best.calls, best.loss):
                    best = CascadeFit(stages, until, loss, calls)
        return best

    def _thresholds(self, stages: Sequence[int], rows: Tensor) -> list[float]:
        sure = self.sure[torch.tensor([s - 1 for s in stages[:-1]], dtype=torch.long)][:, rows]
        if not sure.numel():
            return []
        levels = torch.linspace(0, 1, _THRESHOLDS, dtype=torch.float64)
        return sorted(set(torch.quantile(sure.double().flatten(), levels).tolist()))

    def held_out(self, allowed: float, first: int | None = None) -> tuple[float, float, float]:
        """Returns the mean loss and the mean number of members over rows that a cascade was not fitted on,
        and the loss of all members over them. Each of `FOLDS` parts of the rows is left out once.
        """
        rows = torch.randperm(self.losses.shape[1], generator=torch.Generator().manual_seed(0))
        parts = [part for part in rows.chunk(FOLDS) if len(part)]
        sums, count = [0.0, 0.0, 0.0], 0
        for k, part in enumerate(parts):
            others = torch.cat([p for j, p in enumerate(parts) if j != k] or [part])
            fit = self.fit(allowed, others, first)
            loss, calls = self.measured(fit.stages, fit.until, part)
            for j, value in enumerate((loss, calls, float(self.losses[-1][part].mean()))):
                sums[j] += value * len(part)
            count += len(part)
        return sums[0] / count, sums[1] / count, sums[2] / count
