"""Tests the example for skorch: the artifact of fitted nets answers the mean of their `predict_proba`."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.ensemble import BaggingClassifier, VotingClassifier
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

skorch = pytest.importorskip("skorch")

EXAMPLES = Path(__file__).parents[2] / "examples"
FAST = {"pt2": False}


class Table(nn.Module):
    """A small network. last: applied to the scores."""

    def __init__(self, outputs: int = 3, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, outputs)
        self.last = last or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.head(self.body(x)))
        return out


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("skorch_artifact")
    del sys.modules["skorch_artifact"]


def rows_and_labels(classes: int = 3) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = make_classification(120, 8, n_informative=5, n_classes=classes, random_state=0)
    return x.astype("float32"), y.astype("int64")


def classifier(**options: Any) -> Any:
    return skorch.NeuralNetClassifier(
        Table, max_epochs=10, lr=0.1, batch_size=32, verbose=0, train_split=None, **options
    )


def in_float64(net: Any, X: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the probabilities of one net of classes, computed in float64."""
    with torch.no_grad():
        scores = copy.deepcopy(net.module_).double().eval()(torch.as_tensor(X).double())
    answer: np.ndarray[Any, Any] = (scores if net.criterion is nn.NLLLoss else scores.softmax(-1)).numpy()
    return answer


@pytest.mark.extended
def test_the_nets_of_a_cross_validation(example: ModuleType, tmp_path: Path) -> None:
    X, y = rows_and_labels()
    torch.manual_seed(0)
    net = classifier(criterion=nn.CrossEntropyLoss)
    nets = cross_validate(net, X, y, cv=3, return_estimator=True)["estimator"]
    example.write_artifact(nets, str(tmp_path / "nets.wide"), X, **FAST)

    ensemble = example.ArtifactClassifier(str(tmp_path / "nets.wide"), batch_size=50)  # three calls
    mean = np.mean([n.predict_proba(X) for n in nets], 0)
    assert not np.allclose(mean, nets[0].predict_proba(X), atol=0.01)
    np.testing.assert_allclose(ensemble.predict_proba(X), mean, rtol=1e-5, atol=1e-6)
    truth = np.mean([in_float64(n, X) for n in nets], 0)
    np.testing.assert_allclose(ensemble.predict_proba(X), truth, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ensemble.predict(X), truth.argmax(1))
    assert ensemble.score(X, y) > 0.5
    for i, n in enumerate(nets):
        np.testing.assert_allclose(ensemble.ens(X)[i].numpy(), in_float64(n, X), rtol=1e-5, atol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["bagging", "voting"])
def test_the_nets_of_an_ensemble_of_scikit_learn(kind: str, example: ModuleType, tmp_path: Path) -> None:
    X, y = rows_and_labels()
    torch.manual_seed(0)
    net = classifier(criterion=nn.NLLLoss, module__last=nn.Softmax(-1))
    if kind == "bagging":
        ensemble = BaggingClassifier(net, n_estimators=3, random_state=0).fit(X, y)
    else:
        ensemble = VotingClassifier([(f"net{i}", net) for i in range(3)], voting="soft").fit(X, y)
    example.write_artifact(ensemble.estimators_, str(tmp_path / "nets.wide"), X, **FAST)
    answers = example.ArtifactClassifier(str(tmp_path / "nets.wide")).predict_proba(X)
    np.testing.assert_allclose(answers, ensemble.predict_proba(X), rtol=1e-5, atol=1e-6)
    truth = np.mean([in_float64(n, X) for n in ensemble.estimators_], 0)
    np.testing.assert_allclose(answers, truth, rtol=1e-5, atol=1e-6)


def test_the_nets_of_two_classes(example: ModuleType, tmp_path: Path) -> None:
    X, y = rows_and_labels(classes=2)
    torch.manual_seed(0)
    net = skorch.NeuralNetBinaryClassifier(
        Table, module__outputs=1, max_epochs=10, lr=0.1, batch_size=32, verbose=0, train_split=None
    )
    nets = cross_validate(net, X, y.astype("float32"), cv=2, return_estimator=True)["estimator"]
    example.write_artifact(nets, str(tmp_path / "nets.wide"), X, **FAST)
    answers = example.ArtifactClassifier(str(tmp_path / "nets.wide")).predict_proba(X)
    assert answers.shape == (120, 2)
    np.testing.assert_allclose(answers, np.mean([n.predict_proba(X) for n in nets], 0), rtol=1e-5, atol=1e-6)


def test_what_is_no_fitted_net_is_refused(example: ModuleType, tmp_path: Path) -> None:
    X, y = rows_and_labels()
    out = tmp_path / "nets.wide"
    net = classifier(criterion=nn.CrossEntropyLoss)
    fitted = classifier(criterion=nn.CrossEntropyLoss).fit(X, y)
    with pytest.raises(TypeError, match="net 1 is a Pipeline"):
        example.write_artifact([fitted, make_pipeline(StandardScaler(), net)], str(out), X)
    odd = classifier(criterion=nn.CrossEntropyLoss, predict_nonlinearity=torch.sigmoid).fit(X, y)
    with pytest.raises(ValueError, match="net 0: .*predict_proba"):
        example.write_artifact([odd], str(out), X)
    odd = skorch.NeuralNetBinaryClassifier(
        Table, module__outputs=1, module__last=nn.Sigmoid(), criterion=nn.BCELoss, verbose=0, max_epochs=1
    ).fit(X, (y > 0).astype("float32"))
    with pytest.raises(ValueError, match="net 0: .*predict_proba"):
        example.write_artifact([odd], str(out), X)
    with pytest.raises(skorch.exceptions.NotInitializedError):
        example.write_artifact([net], str(out), X)
    assert not out.exists()
