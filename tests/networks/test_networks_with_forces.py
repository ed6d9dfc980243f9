"""Tests networks over graphs of atoms whose forces are derivatives of their energy by the positions.

Each is built with a dynamic number of atoms and edges, loaded, and compared with every member in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_builds import QUICK
from support import Bound
from torch import Tensor, nn

from widepack import build, load

N = 3


class Forces(nn.Module):
    """Returns the energy of a graph of atoms, and the forces on them by autograd."""

    def energy(self, x: Tensor, edges: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, edges: Tensor) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.energy(x, edges)
        (slope,) = torch.autograd.grad(energy.sum(), x)
        return {"energy": energy.detach(), "forces": -slope}


class Coupled(Forces):
    """Couples vectors by a buffer whose numbers have another order in memory than the artifact's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coupling", torch.randn(3, 4, 5).permute(1, 0, 2))
        self.read = nn.Linear(5, 1)

    def energy(self, x: Tensor, edges: Tensor) -> Tensor:
        d = x[edges[0]] - x[edges[1]]
        table: Tensor = self.coupling  # type: ignore[assignment]
        pairs = d.sin() @ table.permute(1, 0, 2).view(3, 20)
        answer: Tensor = self.read(pairs.view(-1, 4, 5).square().sum(1).tanh()).sum()
        return answer


class Written(Forces):
    """Writes parts of each edge's vector into one tensor, and changes one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(7, 5)

    def energy(self, x: Tensor, edges: Tensor) -> Tensor:
        d = x[edges[0]] - x[edges[1]]
        parts = d.new_zeros(d.shape[0], 7)
        parts[:, 0] = 0.5
        parts[:, 1:4] = d.sin()
        parts[:, 4:] = d.cos()
        parts[:, 2:5] *= d.tanh()
        answer: Tensor = self.mix(parts).tanh().square().sum()
        return answer


class Keeping(Forces):
    """Keeps what it computed in an attribute, for callers that look at it later."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 5)
        self.kept: dict[str, Tensor] = {}
        self.scales = [torch.tensor(0.5), torch.tensor(2.0)]

    def energy(self, x: Tensor, edges: Tensor) -> Tensor:
        d = x[edges[0]] - x[edges[1]]
        mixed = (self.scales[1] * self.mix(d).tanh()).square().sum()
        self.kept = {"mixed": mixed, "edges": self.scales[0] * d}
        total: Tensor = mixed + self.kept["edges"].cos().sum()
        return total


class Listed(Forces):
    """Makes a tensor of a list of computed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 5)

    def energy(self, x: Tensor, edges: Tensor) -> Tensor:
        d = x[edges[0]] - x[edges[1]]
        weights = torch.tensor([d.square().mean(), 2.0])
        answer: Tensor = weights[0] * self.mix(d).tanh().square().sum() + weights[1] * d.sin().sum()
        return answer


def graph(atoms: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the positions of atoms on a line, and edges from each to the next two."""
    i = torch.arange(atoms)
    edges = torch.stack([i.repeat(2), torch.cat([i + 1, i + 2]) % atoms])
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(atoms, 3, generator=generator) + i[:, None], edges


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [Coupled, Written, Keeping, Listed])
def test_forces(make: Callable[[], Forces], tmp_path: Path) -> None:
    members, doubles = [], []
    for i in range(N):
        torch.manual_seed(i)
        members.append(make().eval())
        doubles.append(make().eval())
        doubles[-1].load_state_dict(members[-1].state_dict())
        doubles[-1].double()
        torch.save(members[-1].state_dict(), tmp_path / f"m{i}.pt")
    report = build(
        sorted(tmp_path.glob("*.pt")),
        tmp_path / "ens.wide",
        model=make,
        sample=graph(6, 0),
        dynamic={"x": {0: "A"}, "edges": {1: "E"}},
        **QUICK,
    )
    assert report.wide_share == 1
    ens = load(tmp_path / "ens.wide")
    bounds = {"energy": Bound(), "forces": Bound()}
    for atoms in range(5, 17):
        x, edges = graph(atoms, atoms)
        each = torch.stack([graph(atoms, 100 + i)[0] for i in range(N)])
        stacked = ens.each(each, edges.expand(N, -1, -1).contiguous())
        for got, inputs in ((ens(x, edges), [x] * N), (stacked, list(each))):
            for i, one in enumerate(inputs):
                alone, truth = members[i](one, edges), doubles[i](one.double(), edges)
                for key, bound in bounds.items():
                    bound.add(got[key][i], alone[key], truth[key])
    for bound in bounds.values():
        bound.check()
