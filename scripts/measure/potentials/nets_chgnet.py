"""CHGNet 0.4 over one crystal graph.

Two of the functions that the package calls read sizes as numbers. They are replaced.
"""

from __future__ import annotations

from typing import Any

from chgnet.graph import crystalgraph
from chgnet.model import layers, model
from pymatgen.core import Lattice, Structure
from structures import crystal
from torch import Tensor, nn

SYMBOLS = ["Li", "O", "Mn", "P"]


def aggregate(data: Tensor, owners: Tensor, *, average: bool = True, num_owner: Any = None) -> Tensor:
    """The package's sum over owners. Without their number it counts them from data; here it is one graph."""
    count = num_owner if num_owner is not None else 1
    total = data.new_zeros([count, data.shape[1]]).index_add_(0, owners, data)
    if not average:
        return total
    counts = data.new_zeros([count]).index_add_(0, owners, data.new_ones([data.shape[0]]))
    return (total.T / counts.clamp_min(1)).T


def length(value: Any) -> Any:
    """`len`, which makes a number of a dynamic size."""
    return value.shape[0] if isinstance(value, Tensor) else len(value)


layers.aggregate = aggregate
layers.len = model.len = crystalgraph.len = length


class Member(nn.Module):
    """Energy and forces by the package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model.CHGNet(
            composition_model=None,
            atom_graph_cutoff=5,
            bond_graph_cutoff=3,
            is_intensive=False,
            num_radial=31,
            num_angular=31,
            verbose=False,
        )

    def forward(
        self,
        atomic_number: Tensor,
        frac: Tensor,
        atom_graph: Tensor,
        image: Tensor,
        directed2undirected: Tensor,
        undirected2directed: Tensor,
        bond_graph: Tensor,
        lattice: Tensor,
    ) -> dict[str, Any]:
        graph = crystalgraph.CrystalGraph(
            atomic_number=atomic_number,
            atom_frac_coord=frac.detach().requires_grad_(True),
            atom_graph=atom_graph,
            atom_graph_cutoff=5,
            neighbor_image=image,
            directed2undirected=directed2undirected,
            undirected2directed=undirected2directed,
            bond_graph=bond_graph,
            bond_graph_cutoff=3,
            lattice=lattice,
        )
        out = self.net([graph], task="ef")
        return {"energy": out["e"].detach(), "forces": out["f"][0].detach()}


def chgnet() -> nn.Module:
    return Member().eval()


_CONVERTER: list[Any] = []


def example(atoms: int, seed: int) -> dict[str, Tensor]:
    positions, kinds, cell = crystal(atoms, seed, least=1.6, spacing=2.4)
    structure = Structure(Lattice(cell), [SYMBOLS[k] for k in kinds], positions, coords_are_cartesian=True)
    if not _CONVERTER:
        _CONVERTER.append(Member().net.graph_converter)
    g = _CONVERTER[0](structure)
    return {
        "atomic_number": g.atomic_number,
        "frac": g.atom_frac_coord.detach(),
        "atom_graph": g.atom_graph,
        "image": g.neighbor_image,
        "directed2undirected": g.directed2undirected,
        "undirected2directed": g.undirected2directed,
        "bond_graph": g.bond_graph,
        "lattice": g.lattice.detach(),
    }


BUILT_AT = 10
MOVED = "frac"
DYNAMIC = {
    "atomic_number": {0: "A"},
    "frac": {0: "A"},
    "atom_graph": {0: "2*U"},
    "image": {0: "2*U"},
    "directed2undirected": {0: "2*U"},
    "undirected2directed": {0: "U"},
    "bond_graph": {0: "G"},
    "lattice": {},
}
