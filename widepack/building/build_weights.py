"""Makes the weights of a build: a row for each weight of the members' checkpoints and programs.

A weight of a fleet of fine-tunes may be stored as a base and low-rank factors, which are rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

from torch import Tensor

from widepack_artifacts.correction import encode_correction, rounded
from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest_weights import FACTOR, Weight, member_tensor
from widepack_artifacts.program import Kind

from ..capture.reachable import tensors_of
from ..checkpoints.alignment import Alignment
from ..checkpoints.differences import bit_equal
from ..checkpoints.factory import Factory
from ..errors import CaptureError
from ..fleet.factors import Factors, KeptStacked
from ..fleet.fleet import Fleet
from ..spec.dtypes import dtype_name
from ..verification.same_program import is_literal
from .captures import Captures, filled_member


@dataclass(frozen=True)
class WeightRow:
    """A weight and its values. weight: its row in the manifest. value(i): returns member i's tensor."""

    weight: Weight
    value: Callable[[int], Tensor]


@dataclass(frozen=True)
class FactoredRow:
    """A weight that is stored as factors.

    row: the weight as the checkpoints have it. factors: of all members. exact: whether they give the
    checkpoints' weights bit for bit.
    """

    row: WeightRow
    factors: Factors
    exact: bool

    @property
    def member(self) -> WeightRow:
        """The weight as the members have it: that of approximate factors, or the checkpoints'."""
        if not self.factors.approximate:
            return self.row
        return WeightRow(self.row.weight, partial(rounded, self.factors))

    @cached_property
    def weight(self) -> FactoredWeight:
        """The row of the manifest."""
        of = self.row.weight
        base, left, right, scale = (f"{of.name}@{part}" for part in ("base", "left", "right", "scale"))
        ranks, aliases = list(self.factors.ranks), list(of.aliases)
        scale = "" if self.factors.scale is None else scale
        return FactoredWeight(of.name, of.role, base, left, right, ranks, aliases, scale)

    def stored(self) -> list[WeightRow]:
        """Returns the rows of the base, the factors and the scales."""
        w, f, of = self.weight, self.factors, self.row.weight
        base = f.base.reshape(list(of.shape))
        parts = ((w.left, f.left), (w.right, f.right), *([] if f.scale is None else [(w.scale, f.scale)]))
        return [
            WeightRow(Weight(w.base, "shared", of.dtype, list(of.shape), FACTOR), lambda i: base),
            *(
                WeightRow(
                    Weight(name, "stacked", dtype_name(t.dtype), list(t.shape[1:]), FACTOR), t.__getitem__
                )
                for name, t in parts
            ),
        ]

    def corrections(self) -> Mapping[str, bytes]:
        """Returns the corrections of all members, by the names of their tensors; empty if there are none."""
        if self.exact or self.factors.approximate:
            return {}
        return {
            member_tensor(self.weight.name, i): encode_correction(self.row.value(i), self.factors, i)
            for i in range(len(self.factors.ranks))
        }


class BuildWeights:
    """The weights that the entries of a build read.

    parameters: the names of the module's parameters; all other weights of the checkpoints are buffers. fleet:
    gives the factors of weights; None if all are stored as they are. progress: is called with the number of
    weights that were factored, and of all. rows: a row for each stored weight. factored: the weights that are
    stored as factors. kept: why other weights of a fleet stay Stacked, by name. by_name: the stored weights,
    and the weights as the members have them, by every name, aliases too.
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
        self.kept: dict[str, KeptStacked] = {}
        self.factored = self._factored(members, fleet, progress) if fleet is not None else []
        self.aligned = _with_approximate(aligned, self.factored)
        split = {f.row.weight.name for f in self.factored}
        stored = [row for f in self.factored for row in f.stored()]
        self.rows = [r for r in members if r.weight.name not in split] + stored
        every = (*self.rows, *(f.member for f in self.factored))
        self.by_name = {name: r for r in every for name in (r.weight.name, *r.weight.aliases)}

    def kind(self, name: str) -> Kind:
        """Returns the kind of a weight, or of the base or a factor of one."""
        return cast(Kind, self.by_name[name].weight.kind)

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
                found.append(FactoredRow(row, factors, fleet.exact))
            else:
                self.kept[row.weight.name] = factors
        progress(len(stacked), len(stacked))
        return found

    def _table(self, parameters: Sequence[str]) -> list[WeightRow]:
        """Returns the weights as the checkpoints have them, and tensors that no checkpoint has."""
        roles = {
            n: role for entry in self.captures for c in entry.captured for n, (role, _) in c.weights.items()
        }
        rows = []
        for w in self.aligned.weights:
            role = roles.get(w.name) or ("parameter" if w.name in parameters else "buffer")
            rows.append(WeightRow(replace(w, role=role), partial(self.aligned.tensor, name=w.name)))
        known = {n for w in self.aligned.weights for n in (w.name, *w.aliases)}
        lifted = {
            n: value
            for entry in self.captures
            for n, (_, value) in entry.first.weights.items()
            if n not in known
        }
        return rows + [_constant(n, values) for n, values in self._lifted_values(lifted).items()]

    def _lifted_values(self, lifted: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """Returns every member's values of tensors that no checkpoint has, by name.

        These are buffers that are not saved, and tensors in plain attributes. They are read from each
        member's module. A literal of the program is the same in all members.
        """
        values: dict[str, list[Tensor]] = {n: [] for n in lifted}
        for i in range(self.count if lifted else 0):
            module = filled_member(self.factory, self.aligned, i)
            tensors = {**dict(tensors_of(module)), **dict(module.named_buffers(remove_duplicate=False))}
            for n in lifted:
                value = tensors.get(n, lifted[n] if is_literal(n) else None)
                if value is None:
                    raise CaptureError(
                        f"member {self.aligned.names[i]} has no tensor at {n}, but the captured member has"
                        " one; the factory must make all members alike"
                    )
                values[n].append(value.detach().clone())
        return values


def _constant(name: str, values: Sequence[Tensor]) -> WeightRow:
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


def _with_approximate(aligned: Alignment, rows: Sequence[FactoredRow]) -> Alignment:
    """Returns the members with the weights that approximate factors give. rows: of all factored weights."""
    near = {row.weight.name: row.member for row in rows if row.factors.approximate}
    if not near:
        return aligned
    checkpoints = [
        checkpoint.with_values({name: partial(row.value, i) for name, row in near.items()})
        for i, checkpoint in enumerate(aligned.checkpoints)
    ]
    return replace(aligned, checkpoints=tuple(checkpoints))
