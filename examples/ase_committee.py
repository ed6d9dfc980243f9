"""A calculator of ASE for a committee of potentials: energy, forces, and their spread between the members.

    atoms.calc = Committee("committee.wide")
    atoms.get_forces()                        # the mean of the members' forces
    atoms.calc.results["forces_std"]          # their standard deviation, for each atom and direction

The artifact's members take atomic numbers `[B, A]` and positions `[B, A, 3]`, and answer `energy` [B] and
`forces` [B, A, 3]. For other inputs, such as a list of neighbours, override `inputs`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

import widepack


class Committee(Calculator):  # type: ignore[misc]  # ASE has no types
    """Runs all members of an artifact in one call. options: those of `widepack.load`."""

    implemented_properties: ClassVar[list[str]] = ["energy", "forces", "energy_std", "forces_std"]

    def __init__(self, artifact: str, **options: Any) -> None:
        super().__init__()
        self.ens = widepack.load(artifact, **options)

    def inputs(self, atoms: Atoms) -> tuple[torch.Tensor, ...]:
        """Returns the inputs of a call for one structure."""
        positions = torch.as_tensor(atoms.positions, dtype=torch.float32)
        return torch.as_tensor(atoms.numbers).unsqueeze(0), positions.unsqueeze(0)

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        """Fills `results`, as ASE asks for it."""
        super().calculate(atoms, properties or ["energy"], system_changes)
        answer = self.ens(*self.inputs(self.atoms))
        for name in ("energy", "forces"):
            members = answer[name][:, 0].double()  # [N] or [N, A, 3]
            mean, spread = members.mean(0), members.std(0, correction=0)  # as `ens.reduce` counts
            self.results[name] = mean.item() if name == "energy" else mean.numpy()
            self.results[f"{name}_std"] = spread.item() if name == "energy" else spread.numpy()
