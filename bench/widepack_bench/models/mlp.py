"""Multilayer perceptrons."""

from __future__ import annotations

from torch import nn


def mlp(inputs: int = 64, width: int = 128, outputs: int = 64) -> nn.Module:
    """One hidden layer: [B, inputs] -> [B, outputs]."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def deep(inputs: int = 64, width: int = 256, depth: int = 8, outputs: int = 10) -> nn.Module:
    """`depth` hidden layers: [B, inputs] -> [B, outputs]."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width if i else inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def tabular(inputs: int = 64, width: int = 512, depth: int = 3, outputs: int = 1) -> nn.Module:
    """`depth` hidden layers, each with a batch norm, for rows of a table: [B, inputs] -> [B, outputs]."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [nn.Linear(width if i else inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))
