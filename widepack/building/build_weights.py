"""Makes the weights of a build, a row for each weight of the checkpoints and programs, and its entries.

A weight of a fleet of fine-tunes may be stored as a base and low-rank factors, which are rows too.

An entry has what the stages of a build share: its captures, inputs, dims and conditions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

from torch import Tensor

from widepack_artifacts.correction import encode_correction, rounded
from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.literals import Literal
from widepack_artifacts.manifest_weights import FACTOR, KINDS, Weight, member_tensor
from widepack_artifacts.program import Kind, Program

from ..capture.reachable import tensors_of
from ..checkpoints.alignment import Alignment
from ..checkpoints.differences import bit_equal
from ..checkpoints.factory import Factory
from ..errors import CaptureError
from ..fleet.factors import Factors, KeptStacked
from ..fleet.fleet import Fleet
from ..simplify.canonical import plain
from ..simplify.factored_weights import stored_factors
from ..spec.draws import InputSource
from ..spec.dtypes import dtype_name
from ..spec.state import BUFFER, CarriedState
from ..verification.entries import CapturedEntry
from ..verification.same_program import is_literal
from .captures import Captures, filled_member


@dataclass(frozen=True)
class WeightRow:
    """A weight and its values. weight: its row in the manifest. value(i): returns member i's tensor."""

    weight: Weight
    value: Callable[[int], Tensor]


@dataclass(frozen=True)
class StoredFactors:
    """How a weight is stored as factors.

    weight: its row in the manifest. rows: of its base, its factors and scales. corrections: returns those of
    the members, by the names of their tensors.
    """

    weight: FactoredWeight
    rows: list[WeightRow]
    corrections: Callable[[], Mapping[str, bytes]]


class WeightTable:
    """The weights of an artifact: a row for each stored weight, and the number of members.

    stored_factors: the weights that are stored as factors, whose bases and factors are rows too.
    """

    rows: Sequence[WeightRow]
    count: int
    stored_factors: Sequence[StoredFactors]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The manifest's rows."""
        return tuple(r.weight for r in self.rows)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes of the weights, by kind."""
        return {k: sum(w.bytes(self.count) for w in self.weights if w.kind == k) for k in KINDS}


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

    def stored(self) -> StoredFactors:
        """Returns the weight as it is stored."""
        w, f, of = self.weight, self.factors, self.row.weight
        base = f.base.reshape(list(of.shape))
        parts = ((w.left, f.left), (w.right, f.right), *([] if f.scale is None else [(w.scale, f.scale)]))
        rows = [
            WeightRow(Weight(w.base, "shared", of.dtype, list(of.shape), FACTOR), lambda i: base),
            *(
                WeightRow(
                    Weight(name, "stacked", dtype_name(t.dtype), list(t.shape[1:]), FACTOR), t.__getitem__
                )
                for name, t in parts
            ),
        ]
        return StoredFactors(w, rows, self.corrections)

    def corrections(self) -> Mapping[str, bytes]:
        """Returns the corrections of all members, by the names of their tensors; empty if there are none."""
        if self.exact or self.factors.approximate:
            return {}
        return {
            member_tensor(self.weight.name, i): encode_correction(self.row.value(i), self.factors, i)
            for i in range(len(self.factors.ranks))
        }


class BuildWeights(WeightTable):
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
        self.stored_factors = [f.stored() for f in self.factored]
        stored = [row for f in self.stored_factors for row in f.rows]
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


class BuildEntry(CapturedEntry):
    """One entry of a build.

    entry: its name. dropout: whether dropout is on. Programs then draw random numbers, and are verified
    without the draws.
    """

    def __init__(self, entry: str, table: BuildWeights, captures: Captures, dropout: bool = False) -> None:
        self.entry, self.table, self.captures = entry, table, captures
        self.dropout = dropout
        self.factory, self.aligned = table.factory, table.aligned
        super().__init__(
            [self._canonical(c.program) for c in captures.captured],
            table.kind,
            captures.first.states,
            captures.first.sizes,
            captures.signatures,
            stored_factors([f.weight for f in table.factored], {r.weight.name: r.weight for r in table.rows}),
        )
        self.set_captured(captures.first)
        self.sources = [
            InputSource(
                leaf.name,
                leaf.type,
                *captures.ranges.get(leaf.name, (None, None)),
                example=None if leaf.name in captures.ranges else leaf.example,
            )
            for leaf in self.captured.inputs
        ]
        for state in self.states:
            if state.how == BUFFER and self.kind(state.name) == "ragged":
                raise CaptureError(
                    f"state {state.name}: its shape differs between the members, but a state has one shape in"
                    " all members"
                )

    @property
    def literals(self) -> tuple[Literal, ...]:
        """What the members' code reads from their weights. Tensors that no checkpoint has are not among
        them.
        """
        rows = self.table.by_name
        stored = {n: r.weight.name for n, r in rows.items() if r.weight.role != "constant"}
        return tuple(x.renamed(stored) for x in self.captured.literals if stored.keys() >= {*x.weights})

    def at_small_sizes(self, needless: Collection[int], not_at_one: Mapping[str, str]) -> BuildEntry:
        """Returns the entry with a corrected capture, as `corrected` has it. It shares the programs."""
        other = copy.copy(self)
        other.set_captured(self.corrected(needless, not_at_one))
        return other

    def _canonical(self, program: Program) -> Program:
        """Returns the program in plain ops, with the table's names of weights: there, tied weights have one
        name.
        """
        program = plain(program)
        rows = self.table.by_name
        return replace(
            program, weights=tuple(replace(s, source=rows[s.source].weight.name) for s in program.weights)
        )

    def initial(self, state: CarriedState) -> str:
        """Returns the weight that a state begins with; "" for an input, which begins with zeros."""
        return self.table.by_name[state.name].weight.name if state.how == BUFFER else ""
