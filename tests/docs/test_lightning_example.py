"""Tests the callback for Lightning: the last run writes an artifact of the best weights of all runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import widepack

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    # Lightning makes the leaves of its trees with a class that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # On machines with more cores or a GPU, Lightning advises to use them.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:GPU available but not used:UserWarning"),
]
RUNS = 3
OPTIONS: dict[str, Any] = {"inputs": ["x=float32[B,8]"], "targets": ("cpu",), "pt2": False}


@pytest.fixture(scope="module")
def lightning() -> Any:
    return pytest.importorskip("pytorch_lightning")  # here, since it takes seconds


@pytest.fixture(scope="module")
def classifier(lightning: Any) -> Any:
    class Classifier(lightning.LightningModule):  # type: ignore[misc]  # of type Any
        """A network, and weights of the classes, which only the loss reads."""

        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            norm = nn.BatchNorm1d(width)
            self.net = nn.Sequential(nn.Linear(8, width), norm, nn.ReLU(), nn.Linear(width, 3))
            self.loss = nn.CrossEntropyLoss(torch.rand(3) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = 2 * self.net(x)
            return out

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.loss(self(batch[0]), batch[1])
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            self.log("val_loss", float(self.current_epoch))  # so the best weights are not the last

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.05)

    return Classifier


@pytest.fixture
def callback(lightning: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("lightning_artifact").EnsembleArtifact
    del sys.modules["lightning_artifact"]


@pytest.fixture
def train(lightning: Any, classifier: Any, callback: Any, tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    """Returns a function that trains one run.

    It returns the module after the last epoch, and the path of the best checkpoint.
    """

    def train_run(run: int, seed: int, settings: Any = None, **options: Any) -> tuple[Any, str]:
        torch.manual_seed(seed)
        x = torch.randn(64, 8)
        loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)
        best = lightning.callbacks.ModelCheckpoint(tmp_path / f"seed{seed}", monitor="val_loss")
        ensemble = callback(str(tmp_path / "ens.wide"), run=run, runs=RUNS, **{**OPTIONS, **options})
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[ensemble, best],
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            max_epochs=2,
            **(settings or {}),
        )
        module = classifier()
        trainer.fit(module, loader, loader)
        return module, best.best_model_path

    return train_run


def in_float64(classifier: Any, path: str, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = classifier.load_from_checkpoint(path).double().eval()(x.double())
    return out


@pytest.mark.extended
def test_the_last_run_writes_the_best_weights_of_all(train: Any, classifier: Any, tmp_path: Path) -> None:
    runs = []
    for i in range(RUNS):
        assert not (tmp_path / "ens.wide").exists()
        runs.append(train(i, seed=i))
    ens = widepack.load(tmp_path / "ens.wide")
    assert list(ens.members) == ["run0", "run1", "run2"]
    x = torch.randn(5, 8)
    truth = torch.stack([in_float64(classifier, path, x) for _, path in runs])
    torch.testing.assert_close(ens(x).double(), truth, rtol=1e-5, atol=1e-5)
    for i, (module, _) in enumerate(runs):
        assert not torch.allclose(ens(x)[i], module.eval()(x), atol=0.1)  # the last epoch moved the weights

    _, again = train(1, seed=9)
    truth[1] = in_float64(classifier, again, x)
    ens = widepack.load(tmp_path / "ens.wide")
    torch.testing.assert_close(ens(x).double(), truth, rtol=1e-5, atol=1e-5)


def test_the_first_run_finds_a_wrong_option(train: Any) -> None:
    with pytest.raises(widepack.CaptureError, match="Classifier fails on the example"):
        train(0, seed=0, inputs=["x=float32[B,7]"])


def test_runs_without_a_checkpoint(train: Any, tmp_path: Path) -> None:
    train(0, seed=0, settings={"fast_dev_run": True})
    assert not (tmp_path / "ens.wide.runs").exists()
    with pytest.raises(RuntimeError, match="run1 has no checkpoint: give the Trainer a ModelCheckpoint"):
        train(1, seed=0, settings={"limit_train_batches": 0})
    with pytest.raises(ValueError, match="run=3, but 3 runs have the numbers 0 to 2"):
        train(3, seed=0)


def test_runs_that_end_at_once_wait_for_each_other(callback: Any, classifier: Any, tmp_path: Path) -> None:
    def end(run: int) -> None:
        trainer = SimpleNamespace(
            fast_dev_run=False,
            is_global_zero=True,
            checkpoint_callback=SimpleNamespace(best_model_path=str(tmp_path / f"{run}.ckpt")),
        )
        callback(str(tmp_path / "ens.wide"), run=run, runs=2, **OPTIONS).on_fit_end(trainer, modules[run])

    modules = [classifier() for _ in range(2)]
    for i, module in enumerate(modules):
        torch.save({"state_dict": module.state_dict()}, tmp_path / f"{i}.ckpt")
        end(i)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(end, range(2)))  # raises what a run raises
    x = torch.randn(5, 8)
    truth = torch.stack([m.eval().double()(x.double()) for m in modules]).detach()
    torch.testing.assert_close(widepack.load(tmp_path / "ens.wide")(x).double(), truth, rtol=1e-5, atol=1e-5)
