"""Makes the ensembles of the tests of evaluations: of digits, and of a regression."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded import built
from safetensors.torch import save_file
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

MEMBERS = 5


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def trained(x: Tensor, y: Tensor, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = net(x.shape[1], outputs)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    loss: Any = nn.functional.cross_entropy if outputs > 1 else nn.functional.mse_loss
    for _ in range(25):
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
    return module.eval()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """Returns an artifact, a file, the members' probabilities [N, R, C] and the targets."""
    folder = tmp_path_factory.mktemp("digits")
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    nets = [trained(x[:300], y[:300], 10, i) for i in range(MEMBERS)]
    out = built(folder, partial(net, 64, 10), nets, "input=float32[B,64]")
    x, y = x[300:900].clone(), y[300:900].clone()
    save_file({"input": x, "y": y}, folder / "test.safetensors")
    with torch.no_grad():
        p = torch.stack([n.double()(x.double()).softmax(1) for n in nets]).numpy()
    return out, folder / "test.safetensors", p, y.numpy()


@pytest.fixture(scope="session")
def diabetes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, np.ndarray, np.ndarray]:
    """Returns an artifact, a file, the members' numbers [N, R] and the targets."""
    folder = tmp_path_factory.mktemp("diabetes")
    data = load_diabetes()
    x = torch.tensor(data.data, dtype=torch.float32) * 20
    y = torch.tensor(data.target, dtype=torch.float32).unsqueeze(1) / 100
    nets = [trained(x[:200], y[:200], 1, i) for i in range(MEMBERS)]
    out = built(folder, partial(net, 10, 1), nets, "input=float32[B,10]")
    x, y = x[200:].clone(), y[200:].clone()
    save_file({"input": x, "y": y}, folder / "test.safetensors")
    with torch.no_grad():
        found = torch.stack([n.double()(x.double()) for n in nets]).numpy()[:, :, 0]
    return out, folder / "test.safetensors", found, y.numpy()[:, 0].astype(np.float64)
