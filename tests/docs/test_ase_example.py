"""Tests the example of a calculator for ASE: energy, forces and spread are those of the members."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ase import Atoms
from torch import Tensor, nn

from widepack import build

EXAMPLES = Path(__file__).parents[2] / "examples"
N = 3


class Springs(nn.Module):
    """An energy of pairs, with a number for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1)
        self.length = nn.Parameter(torch.rand(1))

    def forward(self, z: Tensor, pos: Tensor) -> dict[str, Tensor]:
        pos = pos.requires_grad_(True)
        eye = torch.eye(pos.shape[1], dtype=pos.dtype)
        r = ((pos[:, :, None] - pos[:, None]).square().sum(-1) + eye).sqrt()
        charge = self.table(z).squeeze(-1)
        pairs = (r - self.length).square() * (charge[:, :, None] + charge[:, None]) * (1 - eye)
        energy = pairs.sum((1, 2))
        return {"energy": energy, "forces": -torch.autograd.grad(energy.sum(), pos)[0]}


@pytest.mark.extended
def test_the_calculator_gives_mean_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    committee = importlib.import_module("ase_committee").Committee

    nets, paths = [], []
    for i in range(N):
        torch.manual_seed(i)
        nets.append(Springs())
        paths.append(tmp_path / f"{i}.pt")
        torch.save(nets[-1].state_dict(), paths[-1])
    inputs = ("z=int64[B,A]:0..9", "pos=float32[B,A,3]")
    out = tmp_path / "c.wide"
    build(paths, out, model=Springs, inputs=inputs, targets=("cpu",), pt2=False, budget=0)
    atoms: Any = Atoms("CH4", positions=torch.randn(5, 3).numpy())
    atoms.calc = committee(str(out))
    z, pos = torch.as_tensor(atoms.numbers)[None], torch.as_tensor(atoms.positions, dtype=torch.float32)[None]
    answers = [net(z, pos.clone()) for net in nets]
    forces = torch.stack([a["forces"][0].double() for a in answers])
    energies = torch.stack([a["energy"][0].detach().double() for a in answers])
    assert atoms.get_potential_energy() == pytest.approx(energies.mean().item(), rel=1e-5)
    torch.testing.assert_close(torch.as_tensor(atoms.get_forces()), forces.mean(0), rtol=1e-4, atol=1e-5)
    results = atoms.calc.results
    torch.testing.assert_close(
        torch.as_tensor(results["forces_std"]), forces.std(0, correction=0), rtol=1e-4, atol=1e-5
    )
    assert results["energy_std"] == pytest.approx(energies.std(correction=0).item(), rel=1e-4)
    del sys.modules["ase_committee"]
