"""Runs each row of a batch by the member that it is for.

The part of the member program that reads only weights which all members share runs once on all rows
(`trunk.py`). The rest has one of these forms:

| form | what runs |
|---|---|
| by rows | one function for all rows; each row reads the weights of its own member (`per_row.py`) |
| by groups | the rows of one member after the other, over views of its weights or in a session of it |
| gathered | for fleets: each row with the factors of its member, the base for all (`gathered_rows.py`) |
| padded | all members with as many rows as the largest group, where that is faster (`padded_rows.py`) |

A group that is smaller than the guards allow runs some of its rows twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from widepack_artifacts.entry import Rows
from widepack_artifacts.program import Program

from ...backends.task import first_line
from ...errors import ArtifactError, InputError, UsageError, WidepackError
from ...ir.random_ops import uses_random_ops
from ...ir.torch_internals import in_forward_mode, in_transform, inference_guard
from ...rows.axes import row_axis_of
from ...runtime.admission import check_member_run
from ...runtime.executable import storage
from ...system.autocast import autocast_off
from ..binder import Binder
from ..call_check import NoRows, key_of
from ..entry_programs import EntryPrograms
from ..input_names import ROUTE
from ..no_rows import EmptyCall
from ..output import built, check_rows
from ..programs.bound_program import BoundProgram
from ..single_members import SingleMembers, run_apart
from .gathered_rows import GatheredCall, GatheredRows
from .member_numbers import member_numbers
from .padded_rows import PaddedCall, PaddedRows
from .routed_members import RoutedMember, RoutedMembers, RowWeights
from .row_groups import RowGroups, count_padding
from .row_independence import rows_of_entry

SEEN = 256
"""How many shapes of calls a router remembers as checked."""

_Others = tuple[tuple[str, int], ...]
"""The sizes of the other dims of a call, by their names."""
_Sizes = tuple[int, _Others]
"""The number of rows of a call, and the sizes of its other dims."""
_Members = Mapping[int, RoutedMember]
"""The bound members of a call, by number."""


class RoutedCall(NamedTuple):
    """A checked call of a router.

    router: Of the entry. values: The tensors of the call. numbers: The number of the member of each row.
    others: The sizes of the other dims. members: Those of the rows. weights: Those of all members, for a call
    that reads them by rows. together: What runs all rows in one call; None for other forms. apart: The
    programs that have a function of a member, by its number.
    """

    router: Router
    values: Sequence[Tensor]
    numbers: Sequence[int]
    others: _Others
    members: _Members
    weights: RowWeights | None
    together: PaddedCall | GatheredCall | None
    apart: Mapping[int, BoundProgram] = {}

    def run(self) -> list[Any]:
        """Runs the rows, inside of the gate. No lock is taken here: a swap holds it and waits.

        Returns: the leaves of the answer, in the order of the rows.
        """
        if self.together is not None:
            return self.together.run(*self.values)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with autocast_off():
                return self._run()
        return self._run()

    def _run(self) -> list[Any]:
        router = self.router
        with inference_guard(True):
            if len(self.members) == 1:
                return self._alone(self.numbers[0], self.values, len(self.numbers))
            if self.weights is not None and self.weights.is_current(router.artifact.changes):
                return self._by_rows(self.weights, self.members[self.numbers[0]])
            allowed = partial(router.fits, self.others) if router.has_conditions else None
            groups = RowGroups.of(self.numbers, allowed)
            if allowed is not None:
                count_padding(sum(map(len, groups.rows)) - groups.count)
            return self._outputs(groups)

    def _by_rows(self, weights: RowWeights, member: RoutedMember) -> list[Tensor]:
        """Runs the trunk on all rows, and the rest with the weights of each row's member.

        member: any of the rows' members.
        """
        read, rows = self._with_trunk(member), len(self.numbers)
        self._admit(member.functions.split.rest, rows, member.rest, read)
        ids = torch.tensor(self.numbers, device="cpu")
        found = list(weights.form.function(*weights.values, ids, *read))
        return self._checked(found, member, self.values, rows)

    def _with_trunk(self, member: RoutedMember) -> list[Tensor]:
        """Runs the trunk on all rows. Returns what the rest reads."""
        functions, made = member.functions, []
        if functions.trunk is not None and functions.split.trunk is not None:
            self._admit(functions.split.trunk, len(self.numbers), member.shared, self.values)
            made = list(functions.trunk(*member.shared, *self.values))
        return [*made, *(self.values[i] for i in functions.split.inputs)]

    def _outputs(self, groups: RowGroups) -> list[Any]:
        """Runs the rows of several members, one member after the other."""
        bound = [self.members[m] for m in groups.members]
        places = self.router.places
        if not self.apart and all(m.functions is bound[0].functions for m in bound):
            found = self._grouped(groups, bound)
            return [groups.join(list(leaves), dim) for dim, leaves in zip(places, zip(*found))]
        inputs = zip(*(groups.split(v, a) for v, a in zip(self.values, self.router.axes)))
        found = [self._alone(m, x, len(rows)) for m, x, rows in zip(groups.members, inputs, groups.rows)]
        return [_joined(list(leaves), groups, dim) for dim, leaves in zip(places, zip(*found))]

    def _alone(self, number: int, values: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Runs rows that are all for one member. number: its number."""
        member, bound = self.members[number], self.apart.get(number)
        functions = member.functions
        self._admit(functions.program, rows, member.whole, values)
        found = run_apart(bound, number, values) if bound is not None else None
        if found is None:
            found = list(functions.whole(*member.whole, *values))
        return self._checked(found, member, values, rows)

    def _checked(
        self, found: list[Tensor], member: RoutedMember, values: Sequence[Tensor], rows: int
    ) -> list[Tensor]:
        """Returns an answer after its rows are counted.

        The caller may write into it, so it shares no memory with a weight or an input.
        """
        check_rows(self.router.title, found, self.router.places, rows)
        for k in member.functions.views:
            place = storage(found[k])
            if place in member.storages or place in map(storage, values):
                found[k] = found[k].clone()
        return found

    def _grouped(self, groups: RowGroups, bound: Sequence[RoutedMember]) -> list[list[Tensor]]:
        """Runs the trunk on all rows, and the rest for each group."""
        functions, read = bound[0].functions, self._with_trunk(bound[0])
        slices = zip(*(groups.split(v, axis) for v, axis in zip(read, functions.split.axes)))
        found = []
        for member, rows, given in zip(bound, groups.rows, slices):
            if self.router.limited:
                self._admit(functions.split.rest, len(rows), member.rest, given)
            leaves = functions.rest(*member.rest, *given)
            check_rows(self.router.title, leaves, self.router.places, len(rows))
            found.append(leaves)
        return found

    def _admit(self, program: Program, rows: int, weights: Sequence[Any], inputs: Sequence[Tensor]) -> None:
        if self.router.limited:
            self.router.admit(program, (rows, self.others), weights, inputs)

    def explained(self, error: Exception) -> InputError:
        """Returns the error of a call that an op refused."""
        cause = first_line(error) or type(error).__name__
        return InputError(f"{self.router.title} cannot run on these rows: {cause}")


def _joined(leaves: list[Tensor], groups: RowGroups, dim: int) -> Any:
    """Returns one leaf of the answer; a list with one tensor for each row if members' shapes differ."""
    shapes = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in leaves}
    if len(shapes) == 1:
        return groups.join(leaves, dim)
    found: list[Tensor | None] = [None] * groups.count
    for leaf, rows in zip(leaves, groups.rows):
        for row, part in zip(rows, leaf.unbind(dim)):
            found[row] = part.clone()
    return found


class Router:
    """Routes the rows of calls of one entry.

    Attributes:
        letter: The dim of the rows.
        axes: For each input where its rows are; None for an input that all rows share.
        dims: The same for each output.
        places: In which dim of each output the rows are.
        limited: Whether programs are checked against the budget of untrusted files.
        has_conditions: Whether a member does not take every number of rows.

    Raises: UsageError for an entry whose rows cannot be routed; ArtifactError if the file says of its rows
    what is not so.
    """

    def __init__(self, programs: EntryPrograms, binder: Binder) -> None:
        self._programs, self._binder = programs, binder
        self.artifact, self._entry, self._name = programs.artifact, programs.entry, programs.name
        self.title = f"{self.artifact.reader.root.name}: entry {self._name}"
        self._refuse_kind()
        self.letter = self._independent().dim
        try:
            self.axes = [row_axis_of(i.type, self.letter) for i in self._entry.inputs]
            self.dims = [row_axis_of(o.type, self.letter) for o in self._entry.outputs]
        except ValueError as e:
            raise ArtifactError(f"{self.title} has no rows along {self.letter!r}: {e}") from None
        if not any(self.axes) or None in self.dims:
            raise ArtifactError(f"{self.title} has no row for each answer along {self.letter!r}")
        self._members = RoutedMembers(programs, self.letter, self.axes)
        self.places = [axis.dim for axis in self.dims if axis is not None]
        padded = PaddedRows(programs, self.letter, self.axes, self.places)
        self._padded = padded if padded.possible else None
        gathered = GatheredRows(programs, self.letter, self.axes, self.places)
        self._gathered = gathered if gathered.possible else None
        self._single = SingleMembers(programs, "each")
        self._seen: dict[Any, _Sizes] = {}
        self._admitted: set[Any] = set()
        self.limited = self.artifact.limits.limit is not None
        self.has_conditions = bool(self._entry.guards) or self._entry.dims[self.letter].min > 1

    def _refuse_kind(self) -> None:
        """Refuses an entry that needs more than rows. Raises: UsageError."""
        if self._entry.state:
            raise UsageError(
                f"{self.title} has states, and route has no place for them; call ens(x, state=...)"
            )
        if uses_random_ops(self._programs.source.member(0)[0]):
            raise UsageError(f"{self.title} draws random numbers; route needs rows that are independent")

    def _independent(self) -> Rows:
        """Returns along which dim the rows are independent. Raises: UsageError if they are not."""
        rows = rows_of_entry(self._programs)
        if not rows.independent:
            raise UsageError(
                f"{self.title} cannot be routed: its rows are not known to be independent.\n"
                f"{rows.reason[:400]}\n"
                "route needs a batch in which no row changes the answer to another one; ens(x) and "
                "ens.each(xs) run this model."
            )
        return rows

    # ---------------------------------------------------------------- calls

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], member: Any) -> Any:
        """Runs a call. member: of each row, as `route` takes it. Raises: InputError; UsageError."""
        self.artifact.check_open()
        values = inputs_of_rows(self._binder, args, kwargs)
        try:
            outputs = self._outputs(values, member)
        except NoRows as e:
            empty = EmptyCall(e, self._entry, values)
            member_numbers(member, self.artifact.members, 0)
            outputs = empty.cut(empty.run(lambda: self._outputs(empty.values, 0)))
        return built(self._entry.result, outputs)

    def _outputs(self, values: Sequence[Tensor], member: Any) -> list[Any]:
        """Returns the outputs of a call. Raises: InputError; UsageError."""
        call = self.prepared(values, member)
        try:
            found: list[Any] = self.artifact.gate.run(call, ())
            return found
        except (WidepackError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise call.explained(e) from e

    def prepared(self, values: Sequence[Tensor], member: Any) -> RoutedCall:
        """Checks a call and binds its members, before the call passes the gate.

        member: of each row, as `route` takes it. Raises: InputError; UsageError.
        """
        self.artifact.check_open()
        rows, others = self._sizes(values)
        numbers = member_numbers(member, self.artifact.members, rows)
        if self._gathered is not None:
            gathered = self._gathered.call(numbers, dict(others))
            if gathered is not None:
                return RoutedCall(self, values, numbers, others, {}, None, gathered)
        members = self._members.bound(numbers)
        apart = self._apart(numbers, others, members) if self._single.possible else {}
        prices = self._single.times.groups(Counter(numbers).values()) if apart else None
        weights = self._members.for_rows(rows, members, prices) if len(members) > 1 else None
        padded = self._padded_call(numbers, others, members) if weights is None else None
        return RoutedCall(self, values, numbers, others, members, weights, padded, apart)

    def _apart(self, numbers: Sequence[int], others: _Others, members: _Members) -> dict[int, BoundProgram]:
        """Returns the programs that have functions of single members, where these are faster.

        A trunk that all members share runs once on all rows, and functions of members would repeat it.
        """
        if members[numbers[0]].functions.trunk is not None:
            return {}
        found = {}
        for number, rows in Counter(numbers).items():
            sizes = {self.letter: rows, **dict(others)}
            if (bound := self._single.program(number, sizes)) is not None:
                found[number] = bound
        return found

    def _padded_call(self, numbers: Sequence[int], others: _Others, members: _Members) -> PaddedCall | None:
        """Returns a call that runs padded; None if another form is faster, as with a trunk."""
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

    def fits(self, others: _Others, rows: int) -> bool:
        """Returns whether the member program holds for a number of rows."""
        return self._programs.inputs.fits({**dict(others), self.letter: rows})

    def admit(
        self, program: Program, sizes: _Sizes, weights: Sequence[Any], inputs: Sequence[Tensor]
    ) -> None:
        """Checks once at each size what a program of an untrusted file takes. Raises: OverBudget."""
        if (key := (id(program), sizes)) in self._admitted:
            return
        title = f"{self.artifact.reader.root}: a member program of entry {self._name}"
        check_member_run(title, program, [*weights, *inputs])
        if len(self._admitted) >= SEEN:
            self._admitted.clear()
        self._admitted.add(key)


def inputs_of_rows(binder: Binder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
    """Returns the tensors of a routed call. Raises: InputError."""
    if not kwargs and binder.plain(args):
        return args
    values, per_member = binder.bind(args, kwargs, ROUTE)
    if any(per_member):
        raise InputError("route takes one row for each answer; widepack.each is for ens(...) and ens.each")
    return values
