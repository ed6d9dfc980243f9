"""A network as ANI-2x of torchani 2.9, unchanged: it finds pairs and triples of seven elements in forward."""

from __future__ import annotations

from typing import Any

import torch
from structures import cluster
from torch import Tensor, nn
from torchani.arch import simple_ani

ELEMENTS = (1, 6, 7, 8, 16, 9, 17)


class Member(nn.Module):
    """Energy and forces."""

    def __init__(self) -> None:
        super().__init__()
        self.net = simple_ani(
            ("H", "C", "N", "O", "S", "F", "Cl"),
            lot="wb97x-631gd",
            repulsion=False,
            strategy="pyaev",
            cutoff_fn="cosine",
            radial_start=0.8,
            angular_start=0.8,
            radial_cutoff=5.1,
            container_ctor="like_2x",
            activation="celu",
            bias=True,
            self_energies="zero",
        )

    def forward(self, species: Tensor, coords: Tensor) -> dict[str, Any]:
        with torch.enable_grad():
            coords = coords.detach().requires_grad_(True)
            energy = self.net((species, coords)).energies
            forces = -torch.autograd.grad(energy.sum(), coords)[0]
        return {"energy": energy.detach(), "forces": forces}


def ani() -> nn.Module:
    return Member().eval()


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    numbers, positions = cluster(atoms, seed, elements=(ELEMENTS, (1, 6, 8), (1, 6, 7, 17))[seed % 3])
    return {"species": numbers[None], "coords": positions[None]}


MOVED = "coords"
DYNAMIC = {"species": {1: "A"}, "coords": {1: "A"}}
