"""Makes the weights table of a build: a row for each weight of the members' checkpoints and programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from widepack_artifacts.program import Kind
from widepack_artifacts.weight_table import Weight

from ..capture.reachable import tensors_of
from ..checkpoints.alignment import Alignment
from ..checkpoints.differences import bit_equal
from ..checkpoints.factory import Factory
from ..errors import CaptureError
from ..fleet.factors import Factors, KeptStacked
from ..fleet.fleet import Fleet
from ..spec.dtypes import dtype_name
from ..verification.program_difference import is_literal
from .captures import Captures
from .factored_rows import FactoredRow, with_factored
from .members import filled_member
from .weight_row import WeightRow


class WeightsTable:
    """The weights that the entries of a build read.

    parameters: the names of the module's parameters; all other weights of the checkpoints are buffers. fleet:
    gives the factors of weights; None if all are stored as they are. progress: is called with the number of
    weights that were factored, and of all. rows: a row for each stored weight. factored: the weights that are
    stored as factors. kept: why other weights of a fleet stay Stacked, by name. by_name: the weights as the
    members have them, by every name, aliases too.
    """

    def __init__(
        self,
        factory: Factory,
        aligned: Alignment,
        captures: Sequence[Captures],
        parameters: Sequence[str],
        fleet: Fleet | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.factory, self.aligned, self.captures = factory, aligned, captures
        self.count = len(aligned.names)
        members = self._table(parameters)
        self.by_name = {name: r for r in members for name in (r.weight.name, *r.weight.aliases)}
        self.kept: dict[str, KeptStacked] = {}
        self.factored = self._factored(members, fleet, progress) if fleet is not None else []
        self.aligned = with_factored(aligned, self.factored)
        self.by_name |= {n: f.member for f in self.factored for n in (f.weight.name, *f.weight.aliases)}
        split = {f.member.weight.name for f in self.factored}
        stored = [row for f in self.factored for row in f.stored()]
        self.rows = [r for r in members if r.weight.name not in split] + stored
        self._kinds: dict[str, Kind] = {n: r.weight.kind for n, r in self.by_name.items()}  # type: ignore[misc]
        self._kinds.update({r.weight.name: r.weight.kind for r in stored})  # type: ignore[misc]

    def kind(self, name: str) -> Kind:
        """Returns the kind of a weight, or of the base or a factor of one."""
        return self._kinds[name]

    def _factored(
        self, members: Sequence[WeightRow], fleet: Fleet, progress: Callable[[int, int], None]
    ) -> list[FactoredRow]:
        """Returns the weights that are stored as factors, and notes why others are not."""
        found = []
        stacked = [r for r in members if r.weight.kind == "stacked" and r.weight.role == "parameter"]
        for done, row in enumerate(stacked):
            progress(done, len(stacked))
            factors = fleet.factors(row.weight.name, row.value, self.count)
            if isinstance(factors, Factors):
                found.append(FactoredRow.of(row, factors, fleet.exact))
            else:
                self.kept[row.weight.name] = factors
        progress(len(stacked), len(stacked))
        return found

    def _table(self, parameters: Sequence[str]) -> list[WeightRow]:
        rows: list[WeightRow] = []
        roles = {
            n: role for entry in self.captures for c in entry.captured for n, (role, _) in c.weights.items()
        }
        known = set()
        for w in self.aligned.weights:
            role = roles.get(w.name) or ("parameter" if w.name in parameters else "buffer")
            shape: list[Any] = [list(s) if isinstance(s, tuple) else s for s in w.shape]
            weight = Weight(w.name, w.kind, w.dtype, shape, role, list(w.aliases))
            rows.append(WeightRow(weight, partial(self.aligned.tensor, name=w.name)))
            known |= {w.name, *w.aliases}
        lifted = {
            n: value
            for entry in self.captures
            for n, (_, value) in entry.first.weights.items()
            if n not in known
        }
        return rows + [_constant(n, values) for n, values in self._lifted_values(lifted).items()]

    def _lifted_values(self, lifted: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Returns every member's values of tensors that no checkpoint has, by name.

        These are buffers that are not saved, and tensors in plain attributes. They are read from each
        member's module. A literal of the program is the same in all members.
        """
        values: dict[str, list[torch.Tensor]] = {n: [] for n in lifted}
        for i in range(self.count if lifted else 0):
            module = filled_member(self.factory, self.aligned, i)
            tensors = {**dict(tensors_of(module)), **dict(module.named_buffers(remove_duplicate=False))}
            for n in lifted:
                value = tensors.get(n, lifted[n] if is_literal(n) else None)
                if value is None:
                    raise CaptureError(
                        f"member {self.aligned.names[i]} has no tensor at {n}, but the captured member has"
                        " one;"
                        " the factory must make all members alike"
                    )
                values[n].append(value.detach().clone())
        return values


def _constant(name: str, values: Sequence[torch.Tensor]) -> WeightRow:
    """Returns the row of a tensor that no checkpoint has. values: one for each member.

    Raises: CaptureError.
    """
    first = values[0]
    if any(v.shape != first.shape or v.dtype != first.dtype for v in values):
        raise CaptureError(
            f"the constant {name} differs in shape or dtype between members;"
            " make it a buffer that is saved with the checkpoint"
        )
    kind = "shared" if all(bit_equal(v, first) for v in values) else "stacked"
    weight = Weight(name, kind, dtype_name(first.dtype), list(first.shape), "constant")
    return WeightRow(weight, values.__getitem__)
