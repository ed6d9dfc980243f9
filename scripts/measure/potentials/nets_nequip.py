"""The GNN model of nequip 0.19, of three layers, in a periodic cell. It answers the stress too."""

from __future__ import annotations

from typing import Any

import torch
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state
from structures import crystal, periodic_pairs
from torch import Tensor, nn

set_global_state()
CUTOFF, NAMES = 4.0, ["H", "C", "N", "O"]


class Member(nn.Module):
    """Energy, forces and stress by the package."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.net = NequIPGNNModel(
            seed=int(torch.randint(0, 1 << 30, ())),
            model_dtype=dtype,
            compile_mode="eager",
            r_max=CUTOFF,
            type_names=NAMES,
            num_layers=3,
            l_max=1,
            parity=True,
            num_features=32,
            radial_mlp_depth=1,
            radial_mlp_width=64,
            avg_num_neighbors=12.0,
            per_type_energy_scales=1.1,
            per_type_energy_shifts=dict(zip(NAMES, [-1.0, -2.0, -3.0, -4.0])),
        )

    def forward(
        self, pos: Tensor, atom_types: Tensor, edge_index: Tensor, edge_cell_shift: Tensor, cell: Tensor
    ) -> dict[str, Any]:
        names = ("pos", "atom_types", "edge_index", "edge_cell_shift", "cell")
        values = (pos.detach().clone(), atom_types, edge_index, edge_cell_shift, cell)
        out = self.net(dict(zip(names, values)))
        return {"energy": out["total_energy"].detach(), "forces": out["forces"], "stress": out["stress"]}


def nequip() -> nn.Module:
    return Member().eval()


def as_double(member: nn.Module) -> nn.Module:
    """The package chooses dtypes when it makes a model."""
    twin = Member("float64").double().eval()
    twin.load_state_dict(member.state_dict())
    return twin


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    positions, kinds, cell = crystal(atoms, seed)
    found = periodic_pairs(positions, cell, CUTOFF)
    return {
        "pos": torch.tensor(positions).float(),
        "atom_types": torch.tensor(kinds)[:, None],
        "edge_index": torch.tensor(found[:, :2].T.copy()),
        "edge_cell_shift": torch.tensor(found[:, 2:]).float(),
        "cell": torch.tensor(cell).float()[None],
    }


MOVED = "pos"
DYNAMIC = {
    "pos": {0: "A"},
    "atom_types": {0: "A"},
    "edge_index": {1: "E"},
    "edge_cell_shift": {0: "E"},
    "cell": {},
}
