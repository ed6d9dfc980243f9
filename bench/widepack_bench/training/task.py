"""What is trained: the members, their data and their loss. Random weights and random labels."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..models.factory import factory_of
from ..models.weights import states
from .networks import CLASSES, TrainingNetwork

RATE = 1e-3  # the learning rate of AdamW


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """N members in train mode, and one batch.

    modules: the members; `fresh_modules` copies them. x and labels: `[B, ...]` for all members; with `each`,
    `[N, B, ...]`.
    """

    modules: list[nn.Module]
    x: Tensor
    labels: Tensor
    each: bool

    def fresh_modules(self) -> list[nn.Module]:
        """Returns copies of the members, with their weights at the start."""
        return [copy.deepcopy(m) for m in self.modules]

    def data(self, i: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs and labels of member `i`."""
        return (self.x[i], self.labels[i]) if self.each else (self.x, self.labels)

    def loss_of_all(self, y: Tensor) -> Tensor:
        """Returns the loss of each member, `[N]`. y: the answers of all members, `[N, B, classes]`."""
        labels = self.labels if self.each else self.labels.expand(len(self.modules), -1)
        losses = cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view(len(self.modules), -1).mean(1)


def task_of(network: TrainingNetwork, members: int, each: bool) -> TrainingTask:
    """Returns the task of a network. each: whether each member has its own batch."""
    make = partial(factory_of(network.model), **network.options)
    modules = []
    for state in states(make, members):
        module = make()
        module.load_state_dict(state)
        modules.append(module.train())
    generator = torch.Generator().manual_seed(11)
    rows = (members, network.batch) if each else (network.batch,)
    x = torch.randn(*rows, *network.sample, generator=generator)
    return TrainingTask(modules, x, torch.randint(0, CLASSES, rows, generator=generator), each)
