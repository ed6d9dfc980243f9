"""`WideEntry`: one entry of a loaded artifact, N members that run as one.

Calls may come from several threads at once: nothing that a call writes to is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.manifest import Entry

from ..spec.entries import PATTERNS
from .programs import Bound, Programs
from ..errors import InputError, UsageError
from .open_artifact import Held
from .binder import Binder, Each
from .member import Member
from .output import Output, carried, present
from ..planning.plan import Plan

SEEN = 256
"""Shapes of calls that an entry remembers as checked."""


class WideEntry:
    """One entry of a wide model: called as a method of the member is. Made by `ens.entry(name)` or `ens.<name>`.

    name: the method's. entry: what the manifest says of it. members: the members' names. programs: what runs, for whoever counts or times it.
    """

    def __init__(self, held: Held, name: str) -> None:
        self.name = name
        self.entry: Entry = held.entry(name)
        self.members = held.members
        self._held = held
        self._gate = held.gate
        self._binder = Binder(self.entry, len(held.chosen), held.device, known=held.manifest.state)
        self.programs = Programs(held, name, self._binder)
        self._seen: dict[Any, Bound] = {}  # what a call was like that passed all checks -> the program that answers it

    @property
    def plan(self) -> Plan:
        return self.programs.of("shared")[0].plan

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """The plans of a pattern, one a batch class."""
        return [b.plan for b in self.programs.of(pattern)]

    @property
    def backend(self) -> str:
        """What runs the programs of pattern `shared`: one name, or several where batch classes differ."""
        return "+".join(dict.fromkeys(b.backend for b in self.programs.of("shared")))

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"WideEntry({self.name} of {len(self)} members; {self._binder.takes_in}; {self.programs.running})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Every member sees the same inputs, but for those marked with `widepack.each`.

        Inputs: as the member's forward takes them. Returns: the member's structure, every leaf `[N, *the member's shape]` (a list of N where shapes differ).
        An entry that carries state takes it as `state=` and returns (answer, new state): {name: `[N, ...]`}, one a member in every pattern.
        Raises: InputError before anything runs.
        """
        if not kwargs and self._binder.plain(args):
            return self._answer(args, self._binder.none, None)
        state = kwargs.pop("state", None) if self._binder.states else None
        values, marks = self._binder.bind(args, kwargs)
        return self._answer(values, marks, state)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        """Member i sees `[i]` of every input. Inputs: `[N, ...]`, or lists of N tensors. Returns and raises: as a call."""
        if not kwargs and self._binder.plain(args):
            return self._answer(args, self._binder.all, None)
        state = kwargs.pop("state", None) if self._binder.states else None
        values, marks = self._binder.bind(
            [Each(a) if holds_tensor(a) else a for a in args], {k: Each(v) if holds_tensor(v) else v for k, v in kwargs.items()}
        )
        return self._answer(values, [True] * len(marks), state)

    def state(self, **sizes: int) -> dict[str, torch.Tensor]:
        """The states of this entry as they begin, `{name: [N, ...]}`: a buffer as each member's checkpoint has it, an input as zeros.

        sizes: of the dims that inputs among them have. Raises: UsageError.
        """
        self._held.must_be_open()
        begun = {self.entry.inputs[i].name: value for i, value in self.programs.initial().items()}
        with self._gate.passed():
            return self._binder.fresh(begun, sizes)

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any], pattern: str, state: Any = None) -> tuple[list[torch.Tensor], list[bool]]:
        """The inputs of a call as its program takes them, and which of them are one a member. Raises: InputError."""
        values, marks = self._binder.bind(tuple(args), dict(kwargs))
        marks = [True] * len(marks) if pattern == "each" else list(marks)
        values = list(values)
        if state is not None:
            self._binder.carry(values, marks, state)
        return values, marks

    @property
    def state_dims(self) -> set[str]:
        """The dims of the states that begin as zeros, or as the caller gives them."""
        return {d.letter for i in self._binder.carried for d in self._binder.leaves[i].dims if not isinstance(d, int)}

    def _answer(self, values: Sequence[torch.Tensor], marks: Sequence[bool], state: Any) -> Any:
        carries = self._binder.carried
        if carries:
            values, marks = list(values), list(marks)
            self._binder.carry(values, marks, state)
        # All checks and the choice of the program hang on this alone: a call like one before is not looked at again.
        like = (tuple(marks), *[(v.shape, v.dtype, v.device, v.layout) for v in values])
        program = self._seen.get(like) or self._check(values, marks, like)
        found = self._gate.run(program, values)
        if program.only >= 0 and not carries:
            return found[program.only]
        outputs = program.program.outputs
        answer = present(found, outputs, len(self.members), self.entry.result)
        if not carries:
            return answer
        return answer, {**state, **carried(found, self._binder.states, outputs, len(self.members), values)}

    def _check(self, values: Sequence[torch.Tensor], marks: Sequence[bool], like: Any) -> Bound:
        """Hold a call to the entry and find its program. like: what is remembered of it. Raises: InputError."""
        carries = self._binder.carried
        sizes = self._binder.check(values, marks)
        free = [m for i, m in enumerate(marks) if i not in carries]
        pattern = "shared" if not any(free) else "each" if all(free) else "mixed:" + "".join("e" if m else "s" for m in marks)
        program = self.programs.for_sizes(pattern, sizes)
        with self._held.lock:
            if not self._held.closed:
                if len(self._seen) >= SEEN:
                    self._seen.clear()
                self._seen[like] = program
        return program

    def probe(self) -> None:
        """Run the probe of both presets now, whether or not it passed here before. Raises: VerificationError."""
        with self._held.lock:  # no member is exchanged meanwhile
            for pattern in PATTERNS:
                self.programs.probe(pattern, self.programs.of(pattern), again=True)

    # ---------------------------------------------------------------- members and ensembles

    def member(self, member: int | str) -> Member:
        """One member, by number or name, as a plain module over the artifact's weights. Raises: UsageError."""
        self._held.must_be_open()
        place = self._held.index(member)
        program, values = self.programs.member(place)
        weights = {s.source: value for s, value in zip(program.weights, values, strict=True)}
        initial = {self.entry.inputs[s.input].name: self._held.own(s.initial, place) for s in self.entry.state if s.initial}
        return Member(self.members[place], self.entry, program, weights, self._held.device, initial, self._gate)

    def mean(self, *args: Any, of: str | None = "softmax", weights: Sequence[float] | None = None, **kwargs: Any) -> Any:
        """The members' mean answer, `[*the member's shape]`; (mean, new state) where the entry carries state.

        of: `softmax` (over the last dim, the usual mean of classifiers), `sigmoid`, or None for the answers themselves. weights: one a member.
        """
        return self._of(lambda y: _average(_apply(y, of), weights), args, kwargs)

    def std(self, *args: Any, of: str | None = "softmax", **kwargs: Any) -> Any:
        """The members' standard deviation (divided by N), `[*the member's shape]`; with state as `mean`."""
        return self._of(lambda y: _apply(y, of).std(0, correction=0), args, kwargs)

    def vote(self, *args: Any, **kwargs: Any) -> Any:
        """The class that most members choose, ties to the lowest number: argmax over the last dim, then the mode over members; with state as `mean`."""
        return self._of(lambda y: y.argmax(-1).mode(0).values, args, kwargs)

    def _of(self, figure: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: Any) -> Any:
        result = self(*args, **kwargs)
        if not self._binder.states:
            return figure(self._leaf(result))
        answer, state = result
        return figure(self._leaf(answer)), state

    def _leaf(self, result: Any) -> torch.Tensor:
        if isinstance(result, (Output, Mapping)):
            result = result["logits"] if "logits" in result else result[next(iter(result))]
        while isinstance(result, (tuple, list)) and result and self.entry.outputs[0].kind != "ragged":
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise InputError("the members' outputs differ in shape, or are no tensor: there is no mean of them")
        return result

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        """Bind the programs of these patterns now instead of at the first call."""
        for pattern in patterns:
            self.programs.of(pattern)

    def compiled(self, pattern: str = "shared") -> list[Path]:
        """Where a pattern's compiled programs lie, one folder each; bound, and compiled where that was asked for, if they are not yet."""
        return [b.place for b in self.programs.of(pattern) if b.place is not None]

    def forget(self) -> None:
        """Let go of bound programs."""
        self._seen.clear()
        self.programs.forget()


def holds_tensor(value: Any) -> bool:
    """Whether an input is a tensor, or has one in it."""
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(holds_tensor, value)))


def _apply(x: torch.Tensor, of: str | None) -> torch.Tensor:
    if of == "softmax":
        return x.softmax(-1)
    if of == "sigmoid":
        return x.sigmoid()
    if of is not None:
        raise UsageError(f"of={of!r} is unknown; known: softmax, sigmoid, None")
    return x


def _average(x: torch.Tensor, weights: Sequence[float] | None) -> torch.Tensor:
    if weights is None:
        return x.mean(0)
    if len(weights) != x.shape[0]:
        raise UsageError(f"{len(weights)} weights for {x.shape[0]} members; give one a member")
    w = torch.tensor(weights, dtype=x.dtype, device=x.device)
    averaged: torch.Tensor = torch.tensordot(w / w.sum(), x, 1)
    return averaged
