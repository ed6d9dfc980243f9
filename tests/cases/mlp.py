"""A multilayer perceptron for tabular data: Linear, GELU, dropout."""

from typing import Any

import torch
from torch import nn

from . import generator, trained

N = 8
RECURRENT = False
INPUTS = ["input=float32[B,64]"]


def model(width: int = 128, depth: int = 3, classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width if i else 64, width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def sample(batch: int, seed: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 64, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 100 + i)
