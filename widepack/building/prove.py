"""Verifies one entry of a build: both comparisons of every program, small sizes, and the probe."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.entry import Rows
from widepack_artifacts.program import Program

from ..capture.pt2.factory import ExportedProgramFactory
from ..capture.trial import Trial, why_not
from ..errors import ArtifactError, CaptureError, CheckpointError, VerificationError
from ..ir.random_ops import random_nodes, uses_random_ops, without_randomness
from ..ir.tensor_type import tensor_type
from ..lowering.lower import Lowered
from ..lowering.wide_programs import LoweredProgram, same_programs
from ..planning.plan import Plan
from ..rows.trials import RowTrials
from ..rows.verdict import ExaminedEntry
from ..runtime.admission import check_member_run
from ..runtime.kernel_count import kernels
from ..spec.draws import draw_all
from ..spec.entries import PATTERNS
from ..system.progress import Stages
from ..system.readahead import asking
from ..verification import approximation, calls, module_run, probe, small_sizes
from ..verification.parts import all_weights, parts
from ..verification.record import APPROXIMATION, program_key
from ..verification.reference import ComparedOutputs, ReferenceAnswers
from ..verification.subject import Subject, VerifiedCall, subject_of
from .build_weights import BuildEntry
from .captures import filled_member
from .write import WeightFiles

WAY_OUT = "Nothing was written; please report it, or build with --strategy loop"


@dataclass(frozen=True)
class ProvedEntry:
    """A verified entry.

    entry: with the dims and conditions that verification corrected. wides: its verified wide programs.
    record: of the comparisons, for the manifest. probe: the probe's calls by pattern. kernels: how many run
    in one call at batch 2, of one member and of the wide program. rows: whether the rows of a batch are
    independent.
    """

    entry: BuildEntry
    wides: list[LoweredProgram]
    record: dict[str, Any]
    probe: dict[str, probe.Answers]
    kernels: tuple[int, int]
    rows: Rows

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.entry.entry


def prove(
    entry: BuildEntry,
    wides: list[LoweredProgram],
    lower_plain: Callable[[], list[LoweredProgram]],
    written: WeightFiles,
    stages: Stages,
    tolerance: float | None = None,
) -> ProvedEntry:
    """Makes both comparisons of every program of an entry.

    tolerance: the declared part of what the fine-tunes change that approximate weights may change.
    lower_plain: lowers the programs without channel-packed convolutions.

    Raises: VerificationError; CaptureError.
    """
    with warnings.catch_warnings():
        # Warnings of members at trial sizes do not concern the user of this build.
        warnings.simplefilter("ignore")
        subject = _subject(entry, written)
        entry = _corrected(entry, subject)
        subject = replace(
            _subject(entry, written),
            functions=subject.functions,
            readahead=asking([r.weight for r in entry.table.rows], written.paths, entry.count),
        )
        reference = ReferenceAnswers(entry, subject, written.weights, calls.calls(subject, PATTERNS), stages)
        approximate = _approximation(entry, reference, tolerance)
        wides, (compared, _) = or_plain(
            lambda some: check_programs(reference, _programs(entry, some), WAY_OUT), wides, lower_plain
        )
        return ProvedEntry(
            entry,
            wides,
            {**_record(entry, reference, compared), **approximate},
            reference.probed(),
            _kernels(entry, wides, written.weights, reference.small("shared")),
            _rows_of(subject, [type_ for _, type_ in entry.captured.outputs]),
        )


def at_rest(program: Program, entry: str) -> Program:
    """Returns the program without its random draws.

    Raises: CaptureError if an op has no form without them.
    """
    found = without_randomness(program)
    if found is None:
        node = next(
            n for n in random_nodes(program) if without_randomness(replace(program, nodes=(n,))) is None
        )
        at = f" at {node.source}" if node.source else ""
        raise CaptureError(
            f"{entry} draws random numbers by {node.op}{at}, an op that widepack cannot replace by fixed"
            f" values, so {entry} cannot be verified; make the random numbers an input of {entry}"
        )
    return found


def _subject(entry: BuildEntry, written: WeightFiles) -> Subject:
    names = entry.aligned.names
    exported = isinstance(entry.factory, ExportedProgramFactory)
    subject = subject_of(
        entry,
        names,
        written.weights,
        module=partial(filled_member, entry.factory, entry.aligned),
        before=_check_exported if exported else lambda subject: None,
        makes=entry.captured.makes,
    )
    programs = [at_rest(p, entry.entry) for p in entry.programs] if entry.dropout else entry.programs
    same = entry.captures.same_program(names)
    return replace(subject, programs=programs, same_program=same, rests=entry.dropout)


def _check_exported(subject: Subject) -> None:
    """Checks what programs of `.pt2` files take, before one runs. Raises: CheckpointError."""
    try:
        check_costs("the exported program", subject)
    except ArtifactError as e:
        raise CheckpointError(
            f"{e}. If you trust the file, give a factory that loads it: model=lambda: torch.export.load(path)"
            ".module()"
        ) from None


def check_costs(title: str, subject: Subject) -> None:
    """Checks what the member programs of an untrusted file take, at the sizes of the example, and at the
    largest batch of a verification.

    title: what the programs are, in messages. Raises: ArtifactError naming the node that takes too much.
    """
    sizes = [subject.sizes]
    if subject.batch and subject.fits(large := {**subject.sizes, subject.batch: calls.SAMPLES}):
        sizes.append(large)
    for number in range(len(subject.programs)):
        for at in sizes:
            check_call(title, subject, draw_all(subject.sources, at, 1), number)


def check_call(title: str, subject: Subject, inputs: Sequence[torch.Tensor], number: int = 0) -> None:
    """Checks what a member program takes on these inputs: `Subject.before_call`.

    number: of the program. Raises: OverBudget.
    """
    weights = subject.arguments(list(subject.signatures).index(number))
    check_member_run(title, subject.programs[number], [*weights, *inputs])


def _corrected(entry: BuildEntry, subject: Subject) -> BuildEntry:
    """Returns the entry without needless conditions, and with the dims that must be at least 2.

    Raises: CaptureError if member 0 does not take the example.
    """
    # Member 0 alone runs at many small sizes, so its module is made once.
    member = cache(partial(filled_member, entry.factory, entry.aligned, 0))
    subject = replace(subject, module=lambda i: member())
    _check_example(entry, subject)
    return entry.at_small_sizes(*small_sizes.corrections(subject, entry))


@dataclass(frozen=True)
class ProgramToCheck:
    """A wide program to compare with the members.

    plan: the plan that it was lowered by. lowered: its lowering, if it was made now. members: the parts of
    the members that it is for; none for all members. may_fail: a key by which a failure is noted; "" if a
    failure is an error.
    """

    pattern: str
    program: Program
    plan: Plan
    lowered: Lowered | None = None
    members: list[range] = field(default_factory=list)
    may_fail: str = ""

    @classmethod
    def of(cls, wide: LoweredProgram) -> ProgramToCheck:
        """Returns a program that was made now."""
        return cls(wide.pattern, wide.lowered.program, wide.plan, wide.lowered, wide.members)


Checked = tuple[dict[str, ComparedOutputs], dict[str, str]]
"""The compared outputs by pattern and number, and why programs failed that may fail."""


def check_programs(reference: ReferenceAnswers, programs: Iterable[ProgramToCheck], way_out: str) -> Checked:
    """Makes comparison (b) of wide programs. way_out: the end of an error.

    Raises: VerificationError if a program fails that may not.
    """
    compared: dict[str, ComparedOutputs] = {}
    failed: dict[str, str] = {}
    for number, one in enumerate(programs):
        try:
            compared[program_key(one.pattern, number)] = reference.check(
                one.pattern, one.program, one.plan, one.lowered, way_out, one.members
            )
        except VerificationError as e:
            if not one.may_fail:
                raise
            failed[one.may_fail] = str(e)
    return compared, failed


def or_plain(
    check: Callable[[list[LoweredProgram]], Checked],
    wides: list[LoweredProgram],
    lower_plain: Callable[[], list[LoweredProgram]],
) -> tuple[list[LoweredProgram], Checked]:
    """Makes comparison (b); if it fails, again with the programs without channel-packed convolutions.

    These add up in another order, which some networks do not tolerate. Returns: the programs that passed, and
    what was measured. Raises: VerificationError.
    """
    try:
        return wides, check(wides)
    except VerificationError:
        others = lower_plain()
        if same_programs(others, wides):
            raise
        return others, check(others)


def _programs(entry: BuildEntry, wides: Iterable[LoweredProgram]) -> Iterator[ProgramToCheck]:
    """Yields the wide programs of an entry; those that draw random numbers without their draws."""
    for one in map(ProgramToCheck.of, wides):
        if entry.dropout and uses_random_ops(one.program):
            one = replace(one, program=at_rest(one.program, entry.entry), lowered=None)
        yield one


def _approximation(entry: BuildEntry, reference: ReferenceAnswers, tolerance: float | None) -> dict[str, Any]:
    """Measures what approximate weights change. Returns: the record; empty if no weight is approximate.

    Raises: VerificationError if it is more than what was declared.
    """
    near = [row for row in entry.table.factored if row.factors.approximate]
    if not near or tolerance is None:
        return {}
    rows = approximation.measure(
        reference.own,
        lambda i: {row.weight.name: row.row.value(i) for row in near},
        {row.weight.name: row.factors.base for row in near},
    )
    approximation.check(rows, tolerance, entry.entry)
    names = [row.weight.name for row in near]
    return {APPROXIMATION: approximation.record(rows, tolerance, names)}


def _record(
    entry: BuildEntry, reference: ReferenceAnswers, compared: Mapping[str, ComparedOutputs]
) -> dict[str, Any]:
    """Returns the record of an entry's comparisons for the manifest."""
    capture: dict[str, Any] = {"capture": [p.record() for p in reference.own.captured]}
    if entry.dropout and any(map(uses_random_ops, entry.programs)):
        capture["draws"] = "at rest: programs that draw random numbers are compared without"
    return reference.record(capture, compared)


def _rows_of(subject: Subject, outputs: Sequence[str]) -> Rows:
    """Returns whether the rows of an entry's batch are independent. outputs: the type of each output."""

    def trials(number: int, letter: str) -> RowTrials:
        """Returns the trials of a member program, by its number."""
        member = list(subject.signatures).index(number)
        run, run_float64 = partial(subject.answers, member), subject.float64_function(member)
        types = [t for t in map(tensor_type, outputs) if t is not None]  # others are refused before
        return RowTrials(run, run_float64, subject.sources, types, letter)

    return ExaminedEntry(subject.programs, subject.sizes, subject.fits, outputs, trials).rows()


def _check_example(entry: BuildEntry, subject: Subject) -> None:
    """Refuses an example that member 0 does not take. Raises: CaptureError.

    Only members that are torch.export programs are checked: other members ran the example before their
    capture.
    """
    if not isinstance(entry.factory, ExportedProgramFactory) or subject.module is None:
        return
    inputs = calls.like_example(subject, 0)
    try:
        module_run.run_module(subject.module(0), subject, inputs)
    except Exception as e:
        module = subject.module(0)
        leaves = [replace(leaf, example=x) for leaf, x in zip(entry.captured.inputs, inputs)]
        args, kwargs = subject.bind(inputs)
        why = why_not(Trial(module, entry.entry, args, kwargs, leaves, entry.sizes))
        raise CaptureError(
            why or f"{type(module).__name__} does not take the example: {type(e).__name__}: {e}"
        ) from e


def _kernels(
    entry: BuildEntry, wides: Sequence[LoweredProgram], weights: weight_files.Weights, call: VerifiedCall
) -> tuple[int, int]:
    """Counts the kernels of one call of member 0, and of the first wide program of pattern `shared`."""

    def of_members(members: range, program: Program) -> int:
        values = all_weights(program, weights, entry.count, members)
        return kernels(program, values, call.stacked(members))

    wide = next(w for w in wides if w.pattern == "shared")
    programs, every = entry.of_pattern("shared"), range(entry.count)
    if len(parts(programs, every, wide.lowered.program, wide.plan, wide.lowered)) == 1:
        total = of_members(every, wide.lowered.program)
    else:
        # The kernels of a loop grow linearly with the members, so two small counts give the total.
        two, three = (
            of_members(range(n), replace(programs, signatures=entry.signatures[:n]).lower(wide.plan).program)
            for n in (2, 3)
        )
        total = two + (entry.count - 2) * (three - two)
    program = entry.programs[entry.signatures[0]]
    return kernels(program, entry.weights_of(0, weights), call.inputs[0]), total
