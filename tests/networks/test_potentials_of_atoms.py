"""Tests interatomic potentials that look for neighbours themselves: forces are derivatives inside of forward.

They have what such networks have: all pairs of a dynamic number of atoms, a mask by distance, the largest
number of neighbours as a Python number, one network for each element, and sums by the index of an atom.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from small_builds import QUICK
from support import double, run
from torch import Tensor, nn

import widepack

N = 3
CUTOFF = 2.0
ELEMENTS = (1, 6, 8)


class OfElements(nn.Module):
    """Sums Gaussians of distances for each pair of elements, and runs the network of each element on its
    atoms.
    """

    shifts: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shifts", torch.linspace(0.5, CUTOFF, 8))
        self.nets = nn.ModuleDict({f"e{z}": layers(len(ELEMENTS) * 8, 1) for z in ELEMENTS})
        self.register_buffer("place", torch.zeros(9, dtype=torch.int64))
        self.place[list(ELEMENTS)] = torch.arange(len(ELEMENTS))

    def energy(self, z: Tensor, pos: Tensor) -> Tensor:
        pairs = torch.triu_indices(z.shape[0], z.shape[0], 1)
        near = (pos.detach()[pairs[0]] - pos.detach()[pairs[1]]).norm(dim=-1) <= CUTOFF
        pairs = pairs.index_select(1, near.nonzero().flatten())
        distance = (pos[pairs[0]] - pos[pairs[1]]).norm(dim=-1)
        waves = (-4 * (distance[:, None] - self.shifts) ** 2).exp() * (1 - distance / CUTOFF)[:, None]
        kind = self.place[z]
        features = pos.new_zeros(z.shape[0] * len(ELEMENTS), 8)
        for a, b in ((0, 1), (1, 0)):
            features.index_add_(0, pairs[a] * len(ELEMENTS) + kind[pairs[b]], waves)
        features = features.view(z.shape[0], -1)
        energies = pos.new_zeros(z.shape[0])
        for k, net in enumerate(self.nets.values()):
            atoms = (kind == k).nonzero().view(-1)
            if atoms.shape[0] > 0:
                energies.index_add_(0, atoms, net(features.index_select(0, atoms)).view(-1))
        return energies.sum()

    def forward(self, z: Tensor, pos: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            energy = self.energy(z, pos)
            (slope,) = torch.autograd.grad(energy, pos)
        return {"energy": energy.detach(), "forces": -slope}


class OfNeighbours(OfElements):
    """Puts each atom's neighbours into one row of a table, as wide as the most neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(9, 6), layers(6, 1)

    def energy(self, z: Tensor, pos: Tensor) -> Tensor:
        with torch.no_grad():
            gap = (pos[:, None] - pos[None]).norm(dim=-1)
            near = (gap <= CUTOFF) & (gap > 0)
            most = int(near.sum(1).max())
            order = near.to(torch.int64).sort(dim=1, descending=True, stable=True)
            table, there = order.indices[:, :most], order.values[:, :most] > 0
        apart = (pos[table] - pos[:, None] + (~there)[..., None]).norm(dim=-1)
        weight = (1 - apart / CUTOFF).masked_fill(~there, 0.0)
        mixed = (self.first(z)[table] * weight[..., None]).sum(1)
        energies: Tensor = self.last(mixed * self.first(z))
        return energies.sum()


def layers(width: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.CELU(0.1), nn.Linear(16, out))


def molecule(atoms: int, seed: int, elements: tuple[int, ...] = ELEMENTS) -> dict[str, Tensor]:
    """Atoms on a bent lattice, none on another."""
    g = torch.Generator().manual_seed(seed)
    lattice = torch.cartesian_prod(*[torch.arange(4.0)] * 3)[torch.randperm(64, generator=g)[:atoms]]
    z = torch.tensor(elements)[torch.arange(atoms) % len(elements)]
    return {"z": z, "pos": lattice + 0.2 * torch.rand(atoms, 3, generator=g)}


@pytest.mark.extended
@pytest.mark.parametrize("make", [OfElements, OfNeighbours])
def test_energies_and_forces(make: type[OfElements], tmp_path: Path) -> None:
    members, paths = [], [tmp_path / f"m{i}.pt" for i in range(N)]
    for i, path in enumerate(paths):
        torch.manual_seed(i)
        members.append(make().eval())
        torch.save(members[-1].state_dict(), path)
    report = widepack.build(
        paths,
        tmp_path / "e.wide",
        model=make,
        sample_kwargs=molecule(12, 0),
        dynamic={"z": {0: "A"}, "pos": {0: "A"}},
        **QUICK,
    )
    assert report.wide_share == 1.0
    ens = widepack.load(tmp_path / "e.wide", warmup=False)
    for atoms, elements in ((12, ELEMENTS), (7, (6,)), (20, (1, 8)), (31, (8, 6))):
        calls = [molecule(atoms, 10 + i, elements) for i in range(N)]
        each = ens.each(**{k: torch.stack([c[k] for c in calls]) for k in calls[0]})
        for answer, given in ((ens(**calls[0]), [calls[0]] * N), (each, calls)):
            for i, m in enumerate(members):
                own = run(m, (), given[i])
                exact = run(copy.deepcopy(m).double(), (), double(given[i]))
                for k, truth in exact.items():
                    scale = truth.abs().max()
                    error, alone = ((t.double() - truth).abs().max() / scale for t in (answer[k][i], own[k]))
                    assert error <= 8 * alone + 2e-6, (k, atoms, float(error), float(alone))
