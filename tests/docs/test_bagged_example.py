"""Tests the example of a bagged predictor: its folds train, and answer, as each would alone."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

import widepack

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDS = 3
FAST = {"pt2": False}


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("bagged_predictor").BaggedPredictor
    del sys.modules["bagged_predictor"]


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows_and_labels() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = make_classification(100, 8, n_informative=5, n_classes=3, random_state=0)
    return x, np.array(["ash", "elm", "oak"])[y]


def trained_alone(bag: Any, fresh: list[nn.Module], x: Tensor, y: Tensor) -> list[nn.Module]:
    """Trains each member by itself, on the rows of the predictor's steps."""
    for i, model in enumerate(fresh):
        optimizer = torch.optim.AdamW(model.parameters(), bag.lr)
        for rows in bag.batches():
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[rows[i]]), y[rows[i]]))
            optimizer.step()
    return [model.eval() for model in fresh]


@pytest.mark.extended
@pytest.mark.usefixtures("float64")
def test_members_train_and_answer_as_alone(predictor: Any, tmp_path: Path) -> None:
    X, labels = rows_and_labels()
    fresh: list[nn.Module] = []

    def make() -> nn.Module:
        model = Columns()
        fresh.append(copy.deepcopy(model))
        return model

    torch.manual_seed(0)
    bag = predictor(make, folds=FOLDS, epochs=6, batch_size=16, lr=0.01).fit(X, labels)
    assert len(fresh) == FOLDS
    x, y = torch.as_tensor(X), torch.as_tensor(np.unique(labels, return_inverse=True)[1])
    alone = trained_alone(bag, fresh, x, y)
    with torch.no_grad():
        truth = torch.stack([model(x).softmax(-1) for model in alone]).numpy()
    assert not np.allclose(truth[0], truth[1], atol=0.01)

    own = bag.fold_of_row_.numpy()
    np.testing.assert_allclose(bag.oof_proba_, truth[own, np.arange(len(X))], rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(bag.predict_proba(X), truth.mean(0), rtol=1e-7, atol=1e-9)
    bag.persist(str(tmp_path / "bag.wide"), **FAST)
    np.testing.assert_allclose(bag.predict_proba(X), truth.mean(0), rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(bag.predict(X), np.array(["ash", "elm", "oak"])[truth.mean(0).argmax(1)])
    assert bag.score(X, labels) > 0.6

    served = widepack.load(tmp_path / "bag.wide").mean(X, of="softmax")
    np.testing.assert_allclose(served.numpy(), truth.mean(0), rtol=1e-7, atol=1e-9)


@pytest.mark.extended
def test_no_member_sees_its_held_out_rows(predictor: Any) -> None:
    X, labels = rows_and_labels()
    torch.manual_seed(2)
    bag = predictor(Columns, folds=FOLDS, epochs=2, batch_size=16).fit(X, labels)
    steps = list(bag.batches())
    assert [tuple(rows.shape) for rows in steps] == [(FOLDS, 16)] * 8  # 66 rows of each member make 4 steps
    for i in range(FOLDS):
        seen = torch.cat([rows[i] for rows in steps[:4]])
        assert len(set(seen.tolist())) == len(seen)  # no row twice in an epoch
        assert not (bag.fold_of_row_[seen] == i).any()
    assert bag.fold_of_row_.bincount().tolist() == [34, 33, 33]


def test_float32_members_answer_as_in_float64(predictor: Any, tmp_path: Path) -> None:
    X, labels = rows_and_labels()
    torch.manual_seed(1)
    bag = predictor(Columns, folds=FOLDS, epochs=3, batch_size=16, lr=0.01).fit(X, labels)
    x = torch.as_tensor(X, dtype=torch.float32).double()
    with torch.no_grad():
        members = [model.double().eval()(x).softmax(-1) for model in bag.members_.unfuse()]
    truth = torch.stack(members).mean(0).numpy()
    bag.persist(str(tmp_path / "bag.wide"), **FAST)
    np.testing.assert_allclose(bag.predict_proba(X), truth, rtol=1e-5, atol=1e-6)


def test_a_predictor_that_was_not_fitted_says_so(predictor: Any) -> None:
    with pytest.raises(NotFittedError, match="BaggedPredictor"):
        predictor(Columns).predict_proba(np.zeros((2, 8)))


def test_a_batch_may_be_one_row(predictor: Any) -> None:
    X, labels = rows_and_labels()
    bag = predictor(lambda: nn.Linear(8, 3), folds=2, epochs=1, batch_size=1).fit(X, labels)
    assert bag.oof_proba_.shape == (100, 3)
