"""Defines `ExportSubject`: a program to export, its trial inputs, and the answers to compare with.

| members | program | an input | an answer |
|---|---|---|---|
| all, or some | the wide program of a pattern | `[N, ...]` if one for each member | `[N, ...]` |
| one | the member program | as in the manifest | the member's |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.entry import Entry
from widepack_artifacts.opset import EXTRA
from widepack_artifacts.reader import Reader

from ..backends.task import first_line
from ..errors import LoweringError, ProbeError, UsageError, VerificationError, WidepackError
from ..inference.load import load
from ..inference.model import WideModel
from ..inference.programs.bound_program import StoredProgram
from ..inference.programs.merged_weights import SPLIT
from ..ir.fake_values import CPU
from ..ir.random_ops import uses_random_ops
from ..runtime.admission import check_member_run, guarded
from ..runtime.executable import Executable
from ..spec.entries import FORWARD
from ..verification import probe as probes

Run = Callable[[Sequence[torch.Tensor]], list[Any]]
"""Takes inputs, returns outputs, both in the manifest's order. A Ragged output is a list of N tensors."""


@dataclass(kw_only=True)
class Written:
    """A file that was written.

    inputs, outputs: names and types, as the file has them. initializers: how many weights. derived: how many
    of them the weight prologue computed. opset: of an ONNX model, else 0. data_files: files of weights beside
    it. new_files: those of them that did not exist before.
    """

    inputs: list[str]
    outputs: list[str]
    initializers: int
    derived: int = 0
    opset: int = 0
    data_files: list[Path] = field(default_factory=list)
    new_files: list[Path] = field(default_factory=list)

    def discard(self) -> None:
        """Removes the new files beside a file that is not kept."""
        for path in self.new_files:
            path.unlink(missing_ok=True)


@contextmanager
def lowering_error(what: str, why: Callable[[BaseException], str] | None = None) -> Iterator[None]:
    """Turns errors of another package into LoweringError. what: failed, for the message. why: describes the
    error; default: its type and first line.
    """
    try:
        yield
    except (WidepackError, OSError):
        raise
    except Exception as e:
        raise LoweringError(f"{what}: {why(e) if why else f'{type(e).__name__}: {first_line(e)}'}") from e


class ExportSubject:
    """A program of an artifact that is exported.

    program: over the artifact's weights. values: the weights by source: a tensor, or a list of N. kinds: of
    each output: `stacked`, `ragged`, or `own` for a single member. members: their number, 0 for a single
    member. chosen: the members' numbers in the artifact.
    """

    def __init__(self, model: WideModel, name: str, pattern: str, single: bool) -> None:
        self.model, self.name, self.pattern, self.single = model, name, pattern, single
        wide = model.entry(name)
        self._programs = wide.programs
        self.artifact = wide.programs.artifact
        self.entry: Entry = wide.entry
        self.chosen = self.artifact.chosen
        self.members = 0 if single else len(self.chosen)
        if uses_random_ops(self._programs.source.member(0)[0]):
            raise UsageError(
                f"{self.artifact.reader.root}: entry {name} draws random numbers at every call "
                "(dropout that is on), so that the answers of an exported file cannot be compared; "
                "build with dropout off to export"
            )
        if single:
            self.program, values = self._programs.source.member(0)
            check_member_run(self.title, self.program, [*values, *self.random_inputs(self.example)])
            self.values: dict[str, Any] = {
                s.source: v for s, v in zip(self.program.weights, values, strict=True)
            }
            self._eager = Executable(self.program, self.values, CPU).run
        else:
            bound = self._programs.binder.bind(
                pattern, StoredProgram(*self._programs.source.lower(pattern)[0])
            )
            self.program, self._eager = bound.program, bound.run
            self.values = {s.source: self.artifact.weights.get(s.source) for s in self.program.weights}
        self.kinds = [
            "own" if single else "ragged" if o.kind == "ragged" else "stacked" for o in self.program.outputs
        ]

    @property
    def title(self) -> str:
        """The artifact, the entry, and the member or pattern, for messages."""
        part = f"member {self.model.members[0]}" if self.single else f"pattern {self.pattern}"
        return f"{self.artifact.reader.root}: the program of entry {self.name}, {part}"

    @property
    def dims(self) -> dict[str, tuple[int, int | None]]:
        """The least and the largest size of each dim."""
        return {d: (v.min, v.max) for d, v in self.entry.dims.items()}

    @property
    def example(self) -> dict[str, int]:
        """Sizes of at least 2 that satisfy all guards."""
        return {d: max(2, v.example) for d, v in self.entry.dims.items()}

    @property
    def stacked_inputs(self) -> list[bool]:
        """Whether each input has the member axis."""
        states = self._programs.inputs.binder.carried
        return [
            not self.single and (self.pattern == "each" or k in states) for k in range(len(self.entry.inputs))
        ]

    def expected(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the answers of the artifact's program. Shared outputs are expanded to `[N, ...]`."""
        outputs = self._eager(*inputs)
        if self.single:
            return outputs
        return [
            y.expand(self.members, *y.shape) if o.kind == "shared" else y
            for y, o in zip(outputs, self.program.outputs)
        ]

    def random_inputs(self, sizes: dict[str, int]) -> list[torch.Tensor]:
        """Returns random inputs of a call at these sizes."""
        return self._call_inputs(self._programs.inputs.drawn(self.pattern, sizes))

    def _call_inputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Removes the member axis from the states of a single member."""
        states = self._programs.inputs.binder.carried
        return [(x[0] if self.single and k in states else x).contiguous() for k, x in enumerate(inputs)]

    def trial_sizes(self) -> Iterator[dict[str, int]]:
        """Yields two more sizes of the batch than the probe's, and one more of every other dim."""
        batch = self._programs.inputs.letter
        for letter, dim in self.entry.dims.items():
            candidates = (
                (5, 1, 3, 7, 2)
                if letter == batch
                else (dim.example + 1, dim.example - 1, 2 * dim.example, dim.min)
            )
            valid = [
                s
                for s in dict.fromkeys(candidates)
                if s >= dim.min and s != dim.example and self._fits({**self.example, letter: s})
            ]
            for s in valid[: 2 if letter == batch else 1]:
                yield {**self.example, letter: s}

    def _fits(self, sizes: dict[str, int]) -> bool:
        """Returns whether sizes satisfy the bounds of dims and the guards."""
        in_bounds = all(
            v.min <= sizes[d] and (v.max is None or sizes[d] <= v.max) for d, v in self.entry.dims.items()
        )
        return in_bounds and all(guard_forms.holds(g.expr, sizes) for g in self.entry.guards)

    def compare(self, run: Run, form: str, runner: str) -> str:
        """Compares a written program with the probe, and with the artifact's program at other sizes.

        form: of the written program, for messages. runner: what runs it. Returns: what was compared, in
        words, or `not checked: ` and the reason. Raises: VerificationError, and whatever `run` raises.
        """
        title = f"{self.title}, written as {form},"
        compared = ["the probe"] if self._compare_probe(run, title) else []
        for sizes in self.trial_sizes():
            words = ", ".join(f"{d} = {s}" for d, s in sizes.items())
            try:
                inputs = self.random_inputs(sizes)
                self._check_costs(inputs)
                expected = self.expected(inputs)
            except (RuntimeError, ValueError, IndexError):
                continue  # the members do not take random inputs at these sizes
            difference = self._programs.probe_check.differ(self.pattern, run(inputs), expected)
            if difference:
                raise VerificationError(
                    f"{title} differs from the artifact's program at {words}: {difference}"
                )
            compared.append(words)
        if not compared:
            return "not checked: the artifact has no probe, and no other sizes to try"
        return f"{runner}: {'; '.join(compared)}"

    def _check_costs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Checks what the program takes on these inputs. Raises: OverBudget."""
        values = [self.values[s.source] for s in self.program.weights]
        check_member_run(self.title, self.program, [*values, *inputs])

    def _compare_probe(self, run: Run, title: str) -> bool:
        """Compares a program with the probe. Returns whether a probe exists. Raises: VerificationError."""
        probe_check, inputs_of = self._programs.probe_check, self._programs.inputs
        if self.artifact.probe is None:
            return False
        bounds = probe_check.bounds(self.pattern)
        if bounds is None:
            raise ProbeError(
                f"{self.artifact.reader.root}: entry {self.name} has a probe, but no record of "
                "its verification; build the artifact again"
            )
        inputs = self._call_inputs(inputs_of.of_probe(self.pattern))
        self.expected(inputs)  # with checks of operands, which the written program does not have
        answers = run(inputs)
        try:
            with guarded(f"{self.title}: the probe"):
                shaped = [[y] for y in answers] if self.single else answers
                probes.check(
                    probe_check.answers(self.pattern),
                    inputs_of.probe_prefix(self.pattern),
                    shaped,
                    self.kinds,
                    bounds,
                    self.chosen,
                )
        except ProbeError as e:
            raise VerificationError(f"{title} does not answer as the artifact's members do: {e}") from e
        return True

    def unchecked(self, with_dims: bool = True) -> list[str]:
        """Returns in words what widepack checks at every call: bounds of dims (if `with_dims`), guards, and
        bounds of integer inputs.
        """
        dims = [
            f"{v.min} <= {d}" + ("" if v.max is None else f" <= {v.max}")
            for d, v in self.entry.dims.items()
            if v.min > 1 or v.max is not None
        ]
        integers = [
            f"{i.name} in {i.low}..{i.high}"
            for i in self.entry.inputs
            if i.low is not None and i.high is not None
        ]
        return [
            *(dims if with_dims else []),
            *(guard_forms.text(g.expr) for g in self.entry.guards),
            *integers,
        ]


def subject_of(
    path: str | PathLike[str],
    entry: str,
    pattern: str,
    member: int | str | None,
    members: Sequence[int | str] | None,
    strategies: str,
) -> ExportSubject:
    """Opens one program of an artifact. All files are checked against their hashes, because an exported
    file has no hashes.

    strategies: `wide`, or `loop` for every op once for each member. The wide program of a fleet reads the
    base and the factors. Raises: UsageError, ArtifactError.
    """
    factored = Reader(path).manifest.factored.weights if member is None else ()
    selected = None if member is None and members is None else [member] if member is not None else members
    model = load(
        path,
        members=selected,
        strategies=list(SPLIT) if factored and strategies == "wide" else strategies,
        backend="eager",
        verify="hashes",
        warmup=False,
        allow_ops=tuple(EXTRA),
    )
    name = entry or (FORWARD if FORWARD in model.entries else "")
    if not name:
        if len(model.entries) > 1:
            raise UsageError(
                f"this model has no entry {FORWARD}; its entries are {', '.join(model.entries)}. "
                f"Choose one, for example entry={model.entries[0]!r}"
            )
        name = model.entries[0]
    return ExportSubject(model, name, pattern, member is not None)
