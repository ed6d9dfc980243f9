"""SchNet and PaiNN of schnetpack 2.1, with its own sum over atoms and its own forces."""

from __future__ import annotations

import typing
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader
from structures import molecules
from torch import Tensor, nn

if not hasattr(dataloader, "T_co"):  # schnetpack imports this name of older versions of torch
    dataloader.T_co = typing.TypeVar("T_co", covariant=True)

import schnetpack
from schnetpack.model import NeuralNetworkPotential
from schnetpack.nn import CosineCutoff, GaussianRBF

CUTOFF = 5.0


class Member(nn.Module):
    """The package's potential over a list of neighbours."""

    def __init__(self, representation: Any) -> None:
        super().__init__()
        atomistic = schnetpack.atomistic
        self.net = NeuralNetworkPotential(
            representation=representation(
                n_atom_basis=128,
                n_interactions=3,
                radial_basis=GaussianRBF(n_rbf=20, cutoff=CUTOFF),
                cutoff_fn=CosineCutoff(CUTOFF),
            ),
            input_modules=[atomistic.PairwiseDistances()],
            output_modules=[
                atomistic.Atomwise(n_in=128, output_key="energy"),
                atomistic.Forces(energy_key="energy", force_key="forces"),
            ],
        )

    def forward(
        self, z: Tensor, pos: Tensor, offsets: Tensor, idx_i: Tensor, idx_j: Tensor, idx_m: Tensor
    ) -> Any:
        names = ("_atomic_numbers", "_positions", "_offsets", "_idx_i", "_idx_j", "_idx_m")
        return self.net(dict(zip(names, (z, pos, offsets, idx_i, idx_j, idx_m))))


def schnet() -> nn.Module:
    return Member(schnetpack.representation.SchNet).eval()


def painn() -> nn.Module:
    return Member(schnetpack.representation.PaiNN).eval()


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    m = molecules(atoms, seed, CUTOFF)
    offsets = torch.zeros(len(m["i"]), 3)
    values = (m["numbers"], m["positions"], offsets, m["i"], m["j"], m["of"])
    return dict(zip(("z", "pos", "offsets", "idx_i", "idx_j", "idx_m"), values))


MOVED = "pos"
DYNAMIC = {
    "z": {0: "A"},
    "pos": {0: "A"},
    "offsets": {0: "E"},
    "idx_i": {0: "E"},
    "idx_j": {0: "E"},
    "idx_m": {0: "A"},
}
