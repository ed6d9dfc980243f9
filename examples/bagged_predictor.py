"""A bagged classifier, as AutoML tools fit it: K folds of one model, trained at once and run at once.

    bag = BaggedPredictor(lambda: Net(columns=20), folds=8).fit(X, y)
    accuracy_score(y, bag.classes_[bag.oof_proba_.argmax(1)])  # each row by the member that did not see it

    bag.persist("bag.wide")  # from here on the artifact predicts
    bag.predict_proba(X)     # the mean of the eight members, in one call

In a service, `widepack.load("bag.wide").mean(x, of="softmax")` answers the same without this class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import StratifiedKFold
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

import widepack


def to_tensor(X: Any) -> Tensor:
    """Returns the rows of a table of numbers as a tensor, [rows, columns]."""
    return torch.as_tensor(np.asarray(X), dtype=torch.get_default_dtype())


class BaggedPredictor(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Trains a model for each fold, on the rows outside of it. model: makes one, which answers logits."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        folds: int = 8,
        epochs: int = 50,
        batch_size: int = 128,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> None:
        self.model, self.folds, self.epochs = model, folds, epochs
        self.batch_size, self.lr, self.seed = batch_size, lr, seed

    def fit(self, X: Any, y: Any) -> BaggedPredictor:
        """Trains all members in one loop, and keeps the out-of-fold probabilities in `oof_proba_`."""
        x = to_tensor(X)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        labels = torch.as_tensor(numbers)
        self.fold_of_row_ = torch.empty(len(x), dtype=torch.long)
        parts = StratifiedKFold(self.folds, shuffle=True, random_state=self.seed).split(X, y)
        for fold, (_, held_out) in enumerate(parts):
            self.fold_of_row_[held_out] = fold
        self.fused_ = widepack.fuse(self.model, x[: self.batch_size], n=self.folds).train()
        optimizer = torch.optim.AdamW(self.fused_.parameters(), self.lr)
        for rows in self.batches():
            logits = self.fused_.each(x[rows])  # [folds, batch, classes]
            losses = self.fused_.losses(nn.functional.cross_entropy, logits, widepack.each(labels[rows]))
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
        self.members_: Any = self.fused_.eval()
        self.oof_proba_ = self.probabilities(x)[self.fold_of_row_, torch.arange(len(x))].numpy()
        return self

    def batches(self) -> Iterator[Tensor]:
        """Yields the rows of each step, [folds, batch]. Each member has its own order of its own rows."""
        held_out = torch.arange(self.folds).unsqueeze(1) == self.fold_of_row_  # [folds, rows]
        count = int((~held_out).sum(1).min())
        size = min(self.batch_size, count)
        draw = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epochs):
            order = torch.rand(held_out.shape, generator=draw).masked_fill(held_out, 2).argsort(1)
            yield from order[:, : count - count % size].split(size, 1)

    def persist(self, artifact: str, **options: Any) -> BaggedPredictor:
        """Writes the artifact, and predicts with it from here on. options: those of `Fused.save`."""
        check_is_fitted(self)
        self.fused_.save(artifact, **options)
        self.members_ = widepack.load(artifact)
        return self

    def probabilities(self, x: Tensor) -> Tensor:
        """Returns the answers of all members, [folds, rows, classes]."""
        with torch.inference_mode():
            return torch.cat([self.members_(part).softmax(-1) for part in x.split(4096)], 1)

    def predict_proba(self, X: Any) -> Any:
        """Returns the mean of the members' probabilities, [rows, classes]."""
        check_is_fitted(self)
        return self.probabilities(to_tensor(X)).mean(0).numpy()

    def predict(self, X: Any) -> Any:
        """Returns the most probable class of each row."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]
