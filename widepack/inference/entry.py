"""Defines an entry of a loaded model: calls, `each`, `reduce`, states, `warmup`.

Calls may come from several threads at once: nothing that a call writes to is shared.

`TensorCalls` defines calls of an entry by a flat list of tensors, one for each input, as servers and tools
make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts import tree
from widepack_artifacts.entry import Entry, Rows

from ..errors import WidepackError
from ..ir.torch_internals import in_forward_mode, in_transform
from ..planning.plan import Plan
from ..spec.entries import FORWARD, PATTERNS
from ..system.autocast import autocast_off, plain_modes
from ..system.gate import Runs
from ..verification.weight_error import WeightError
from .binder import Binder
from .call_check import NoRows, key_of
from .entry_programs import EntryPrograms
from .graph_pool import GraphUse
from .input_names import EACH, REDUCE
from .input_values import each_if_tensor
from .loaded_entry import LoadedEntry
from .members.member import Member
from .no_rows import EmptyCall
from .open_artifact import OpenArtifact
from .output import build_answer, new_states
from .programs.bound_program import BoundProgram
from .reduced_answer import AnswerStream, Reduction
from .single_members import SingleMember, SingleMembers

if TYPE_CHECKING:
    from .routing.router import Router


class TensorCalls:
    """Converts between the arguments of an entry and a flat list of tensors, and checks calls.

    `entry.tensor_calls` returns it. The tensors are in the order of `entry.entry.inputs`, and the leaves of
    an answer in the order of `entry.entry.outputs`.
    """

    def __init__(self, entry: Entry, binder: Binder, programs: EntryPrograms) -> None:
        self._entry, self._binder, self._programs = entry, binder, programs

    @property
    def rows(self) -> Rows:
        """Whether the rows of a batch are independent, and along which dim, derived from the programs."""
        from .routing.row_independence import rows_of_entry  # imports the walk over rows

        with plain_modes():
            return rows_of_entry(self._programs)

    @property
    def rows_of_callers(self) -> Rows:
        """Whether rows of several callers may share a batch: it is proved here that no row changes another.

        What the artifact says about itself does not count.
        """
        from .routing.row_independence import rows_of_callers  # imports the walk over rows

        with plain_modes():
            return rows_of_callers(self._programs)

    def tensors(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], pattern: str, state: Any = None
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Returns the inputs of a call as its program takes them.

        Args:
            args: The call's arguments by position.
            kwargs: The call's arguments by name.
            pattern: `each` gives every input one value for each member. Others follow the marks of
                `widepack.each`.
            state: The states, for an entry that has them.

        Returns:
            The tensors, and for each whether it has one value for each member.

        Raises:
            InputError: The arguments do not match the entry.
        """
        values, marks = self._binder.bind(tuple(args), dict(kwargs))
        per_member = [True] * len(marks) if pattern == "each" else list(marks)
        values = list(values)
        if state is not None:
            self._binder.carry(values, per_member, state)
        return values, per_member

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any], dict[str, torch.Tensor]]:
        """Returns the arguments of a call.

        Args:
            tensors: One for each input of the entry, states included.

        Returns:
            The arguments by position, the arguments by name, and the states by name.
        """
        carried = self._binder.carried
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional = True
        for parameter in self._entry.signature:
            numbers = tree.leaves(parameter.tree)
            if carried & set(numbers):
                continue
            if not numbers and parameter.default:
                positional = False  # the call leaves it out
                continue
            value = tree.build(parameter.tree, list(tensors), lambda _, rows: dict(rows))
            positional = positional and parameter.kind == "positional"
            if positional:
                args.append(value)
            else:
                kwargs[parameter.name] = value
        return args, kwargs, {name: tensors[i] for i, _, name in self._binder.states}

    def sizes(self, tensors: Sequence[torch.Tensor], per_member: Sequence[bool]) -> dict[str, int]:
        """Checks a call without running it: dtypes, devices, shapes, bounds and guards.

        Values are not checked: an op refuses an index out of range when it runs.

        Args:
            tensors: One for each input of the entry, states included.
            per_member: For each tensor, whether it has one value for each member, `[N, ...]`.

        Returns:
            The size of each named dim.

        Raises:
            InputError: The tensors do not match the entry.
        """
        return self._binder.check(tensors, per_member)

    def leaves(self, answer: Any) -> list[Any]:
        """Returns the leaves of an answer in the order of the outputs. A leaf is a tensor, or a list of
        tensors of different shapes.

        Args:
            answer: What a call returned, without the new states.
        """
        found = self.numbered_leaves(answer)
        return [found[k] for k in sorted(found)]

    def numbered_leaves(self, answer: Any) -> dict[int, Any]:
        """Returns the leaves of an answer by the number of the output, which states may be between.

        Args:
            answer: What a call returned, without the new states.
        """
        return tree.taken(self._entry.result, answer)


SEEN = 256
"""How many shapes of calls an entry remembers as checked."""


class WideEntry(LoadedEntry):  # its calls are documented in `LoadedEntry`
    """One entry of a loaded model: one method of the members, for all members at once.

    `ens.entry(name)` and `ens.<name>` return it. It is called as the member's method is.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry.
        members: The members' names.
        programs: The wide programs, for tools that count or time them.

    Example:
        >>> encode = ens.entry("encode")  # or ens.encode
        >>> z = encode(x)  # [N, B, ...]
    """

    def __init__(self, artifact: OpenArtifact, name: str) -> None:
        self.name = name
        self.entry: Entry = artifact.entry(name)
        self.members = artifact.members
        self._artifact, self._gate, self._manifest = artifact, artifact.gate, artifact.manifest
        model, known = "ens" if name == FORWARD else f"ens.{name}", artifact.manifest.state
        self._binder = Binder(self.entry, len(artifact.chosen), artifact.device, known=known, model=model)
        self.programs = EntryPrograms(artifact, name, self._binder)
        # Shapes of a call that passed all checks -> the program that answers it.
        self._seen: dict[Any, BoundProgram] = {}
        self._router: Router | None = None
        self._single: SingleMembers | None = None

    def plans(self, pattern: str = "shared") -> list[Plan]:
        return [b.plan for b in self.programs.of(pattern)]

    def graph_use(self, pattern: str = "shared") -> list[GraphUse]:
        return self.programs.graph_use(pattern)

    @property
    def backend(self) -> str:
        return "+".join(dict.fromkeys(b.backend for b in self.programs.of("shared")))

    @property
    def runs_on(self) -> str:
        return self.programs.description

    @property
    def swapped(self) -> bool:
        return bool(self._artifact.swapped)

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and self._binder.plain(args):
            return self._answer(args, self._binder.none, None)
        state = kwargs.pop("state", None) if self._binder.states else None
        values, per_member = self._binder.bind(args, kwargs)
        return self._answer(values, per_member, state)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and self._binder.plain(args):
            return self._answer(args, self._binder.all, None)
        state = kwargs.pop("state", None) if self._binder.states else None
        values, per_member = self._binder.bind(
            [each_if_tensor(a) for a in args], {k: each_if_tensor(v) for k, v in kwargs.items()}, EACH
        )
        return self._answer(values, [True] * len(per_member), state)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        fresh = self.fresh_state(sizes)
        with self._gate.passed():
            return fresh()

    def fresh_state(self, sizes: Mapping[str, int]) -> Callable[[], dict[str, torch.Tensor]]:
        """Returns what makes the states as they begin. It is called inside the gate. sizes: as in `state`."""
        self._artifact.check_open()
        initial = {self.entry.inputs[i].name: value for i, value in self.programs.inputs.initial().items()}
        return partial(self._binder.fresh, initial, sizes)

    @property
    def tensor_calls(self) -> TensorCalls:
        """Calls by a flat list of tensors, for servers and tools."""
        return TensorCalls(self.entry, self._binder, self.programs)

    def _answer(self, values: Sequence[torch.Tensor], per_member: Sequence[bool], state: Any) -> Any:
        carries = self._binder.carried
        if carries:
            values, per_member = list(values), list(per_member)
            self._binder.carry(values, per_member, state)
        try:
            program, found = self._outputs(values, per_member)
        except NoRows as e:
            empty = EmptyCall(e, self.entry, values)
            program, found = empty.run(lambda: self._outputs(empty.values, per_member))
            found = empty.cut(found)
        if program.only >= 0 and not carries:
            return found[program.only]
        outputs = program.program.outputs
        answer = build_answer(found, outputs, len(self.members), self.entry.result, program.lists)
        if not carries:
            return answer
        states = new_states(found, self._binder.states, outputs, len(self.members), values)
        return answer, {**state, **states}

    def _outputs(
        self, values: Sequence[torch.Tensor], per_member: Sequence[bool]
    ) -> tuple[BoundProgram, Sequence[Any]]:
        """Returns the program of a call, and its outputs. Raises: InputError."""
        program = self.bound(values, per_member)
        return program, self._run(program, program, values, per_member)

    def _run(
        self, runs: Runs, program: BoundProgram, values: Sequence[torch.Tensor], per_member: Sequence[bool]
    ) -> Any:
        """Runs a call inside the gate. runs: what runs the program. Raises: `InputError` if an op refuses."""
        try:
            return self._gate.run(runs, values)
        except (WidepackError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise self.explained(program, values, per_member, e) from e

    def bound(self, values: Sequence[torch.Tensor], per_member: Sequence[bool]) -> BoundProgram:
        """Returns the program of a call.

        Args:
            values: The tensors of the call, as `TensorCalls.tensors` returns them.
            per_member: For each whether it has one value for each member.

        Raises:
            InputError: The call does not match the entry.
        """
        # All checks and the choice of the program depend on this alone, so equal calls are checked once.
        sizes = key_of(values, self.name)
        if in_forward_mode() or in_transform():
            self._binder.refuse_derivatives(values)
        key = (tuple(per_member), *sizes)
        return self._seen.get(key) or self._check(values, per_member, key)

    def explained(
        self, program: BoundProgram, values: Sequence[torch.Tensor], per_member: Sequence[bool], e: Exception
    ) -> WidepackError:
        """Returns the error of a call that an op refused. No swap may wait for this call meanwhile."""
        self._binder.refuse_derivatives(values)
        from .programs.failed_call import explained  # only a call that fails needs it

        title = f"{self._artifact.reader.root.name}: entry {self.name}"
        return explained(title, program, self.programs.source.member, values, per_member, e)

    def _check(self, values: Sequence[torch.Tensor], per_member: Sequence[bool], key: Any) -> BoundProgram:
        """Checks a call and returns its program. key: of the remembered call. Raises: InputError."""
        carries = self._binder.carried
        differentiable = self._binder.refuse_derivatives(values)
        sizes = self._binder.check(values, per_member)
        inputs = [stacked for i, stacked in enumerate(per_member) if i not in carries]
        if not any(inputs):
            pattern = "shared"
        elif all(inputs):
            pattern = "each"
        else:
            pattern = "mixed:" + "".join("e" if stacked else "s" for stacked in per_member)
        program = self.programs.for_sizes(pattern, sizes)
        with self._artifact.lock:
            if not self._artifact.closed and not differentiable:
                if len(self._seen) >= SEEN:
                    self._seen.clear()
                self._seen[key] = program
        return program

    def probe(self) -> None:
        with self._artifact.lock, autocast_off():  # no member is swapped meanwhile
            for pattern in PATTERNS:
                self.programs.probe_check.run(pattern, self.programs.of(pattern), again=True)

    @property
    def weight_errors(self) -> tuple[WeightError, ...]:
        """What int8 weights change in the answers to the probe's inputs, for each member and output.

        It is measured now, for the patterns that are bound: `shared`, and `each` after its first call.
        Without int8 weights it is empty.

        Example:
            >>> ens.entry("forward").weight_errors
            ()
        """
        check = self.programs.probe_check
        with self._artifact.lock, autocast_off():  # no member is swapped meanwhile
            self.programs.of("shared")
            bound = [(p, b) for p, b in self.programs.bound() if b.int8 and p in PATTERNS]
            return tuple(row for p, b in bound for row in check.weight_errors(p, b))

    def route(self, *args: Any, member: Any, **kwargs: Any) -> Any:
        return self.router.call(args, kwargs, member)

    @property
    def router(self) -> Router:
        """What routes the rows of calls. Raises: UsageError for an entry whose rows cannot be routed."""
        router = self._router
        if router is None:
            from .routing.router import Router  # imports the walk over rows, which only routing needs

            with self._artifact.lock, plain_modes():
                self._artifact.check_open()
                router = self._router = self._router or Router(self.programs, self._binder)
        return router

    # ---------------------------------------------------------------- members and ensembles

    def member(self, member: int | str) -> Member:
        self._artifact.check_open()
        place = self._artifact.index(member)
        program, values = self.programs.source.member(place)
        weights = {s.source: value for s, value in zip(program.weights, values, strict=True)}
        initial = {
            self.entry.inputs[s.input].name: self._artifact.weights.of_member(s.initial, place)
            for s in self.entry.state
            if s.initial
        }
        if self._single is None:
            self._single = SingleMembers(self.programs, "shared")
        name, device, alone = self.members[place], self._artifact.device, SingleMember(self._single, place)
        return Member(name, self.entry, program, weights, device, initial, self._gate, alone)

    def _reduce(
        self, request: Callable[[], tuple[Reduction, Sequence[Any]]], kwargs: Mapping[str, Any], state: Any
    ) -> Any:
        reduction, inputs = request()
        form = REDUCE.replace("{figures}", repr(list(reduction.names))[1:-1])
        values, per_member = self._binder.bind(inputs, kwargs, form)
        if (figures := self._streamed(reduction, values, per_member)) is not None:
            return figures
        result = self._answer(values, per_member, state)
        answer, state = result if self._binder.states else (result, None)
        one_shape = any(b.lists for _, b in self.programs.bound())
        figures = reduction.apply(answer, self.entry.outputs, one_shape)
        return (figures, state) if self._binder.states else figures

    def _streamed(
        self, reduction: Reduction, values: Sequence[torch.Tensor], per_member: Sequence[bool]
    ) -> dict[str, Any] | None:
        """Returns figures that are computed while members answer one after the other; None where the answers
        of all members are there at one time.
        """
        if self._binder.carried or not reduction.streamed:
            return None
        try:
            program = self.bound(values, per_member)
        except NoRows:
            return None
        if (result := program.looped) is None:
            return None
        stream = AnswerStream(reduction, self.entry.outputs, len(self.members), program, result)
        self._run(stream, program, values, per_member)
        return stream.figures()

    # ---------------------------------------------------------------- programs

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        for pattern in patterns:
            self.programs.of(pattern)

    def compiled(self, pattern: str = "shared") -> list[Path]:
        """Returns the folders of a pattern's compiled programs. Programs that are not bound yet are bound
        first.

        Args:
            pattern: `shared` or `each`.

        Returns:
            One folder for each compiled program; empty if none is compiled.

        Example:
            >>> ens.entry("forward").compiled()
            []
        """
        return [b.place for b in self.programs.of(pattern) if b.place is not None]

    def forget(self) -> None:
        """Forgets the bound programs. The next call binds them again."""
        self._seen.clear()
        self._router = self._single = None
        self.programs.forget()
