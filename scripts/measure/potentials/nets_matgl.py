"""TensorNet of matgl 4.1 inside matgl's own Potential, in a periodic cell. It answers the stress too."""

from __future__ import annotations

from typing import Any

import torch
from matgl.apps.pes import Potential
from matgl.models import TensorNet
from structures import crystal, periodic_pairs
from torch import Tensor, nn
from torch_geometric.data import Data

CUTOFF = 4.0


class Member(nn.Module):
    """Energy, forces and stress by the package."""

    def __init__(self) -> None:
        super().__init__()
        net = TensorNet(
            element_types=("H", "C", "N", "O"),
            units=32,
            nblocks=2,
            num_rbf=16,
            cutoff=CUTOFF,
            is_intensive=False,
            use_warp=False,
        )
        self.net = Potential(net, data_mean=0.3, data_std=1.7, calc_stresses=True)

    def forward(
        self, node_type: Tensor, frac_coords: Tensor, edge_index: Tensor, pbc_offset: Tensor, lattice: Tensor
    ) -> dict[str, Any]:
        graph = Data(
            node_type=node_type,
            frac_coords=frac_coords,
            edge_index=edge_index,
            pbc_offset=pbc_offset,
            num_nodes=node_type.shape[0],
        )
        energy, forces, stress, _ = self.net(graph, lattice)
        return {"energy": energy.detach(), "forces": forces, "stress": stress}


def tensornet() -> nn.Module:
    return Member().eval()


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    positions, kinds, cell = crystal(atoms, seed)
    found = periodic_pairs(positions, cell, CUTOFF)
    return {
        "node_type": torch.tensor(kinds),
        "frac_coords": torch.tensor(positions / cell[0, 0]).float(),
        "edge_index": torch.tensor(found[:, :2].T.copy()),
        "pbc_offset": torch.tensor(found[:, 2:]).float(),
        "lattice": torch.tensor(cell).float()[None],
    }


MOVED = "frac_coords"
DYNAMIC = {
    "node_type": {0: "A"},
    "frac_coords": {0: "A"},
    "edge_index": {1: "E"},
    "pbc_offset": {0: "E"},
    "lattice": {},
}
