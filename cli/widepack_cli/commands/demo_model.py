"""A small classifier of handwritten digits (8 x 8 pixels, from scikit-learn): the model of `widepack demo`.

Run as a script it trains one classifier for each seed from 0 and writes their checkpoints:

    python demo_model.py FOLDER [COUNT]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

EPOCHS = 30


class Digits(nn.Module):
    """64 pixels -> 10 logits."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # [B, 64] -> [B, 10]
        out: Tensor = self.head(self.body(x))
        return out


def make(width: int = 128) -> nn.Module:
    """Makes a classifier with fresh weights; `--model` names this function."""
    return Digits(width)


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels: the same halves whatever the seed. Raises:
    ImportError without scikit-learn.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[:600], order[600:]
    return x[train], y[train], x[test], y[test]


def train(seed: int, x: Tensor, y: Tensor) -> nn.Module:
    """Trains one classifier. The seed decides its first weights, the order of its batches, and dropout."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).chunk(len(x) // 64):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    return model.eval()


def main(folder: str, count: int = 8) -> None:
    """Trains `count` classifiers and writes their state dicts to `folder`."""
    torch.set_num_threads(1)  # fastest for a model of this size
    x, y, test_x, test_y = data()
    Path(folder).mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        model = train(seed, x, y)
        with torch.inference_mode():
            right = (model(test_x).argmax(1) == test_y).float().mean().item()
        path = Path(folder) / f"seed{seed}.pt"
        torch.save(model.state_dict(), path)
        print(f"{path}: accuracy on {len(test_y)} test images {right:.2%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
