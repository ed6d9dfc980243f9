"""Writes an artifact of fitted nets of skorch, and predicts with it.

    net = NeuralNetClassifier(Net, criterion=nn.CrossEntropyLoss)
    folds = cross_validate(net, X, y, return_estimator=True)["estimator"]
    write_artifact(folds, "nets.wide", X)  # or bagging.estimators_, or voting.estimators_

    nets = ArtifactClassifier("nets.wide")  # needs no code of Net
    nets.predict_proba(X)                   # the mean of the nets' predict_proba, in one call

A member of the artifact answers what its net's `predict_proba` answers. All members get all columns of X.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from skorch import NeuralNet
from torch import Tensor, nn

import widepack


class TwoClasses(nn.Module):
    """Turns a logit for each row, [B] or [B, 1], into the probabilities of two classes, [B, 2]."""

    def forward(self, logit: Tensor) -> Tensor:
        p = logit.flatten().sigmoid()
        return torch.stack((1 - p, p), 1)


def member_of(net: NeuralNet) -> nn.Module:
    """Returns a net's module, followed by what skorch applies to its output for the net's criterion."""
    last: nn.Module = nn.Identity()
    if isinstance(net.criterion_, nn.CrossEntropyLoss):
        last = nn.Softmax(-1)
    elif isinstance(net.criterion_, nn.BCEWithLogitsLoss):
        last = TwoClasses()
    return nn.Sequential(copy.deepcopy(net.module_).cpu(), last).eval()


def write_artifact(nets: Sequence[NeuralNet], artifact: str, X: Any, **options: Any) -> widepack.BuildReport:
    """Writes an artifact of fitted nets, and compares each with its member before.

    X: an array of rows of their inputs. options: those of `Fused.save`.
    """
    rows, members = X[:64], []
    for i, net in enumerate(nets):
        if not isinstance(net, NeuralNet):
            raise TypeError(f"net {i} is a {type(net).__name__}; give fitted nets of skorch")
        net.check_is_fitted()
        members.append(member_of(net))
        with torch.no_grad():
            answer = members[i](torch.as_tensor(rows)).numpy()
        own = net.predict_proba(rows)
        if answer.shape != own.shape or not np.allclose(answer, own, rtol=1e-4, atol=1e-6):
            raise ValueError(f"net {i}: its predict_proba is not that of its criterion; extend member_of")
    return widepack.fuse(members, torch.as_tensor(rows)).save(artifact, **options)


class ArtifactClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A classifier of scikit-learn that answers for all nets of an artifact."""

    def __init__(self, artifact: str, batch_size: int = 1024) -> None:
        self.artifact, self.batch_size = artifact, batch_size
        self.ens = widepack.load(artifact)

    def predict_proba(self, X: Any) -> Any:
        """Returns the mean of the nets' probabilities, [rows, classes]."""
        starts = range(0, len(X), self.batch_size)
        return np.concatenate([self.ens.mean(X[i : i + self.batch_size]).numpy() for i in starts])

    def predict(self, X: Any) -> Any:
        """Returns the number of the most probable class for each row, as the nets do."""
        return self.predict_proba(X).argmax(1)
