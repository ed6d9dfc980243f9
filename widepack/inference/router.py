"""Runs each row of a batch by the member that it is for.

The part of the member program that reads only weights which all members share runs once on all rows
(`rows/trunk.py`). The rest has one of these forms:

| form | what runs |
|---|---|
| by rows | one function for all rows; each row reads the weights of its own member (`rows/per_row.py`) |
| by groups | the rows of one member after the other, over views of its weights (`row_groups.py`) |
| gathered | for fleets: each row with the factors of its member, the base for all (`gathered_rows.py`) |
| padded | all members with as many rows as the largest group, where that is faster (`padded_rows.py`) |

A group that is smaller than the guards allow runs some of its rows twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from widepack_artifacts import tree
from widepack_artifacts.entry import Entry
from widepack_artifacts.program import Program
from widepack_artifacts.rows import Rows

from ..errors import ArtifactError, InputError, UsageError, WidepackError
from ..ir.random_ops import uses_random_ops
from ..ir.torch_internals import in_forward_mode, in_transform, inference_guard
from ..rows.axes import row_axis_of
from ..runtime.admission import check_member_run
from ..runtime.executable import storage
from ..system.autocast import autocast_off
from .answer_rows import check_rows
from .binder import Binder
from .call_check import key_of
from .entry_rows import rows_of_entry
from .gathered_rows import GatheredCall, GatheredRows
from .input_names import ROUTE
from .member_numbers import member_numbers
from .output import named_values
from .padded_rows import PaddedCall, PaddedRows
from .padding import count_padding
from .programs import EntryPrograms
from .routed_members import RoutedMember, RoutedMembers
from .row_groups import RowGroups
from .row_weights import RowWeights

SEEN = 256
"""How many shapes of calls a router remembers as checked."""

_Others = tuple[tuple[str, int], ...]
"""The sizes of the other dims of a call, by their names."""
_Sizes = tuple[int, _Others]
"""The number of rows of a call, and the sizes of its other dims."""
_Members = Mapping[int, RoutedMember]
"""The bound members of a call, by number."""


class RoutedCall(NamedTuple):
    """A checked call of a router. `run` is called inside the gate."""

    router: Router
    values: Sequence[Tensor]
    numbers: Sequence[int]
    others: _Others
    members: _Members
    weights: RowWeights | None
    together: PaddedCall | GatheredCall | None

    def run(self) -> list[Any]:
        """Runs the rows. Returns: the leaves of the answer, in the order of the rows."""
        if self.together is not None:
            return self.together.run(*self.values)
        return self.router.run(self.values, self.numbers, self.others, self.members, self.weights)

    def explained(self, error: Exception) -> InputError:
        """Returns the error of a call that an op refused."""
        return self.router.explained(error)


class Router:
    """Routes the rows of calls of one entry.

    Attributes:
        letter: The dim of the rows.
        axes: For each input where its rows are; None for an input that all rows share.
        dims: The same for each output.

    Raises: UsageError for an entry whose rows cannot be routed; ArtifactError if the file says of its rows
    what is not so.
    """

    def __init__(self, programs: EntryPrograms, binder: Binder) -> None:
        self._programs, self._binder = programs, binder
        self._artifact, self._entry, self._name = programs.artifact, programs.entry, programs.name
        self._title = f"{self._artifact.reader.root.name}: entry {self._name}"
        self._refuse_kind()
        self.letter = self._independent().dim
        try:
            self.axes = [row_axis_of(i.type, self.letter) for i in self._entry.inputs]
            self.dims = [row_axis_of(o.type, self.letter) for o in self._entry.outputs]
        except ValueError as e:
            raise ArtifactError(f"{self._title} has no rows along {self.letter!r}: {e}") from None
        if not any(self.axes) or None in self.dims:
            raise ArtifactError(f"{self._title} has no row for each answer along {self.letter!r}")
        self._members = RoutedMembers(programs, self.letter, self.axes)
        self._places = [axis.dim for axis in self.dims if axis is not None]
        padded = PaddedRows(programs, self.letter, self.axes, self._places)
        self._padded = padded if padded.possible else None
        gathered = GatheredRows(programs, self.letter, self.axes, self._places)
        self._gathered = gathered if gathered.possible else None
        self._seen: dict[Any, _Sizes] = {}
        self._admitted: set[Any] = set()
        self._limited = self._artifact.limits.limit is not None
        self._has_conditions = bool(self._entry.guards) or self._entry.dims[self.letter].min > 1

    def _refuse_kind(self) -> None:
        """Refuses an entry that needs more than rows. Raises: UsageError."""
        if self._entry.state:
            raise UsageError(
                f"{self._title} has states, and route has no place for them; call ens(x, state=...)"
            )
        if uses_random_ops(self._programs.source.member(0)[0]):
            raise UsageError(f"{self._title} draws random numbers; route needs rows that are independent")

    def _independent(self) -> Rows:
        """Returns along which dim the rows are independent. Raises: UsageError if they are not."""
        rows = rows_of_entry(self._programs)
        if not rows.independent:
            raise UsageError(
                f"{self._title} cannot be routed: its rows are not known to be independent.\n"
                f"{rows.reason[:400]}\n"
                "route needs a batch in which no row changes the answer to another one; ens(x) and "
                "ens.each(xs) run this model."
            )
        return rows

    # ---------------------------------------------------------------- calls

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], member: Any) -> Any:
        """Runs a call. member: of each row, as `route` takes it. Raises: InputError; UsageError."""
        self._artifact.check_open()
        values = inputs_of_rows(self._binder, args, kwargs)
        call = self.prepared(values, member)
        try:
            outputs = self._artifact.gate.run(call, ())
        except (WidepackError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise self.explained(e) from e
        return built(self._entry, outputs)

    def prepared(self, values: Sequence[Tensor], member: Any) -> RoutedCall:
        """Checks a call and binds its members, before the call passes the gate.

        member: of each row, as `route` takes it. Raises: InputError; UsageError.
        """
        self._artifact.check_open()
        rows, others = self._sizes(values)
        numbers = member_numbers(member, self._artifact.members, rows)
        if self._gathered is not None:
            gathered = self._gathered.call(numbers, dict(others))
            if gathered is not None:
                return RoutedCall(self, values, numbers, others, {}, None, gathered)
        members = self._members.bound(numbers)
        weights = self._members.for_rows(rows, members) if len(members) > 1 else None
        padded = self._padded_call(numbers, others, members) if weights is None else None
        return RoutedCall(self, values, numbers, others, members, weights, padded)

    def _padded_call(self, numbers: Sequence[int], others: _Others, members: _Members) -> PaddedCall | None:
        """Returns a call that runs padded; None if another form is faster. A trunk runs once in other
        forms.
        """
        if self._padded is None or len(members) < 2:
            return None
        if members[numbers[0]].functions.trunk is not None:
            return None
        return self._padded.call(numbers, dict(others))

    def _sizes(self, values: Sequence[Tensor]) -> _Sizes:
        """Checks the inputs of a call.

        Returns: the number of rows, and the other dims. Raises: InputError.
        """
        key = tuple(key_of(values, self._name))
        if in_forward_mode() or in_transform():
            self._binder.refuse_derivatives(values)
        found = self._seen.get(key)
        if found is None:
            differentiable = self._binder.refuse_derivatives(values)
            sizes = self._binder.check(values, self._binder.none)
            others = tuple((letter, size) for letter, size in sizes.items() if letter != self.letter)
            found = sizes[self.letter], others
            if not differentiable:
                if len(self._seen) >= SEEN:
                    self._seen.clear()
                self._seen[key] = found
        return found

    def run(
        self,
        values: Sequence[Tensor],
        numbers: Sequence[int],
        others: _Others,
        members: _Members,
        weights: RowWeights | None,
    ) -> list[Any]:
        """Runs a checked call, inside of the gate. No lock is taken here: a swap holds it and waits.

        numbers: the number of the member of each row. others: the sizes of the other dims. members: those of
        the rows. weights: of all members, for a call that reads them by rows.

        Returns: the leaves of the answer, in the order of the rows.
        """
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with autocast_off():
                return self.run(values, numbers, others, members, weights)
        with inference_guard(True):
            if len(members) == 1:
                return self._alone(members[numbers[0]], values, (len(numbers), others))
            if weights is not None and weights.is_current(self._artifact.changes):
                return self._by_rows(weights, values, numbers, others, members[numbers[0]])
            allowed = partial(self.fits, others) if self._has_conditions else None
            groups = RowGroups.of(numbers, allowed)
            if allowed is not None:
                count_padding(sum(map(len, groups.rows)) - groups.count)
            return self._outputs(values, groups, others, members)

    def fits(self, others: _Others, rows: int) -> bool:
        """Returns whether the member program holds for a number of rows."""
        return self._programs.inputs.fits({**dict(others), self.letter: rows})

    def _by_rows(
        self,
        weights: RowWeights,
        values: Sequence[Tensor],
        numbers: Sequence[int],
        others: _Others,
        member: RoutedMember,
    ) -> list[Tensor]:
        """Runs the trunk on all rows, and the rest with the weights of each row's member.

        member: any of the rows' members.
        """
        split, sizes = member.functions.split, (len(numbers), others)
        read = self._with_trunk(member, values, sizes)
        self._admit(split.rest, sizes, member.rest, read)
        ids = torch.tensor(numbers, device="cpu")
        found = list(weights.form.function(*weights.values, ids, *read))
        check_rows(self._title, found, self._places, len(numbers))
        for k in member.functions.views:
            place = storage(found[k])
            if place in member.storages or place in map(storage, values):
                found[k] = found[k].clone()
        return found

    def _with_trunk(self, member: RoutedMember, values: Sequence[Tensor], sizes: _Sizes) -> list[Tensor]:
        """Runs the trunk on all rows. Returns what the rest reads."""
        functions, made = member.functions, []
        if functions.trunk is not None and functions.split.trunk is not None:
            self._admit(functions.split.trunk, sizes, member.shared, values)
            made = list(functions.trunk(*member.shared, *values))
        return [*made, *(values[i] for i in functions.split.inputs)]

    def _outputs(
        self, values: Sequence[Tensor], groups: RowGroups, others: _Others, members: _Members
    ) -> list[Any]:
        """Runs the rows of several members, one member after the other."""
        bound = [members[m] for m in groups.members]
        found: list[list[Tensor]]
        if all(m.functions is bound[0].functions for m in bound):
            found = self._grouped(values, groups, others, bound)
            return [groups.join(list(leaves), dim) for dim, leaves in zip(self._places, zip(*found))]
        inputs = zip(*(groups.split(v, a) for v, a in zip(values, self.axes)))
        sizes = [(len(rows), others) for rows in groups.rows]
        found = [self._alone(m, x, size) for m, x, size in zip(bound, inputs, sizes)]
        return [self._joined(list(leaves), groups, dim) for dim, leaves in zip(self._places, zip(*found))]

    def _alone(self, member: RoutedMember, values: Sequence[Tensor], sizes: _Sizes) -> list[Tensor]:
        """Runs rows that are all for one member.

        The caller may write into the answer, so it shares no memory with a weight or an input.
        """
        functions = member.functions
        self._admit(functions.program, sizes, member.whole, values)
        found: list[Tensor] = list(functions.whole(*member.whole, *values))
        check_rows(self._title, found, self._places, sizes[0])
        for k in functions.views:
            place = storage(found[k])
            if place in member.storages or place in map(storage, values):
                found[k] = found[k].clone()
        return found

    def _grouped(
        self,
        values: Sequence[Tensor],
        groups: RowGroups,
        others: _Others,
        bound: Sequence[RoutedMember],
    ) -> list[list[Tensor]]:
        """Runs the trunk on all rows, and the rest for each group."""
        functions = bound[0].functions
        read = self._with_trunk(bound[0], values, (groups.count, others))
        slices = zip(*(groups.split(v, axis) for v, axis in zip(read, functions.split.axes)))
        found = []
        for member, rows, given in zip(bound, groups.rows, slices):
            if self._limited:
                self._admit(functions.split.rest, (len(rows), others), member.rest, given)
            leaves = functions.rest(*member.rest, *given)
            check_rows(self._title, leaves, self._places, len(rows))
            found.append(leaves)
        return found

    def _joined(self, leaves: list[Tensor], groups: RowGroups, dim: int) -> Any:
        """Returns one leaf of the answer; a list with one tensor for each row if members' shapes differ."""
        shapes = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in leaves}
        if len(shapes) == 1:
            return groups.join(leaves, dim)
        found: list[Tensor | None] = [None] * groups.count
        for leaf, rows in zip(leaves, groups.rows):
            for row, part in zip(rows, leaf.unbind(dim)):
                found[row] = part.clone()
        return found

    def _admit(
        self, program: Program, sizes: _Sizes, weights: Sequence[Any], inputs: Sequence[Tensor]
    ) -> None:
        """Checks once at each size what a program of an untrusted file takes. Raises: OverBudget."""
        if not self._limited or (key := (id(program), sizes)) in self._admitted:
            return
        title = f"{self._artifact.reader.root}: a member program of entry {self._name}"
        check_member_run(title, program, [*weights, *inputs])
        if len(self._admitted) >= SEEN:
            self._admitted.clear()
        self._admitted.add(key)

    def explained(self, error: Exception) -> InputError:
        """Returns the error of a call that an op refused."""
        lines = str(error).strip().splitlines()
        return InputError(
            f"{self._title} cannot run on these rows: {lines[0][:300] if lines else type(error).__name__}"
        )


def inputs_of_rows(binder: Binder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
    """Returns the tensors of a routed call. Raises: InputError."""
    if not kwargs and binder.plain(args):
        return args
    values, per_member = binder.bind(args, kwargs, ROUTE)
    if any(per_member):
        raise InputError("route takes one row for each answer; widepack.each is for ens(...) and ens.each")
    return values


def built(entry: Entry, leaves: list[Any]) -> Any:
    """Returns the member's own structure over the leaves of an answer."""
    result = entry.result
    return leaves[result["leaf"]] if "leaf" in result else tree.build(result, leaves, named_values)
