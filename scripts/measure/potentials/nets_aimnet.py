"""AIMNet2 of aimnet 0.2 by the package's own configuration, with its Coulomb part. It answers charges too."""

from __future__ import annotations

import os
from typing import Any

import aimnet
import torch
import yaml
from aimnet.config import build_module
from structures import molecules
from torch import Tensor, nn

CUTOFF = 5.0
with open(os.path.join(os.path.dirname(aimnet.__file__), "models", "aimnet2.yaml")) as file:
    CONFIG = file.read()


class Member(nn.Module):
    """Energy, forces and charges over matrices of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_module(yaml.safe_load(CONFIG))

    def forward(
        self, coord: Tensor, numbers: Tensor, charge: Tensor, mol_idx: Tensor, nbmat: Tensor, nbmat_lr: Tensor
    ) -> dict[str, Any]:
        with torch.enable_grad():
            coord = coord.detach().requires_grad_(True)
            out = self.net(
                {
                    "coord": coord,
                    "numbers": numbers,
                    "charge": charge,
                    "mol_idx": mol_idx,
                    "nbmat": nbmat,
                    "nbmat_lr": nbmat_lr,
                }
            )
            forces = -torch.autograd.grad(out["energy"].sum(), coord)[0]
        return {"energy": out["energy"].detach(), "forces": forces, "charges": out["charges"].detach()}


def aimnet2() -> nn.Module:
    return Member().eval()


def as_double(member: Any) -> nn.Module:
    """The package casts coordinates to float32, unless its table of dtypes is changed."""
    member = member.double()
    member.net._required_keys_dtype = [torch.float64, torch.int64, torch.float64]  # noqa: SLF001
    return member


def _matrix(i: Tensor, j: Tensor, atoms: int) -> Tensor:
    """Returns the neighbours of each atom, filled up with the number of one more atom, which has none."""
    counts = torch.bincount(i, minlength=atoms + 1)
    found = torch.full((atoms + 1, int(counts.max())), atoms, dtype=torch.int64)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
    found[i, torch.arange(len(i)) - start[i]] = j
    return found.int()


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    near, far = molecules(atoms, seed, CUTOFF), molecules(atoms, seed, 1e6)
    count = len(near["sizes"])
    return {
        "coord": torch.cat([near["positions"], torch.zeros(1, 3)]),
        "numbers": torch.cat([near["numbers"], torch.zeros(1, dtype=torch.int64)]),
        "charge": torch.zeros(count),
        "mol_idx": torch.cat([near["of"], torch.tensor([count - 1])]),
        "nbmat": _matrix(near["i"], near["j"], atoms),
        "nbmat_lr": _matrix(far["i"], far["j"], atoms),
    }


MOVED = "coord"
DYNAMIC = {
    "coord": {0: "A"},
    "numbers": {0: "A"},
    "charge": {0: "M"},
    "mol_idx": {0: "A"},
    "nbmat": {0: "A", 1: "K"},
    "nbmat_lr": {0: "A", 1: "L"},
}
