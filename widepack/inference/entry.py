"""Defines an entry of a loaded model: calls, `each`, `reduce`, states, `warmup`.

Calls may come from several threads at once: nothing that a call writes to is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.entry import Entry

from ..errors import UsageError, WidepackError
from ..ir.torch_internals import in_forward_mode, in_transform
from ..planning.plan import Plan
from ..spec.entries import FORWARD, PATTERNS
from ..system.autocast import autocast_off, plain_modes
from ..system.gate import Runs
from ..verification.weight_error import WeightError
from .answer_stream import AnswerStream
from .binder import Binder
from .bound_program import BoundProgram
from .call_check import key_of
from .each import each_if_tensor
from .graph_use import GraphUse
from .input_names import EACH, REDUCE
from .loaded_entry import LoadedEntry
from .member import Member
from .open_artifact import OpenArtifact
from .output import build_answer, new_states
from .programs import EntryPrograms
from .reduced_answer import Reduction
from .reductions import names_apart
from .tensor_calls import TensorCalls

if TYPE_CHECKING:
    from .router import Router

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
        self._artifact, self._gate = artifact, artifact.gate
        model, known = "ens" if name == FORWARD else f"ens.{name}", artifact.manifest.state
        self._binder = Binder(self.entry, len(artifact.chosen), artifact.device, known=known, model=model)
        self.programs = EntryPrograms(artifact, name, self._binder)
        # Shapes of a call that passed all checks -> the program that answers it.
        self._seen: dict[Any, BoundProgram] = {}
        self._router: Router | None = None

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
    def description(self) -> str:
        return self._binder.description

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

    @property
    def state_dims(self) -> set[str]:
        return {
            d.letter
            for i in self._binder.carried
            for d in self._binder.leaves[i].dims
            if not isinstance(d, int)
        }

    def _answer(self, values: Sequence[torch.Tensor], per_member: Sequence[bool], state: Any) -> Any:
        carries = self._binder.carried
        if carries:
            values, per_member = list(values), list(per_member)
            self._binder.carry(values, per_member, state)
        program = self.bound(values, per_member)
        found = self._run(program, program, values, per_member)
        if program.only >= 0 and not carries:
            return found[program.only]
        outputs = program.program.outputs
        answer = build_answer(found, outputs, len(self.members), self.entry.result, program.lists)
        if not carries:
            return answer
        states = new_states(found, self._binder.states, outputs, len(self.members), values)
        return answer, {**state, **states}

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
            values: The tensors of the call, as `flat` returns them.
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
        from .failed_call import explained  # only a call that fails needs it

        title = f"{self._artifact.reader.root.name}: entry {self.name}"
        return explained(title, program, self.programs.source.member, values, per_member, e)

    def _check(self, values: Sequence[torch.Tensor], per_member: Sequence[bool], key: Any) -> BoundProgram:
        """Checks a call and returns its program. key: under which the call is remembered. Raises:
        InputError.
        """
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
        """
        check = self.programs.probe_check
        with self._artifact.lock, autocast_off():  # no member is swapped meanwhile
            self.programs.of("shared")
            bound = [(p, b) for p, b in self.programs.bound() if b.int8 and p in PATTERNS]
            return tuple(row for p, b in bound for row in check.weight_errors(p, b))

    def route(self, *args: Any, member: Any, **kwargs: Any) -> Any:  # documented in `Routes`
        return self.router.call(args, kwargs, member)

    @property
    def router(self) -> Router:
        """What routes the rows of calls. Raises: UsageError for an entry whose rows cannot be routed."""
        router = self._router
        if router is None:
            from .router import Router  # imports the walk over rows, which only routing needs

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
        return Member(
            self.members[place], self.entry, program, weights, self._artifact.device, initial, self._gate
        )

    def reduce(  # documented in `Reductions`
        self,
        *args: Any,
        of: str | None = None,
        weights: Sequence[float] | None = None,
        members: Sequence[int | str] | None = None,
        dim: int = -1,
        output: str | int | None = None,
        **kwargs: Any,
    ) -> Any:
        inputs, names = names_apart(args)
        chosen = None if members is None else self._chosen(members)
        reduction = Reduction.of_call(names, of, weights, dim, output, chosen)
        state = kwargs.pop("state", None) if self._binder.states else None
        form = REDUCE.replace("{figures}", repr(names)[1:-1])
        values, per_member = self._binder.bind(inputs, kwargs, form)
        if (figures := self._streamed(reduction, values, per_member)) is not None:
            return figures
        result = self._answer(values, per_member, state)
        answer, state = result if self._binder.states else (result, None)
        one_shape = any(b.lists for _, b in self.programs.bound())
        figures = reduction.apply(answer, self.entry.outputs, one_shape)
        return (figures, state) if self._binder.states else figures

    def _chosen(self, members: Any) -> list[int]:
        """Returns the places of the members that an argument names. Raises: UsageError."""
        if isinstance(members, (str, torch.Tensor)) or not isinstance(members, Iterable):
            raise UsageError(
                f"members is {members!r:.60}; reduce takes a list of numbers or names, such as [0, 2]"
            )
        return [self._artifact.index(m) for m in members]

    def _streamed(
        self, reduction: Reduction, values: Sequence[torch.Tensor], per_member: Sequence[bool]
    ) -> dict[str, Any] | None:
        """Returns figures that are computed while members answer one after the other; None where the answers
        of all members are there at one time.
        """
        if self._binder.carried or not reduction.streamed:
            return None
        program = self.bound(values, per_member)
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
        """
        return [b.place for b in self.programs.of(pattern) if b.place is not None]

    def forget(self) -> None:
        """Forgets the bound programs. The next call binds them again."""
        self._seen.clear()
        self._router = None
        self.programs.forget()
