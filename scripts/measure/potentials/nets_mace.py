"""ScaleShiftMACE of mace-torch 0.3 (with e3nn 0.4.4), of two interactions, in a periodic cell."""

from __future__ import annotations

from typing import Any

import e3nn
import numpy as np
import torch
from structures import crystal, periodic_pairs
from torch import Tensor, nn

torch.serialization.add_safe_globals([slice])  # of tables that e3nn loads
e3nn.set_optimization_defaults(jit_script_fx=False)  # torch.export does not follow torch.jit

from e3nn import o3  # noqa: E402
from mace import modules  # noqa: E402

CUTOFF, KINDS = 4.0, [1, 6, 7, 8]


class Member(nn.Module):
    """Energy and forces by the package."""

    def __init__(self) -> None:
        super().__init__()
        block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
        self.net = modules.ScaleShiftMACE(
            atomic_inter_scale=1.3,
            atomic_inter_shift=0.1,
            r_max=CUTOFF,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=block,
            interaction_cls_first=block,
            num_interactions=2,
            num_elements=len(KINDS),
            hidden_irreps=o3.Irreps("32x0e + 32x1o"),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.array([-1.0, -2.0, -3.0, -4.0]),
            avg_num_neighbors=12.0,
            atomic_numbers=KINDS,
            correlation=3,
            gate=torch.nn.functional.silu,
        )

    def forward(
        self,
        node_attrs: Tensor,
        positions: Tensor,
        edge_index: Tensor,
        shifts: Tensor,
        cell: Tensor,
        batch: Tensor,
        ptr: Tensor,
    ) -> dict[str, Any]:
        out = self.net(
            {
                "node_attrs": node_attrs,
                "positions": positions.detach().requires_grad_(True),
                "edge_index": edge_index,
                "shifts": shifts,
                "cell": cell,
                "batch": batch,
                "ptr": ptr,
            },
            compute_force=True,
        )
        return {"energy": out["energy"].detach(), "forces": out["forces"]}


def mace() -> nn.Module:
    return Member().eval()


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    positions, kinds, cell = crystal(atoms, seed)
    found = periodic_pairs(positions, cell, CUTOFF)
    return {
        "node_attrs": torch.nn.functional.one_hot(torch.tensor(kinds), len(KINDS)).float(),
        "positions": torch.tensor(positions).float(),
        "edge_index": torch.tensor(found[:, :2].T.copy()),
        "shifts": torch.tensor(found[:, 2:] @ cell).float(),
        "cell": torch.tensor(cell).float(),
        "batch": torch.zeros(atoms, dtype=torch.int64),
        "ptr": torch.tensor([0, atoms]),
    }


MOVED = "positions"
DYNAMIC = {
    "node_attrs": {0: "A"},
    "positions": {0: "A"},
    "edge_index": {1: "E"},
    "shifts": {0: "E"},
    "cell": {},
    "batch": {0: "A"},
    "ptr": {},
}
