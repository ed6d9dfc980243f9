"""Tests the callback for Lightning: the last run writes an artifact of the best weights of all runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import widepack

lightning = pytest.importorskip("pytorch_lightning")

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    # Lightning makes the leaves of its trees with a class that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
RUNS = 3
OPTIONS: dict[str, Any] = {"inputs": ["x=float32[B,8]"], "targets": ("cpu",), "pt2": False}


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # Any, if it is not installed
    """A network, and weights of the classes, which only the loss reads."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
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


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("lightning_artifact").EnsembleArtifact
    del sys.modules["lightning_artifact"]


def train(callback: Any, folder: Path, run: int, seed: int, **options: Any) -> tuple[Any, str]:
    """Trains one run. Returns its module after the last epoch, and the path of its best checkpoint."""
    torch.manual_seed(seed)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)
    best = lightning.callbacks.ModelCheckpoint(folder / f"seed{seed}", monitor="val_loss")
    ensemble = callback(str(folder / "ens.wide"), run=run, runs=RUNS, **{**OPTIONS, **options})
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[ensemble, best],
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=2,
    )
    module = Classifier()
    trainer.fit(module, loader, loader)
    return module, best.best_model_path


def in_float64(path: str, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = Classifier.load_from_checkpoint(path).double().eval()(x.double())
    return out


def test_the_last_run_writes_the_best_weights_of_all(callback: Any, tmp_path: Path) -> None:
    runs = []
    for i in range(RUNS):
        assert not (tmp_path / "ens.wide").exists()
        runs.append(train(callback, tmp_path, i, seed=i))
    ens = widepack.load(tmp_path / "ens.wide")
    assert list(ens.members) == ["run0", "run1", "run2"]
    x = torch.randn(5, 8)
    truth = torch.stack([in_float64(path, x) for _, path in runs])
    torch.testing.assert_close(ens(x).double(), truth, rtol=1e-5, atol=1e-5)
    for i, (module, _) in enumerate(runs):
        assert not torch.allclose(ens(x)[i], module.eval()(x), atol=0.1)  # the last epoch moved the weights

    _, again = train(callback, tmp_path, 1, seed=9)
    truth[1] = in_float64(again, x)
    torch.testing.assert_close(widepack.load(tmp_path / "ens.wide")(x).double(), truth, rtol=1e-5, atol=1e-5)


def test_the_first_run_finds_a_wrong_option(callback: Any, tmp_path: Path) -> None:
    with pytest.raises(widepack.CaptureError, match="x"):
        train(callback, tmp_path, 0, seed=0, inputs=["x=float32[B,7]"])
    with pytest.raises(ValueError, match="run=3, but 3 runs have the numbers 0 to 2"):
        callback("ens.wide", run=3, runs=3)
