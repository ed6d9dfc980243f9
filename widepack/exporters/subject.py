"""`Subject`: one program of an artifact that is written in another form, the calls that the written file is tried with, and what its answers are held to.

| of | program | an input | an answer |
|---|---|---|---|
| all members, or some | the wide program of a pattern | as the manifest says, `[N, ...]` where it is one a member | `[N, ...]`, a list of N where Ragged |
| one member | the member's own | as the manifest says | the member's own |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.manifest import Entry
from widepack_artifacts.opset import EXTRA

from ..verification import probe as probes
from ..runtime.admission import guarded
from ..spec.entries import FORWARD
from ..inference.programs import Wide
from ..errors import ProbeError, UsageError, VerificationError
from ..inference.load import load
from ..ir.fake_values import CPU
from ..ir.at_rest import draws
from ..runtime.graph_module import Executable
from ..inference.model import WideModel

Run = Callable[[Sequence[torch.Tensor]], list[Any]]
"""Inputs in the manifest's order -> outputs in the manifest's order, a list of N tensors where Ragged."""


class Subject:
    """program: over the artifact's own weights. values: of each, by its source: a tensor, or a list of N. kinds: of its outputs, as they are written: `stacked`,
    `ragged`, or `own` of a single member. members: 0 for a single one. chosen: the members' numbers in the artifact."""

    def __init__(self, model: WideModel, name: str, pattern: str, single: bool) -> None:
        self.model, self.name, self.pattern, self.single = model, name, pattern, single
        wide = model.entry(name)
        self._programs = wide.programs
        self.held = wide.programs.held
        self.entry: Entry = wide.entry
        self.chosen = self.held.chosen
        self.members = 0 if single else len(self.chosen)
        if draws(self._programs.member(0)[0]):
            raise UsageError(
                f"{self.held.reader.root}: entry {name} draws random numbers at every call (dropout that is on), and what is written in another form is held to answers; build with dropout off to export"
            )
        if single:
            self.program, values = self._programs.member(0)
            self.values: dict[str, Any] = {s.source: v for s, v in zip(self.program.weights, values, strict=True)}
            self._eager = Executable(self.program, self.values, CPU).run
        else:
            bound = self._programs.bind(pattern, Wide(*self._programs.lower(pattern)[0]))
            self.program, self._eager = bound.program, bound.run
            self.values = {s.source: self.held.weight(s.source) for s in self.program.weights}
        self.kinds = ["own" if single else "ragged" if o.kind == "ragged" else "stacked" for o in self.program.outputs]

    @property
    def said(self) -> str:
        whose = f"member {self.model.members[0]}" if self.single else f"pattern {self.pattern}"
        return f"{self.held.reader.root}: the program of entry {self.name}, {whose}"

    @property
    def dims(self) -> dict[str, tuple[int, int | None]]:
        return {d: (v.min, v.max) for d, v in self.entry.dims.items()}

    @property
    def example(self) -> dict[str, int]:
        """Sizes of at least 2 at which all guards hold."""
        return {d: max(2, v.example) for d, v in self.entry.dims.items()}

    @property
    def own_inputs(self) -> list[bool]:
        """Which inputs have the member axis in front."""
        states = self._programs.binder.carried
        return [not self.single and (self.pattern == "each" or k in states) for k in range(len(self.entry.inputs))]

    def wanted(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """What the flat graph answers, Shared outputs expanded."""
        found = self._eager(*inputs)
        if self.single:
            return found
        return [y.expand(self.members, *y.shape) if o.kind == "shared" else y for y, o in zip(found, self.program.outputs)]

    def drawn(self, sizes: dict[str, int]) -> list[torch.Tensor]:
        """A call's inputs at these sizes."""
        made = self._programs.probing.drawn(self.pattern, sizes)
        states = self._programs.binder.carried
        return [(x[0] if self.single and k in states else x).contiguous() for k, x in enumerate(made)]

    def sizes(self) -> Iterator[dict[str, int]]:
        """Two sizes of the batch beside the probe's, and one more of every other dim."""
        batch = self._programs.letter
        for letter, dim in self.entry.dims.items():
            tried = [
                s for s in ((5, 1, 3, 7, 2) if letter == batch else (dim.example + 1, dim.example - 1, 2 * dim.example, dim.min)) if s >= dim.min
            ]
            fits = [s for s in dict.fromkeys(tried) if s != dim.example and self._fits({**self.example, letter: s})]
            for s in fits[: 2 if letter == batch else 1]:
                yield {**self.example, letter: s}

    def _fits(self, sizes: dict[str, int]) -> bool:
        inside = all(v.min <= sizes[d] and (v.max is None or sizes[d] <= v.max) for d, v in self.entry.dims.items())
        return inside and all(guard_forms.holds(g.expr, sizes) for g in self.entry.guards)

    def hold(self, run: Run, what: str) -> list[str]:
        """Hold a written program to the artifact: the probe's float64 answers by the bounds of the record, and the flat graph at `sizes`.

        what: the written program, for messages. Returns: what was tried, in words. Raises: VerificationError, and whatever `run` raises.
        """
        tried = ["the probe"] if self._hold_probe(run, what) else []
        for sizes in self.sizes():
            words = ", ".join(f"{d} = {s}" for d, s in sizes.items())
            try:
                inputs = self.drawn(sizes)
                want = self.wanted(inputs)
            except (RuntimeError, ValueError, IndexError):
                continue  # inputs that members do not take at these sizes
            wrong = self._programs.differ(self.pattern, self.program, run(inputs), want)
            if wrong:
                raise VerificationError(f"{what} differs from the artifact's program at {words}: {wrong}")
            tried.append(words)
        return tried

    def _hold_probe(self, run: Run, what: str) -> bool:
        """Whether there is a probe. Raises: VerificationError."""
        probing = self._programs.probing
        if self.held.probe is None:
            return False
        record = probing.record(self.pattern)
        if record is None:
            raise ProbeError(f"{self.held.reader.root} has a probe of entry {self.name}, but no record of its verification; build it again")
        inputs = probing.inputs(self.pattern)
        answers = run([(x[0] if self.single and k in self._programs.binder.carried else x).contiguous() for k, x in enumerate(inputs)])
        try:
            with guarded(f"{self.said}: the probe"):
                shaped = [[y] for y in answers] if self.single else answers
                probes.check(probing.answers(self.pattern), probing.at(self.pattern), shaped, self.kinds, record, self.chosen)
        except ProbeError as e:
            raise VerificationError(f"{what} does not answer as the artifact's members do: {e}") from e
        return True

    def unchecked(self, of_dims: bool = True) -> list[str]:
        """What widepack holds every call to, in words: bounds of dims (unless `of_dims` is False), conditions, and bounds of whole numbers."""
        bounds = [f"{v.min} <= {d}" + ("" if v.max is None else f" <= {v.max}") for d, v in self.entry.dims.items() if v.min > 1 or v.max is not None]
        numbers = [f"{i.name} in {i.low}..{i.high}" for i in self.entry.inputs if i.low is not None and i.high is not None]
        return [*(bounds if of_dims else []), *(guard_forms.text(g.expr) for g in self.entry.guards), *numbers]


def subject_of(
    path: str | PathLike[str], entry: str, pattern: str, member: int | str | None, members: Sequence[int | str] | None, strategies: str
) -> Subject:
    """Open an artifact for one of its programs. strategies: `wide`, or `loop` for every op once a member. Raises: UsageError, ArtifactError.

    Every file is held to its hash: what is written out has none that a reader could ask for.
    """
    some = None if member is None and members is None else [member] if member is not None else members
    model = load(path, members=some, strategies=strategies, backend="eager", verify="hashes", warmup=False, allow_ops=tuple(EXTRA))
    name = entry or (FORWARD if FORWARD in model.entries else "")
    if not name:
        if len(model.entries) > 1:
            raise UsageError(
                f"this model has no entry {FORWARD}; its entries are {', '.join(model.entries)}: say which one, entry={model.entries[0]!r}"
            )
        name = model.entries[0]
    return Subject(model, name, pattern, member is not None)
