"""Replaces one member of a loaded model by another checkpoint while calls go on: `ens.swap`.

1. The checkpoint is opened and compared with the artifact's table: names, shapes, dtypes, ties, and the bits
   of weights that all members share.
2. The new member answers the probe's inputs with each entry's own program, in its dtype and in float64. The
   answers must be finite where those of other members are, and as close to float64 as a build requires.
3. All new values of bound programs are computed (`weight_exchange.py`). A program that is bound meanwhile is
   included. Other processes that swap the same member agree, or the swap ends here.
4. The gate closes: calls in flight end, and new ones wait. Slices are written and values exchanged. The gate
   opens. This time is the pause.
5. The wide programs answer the probe's inputs again, and are compared with the new member's float64 answers.
   After a wrong answer the old weights are restored, also in what was bound or copied since then. So they
   are if another process does not agree.

The artifact does not change: its files are mapped privately, so that only this process has the new member.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.errors import some
from widepack_artifacts.manifest import Member

from ...backends.graph_capture import ONE_CAPTURE
from ...checkpoints.new_member import NewMember, NewMemberRequest
from ...checkpoints.new_member import opening as opening
from ...checkpoints.unused_names import unused_names, unused_text
from ...errors import MemberMismatch, UsageError, VerificationError
from ...fleet.open_member import open_new_member
from ...ir.random_ops import uses_random_ops
from ...spec.entries import PATTERNS
from ...system.autocast import plain_modes
from ...system.progress import StageClock
from ...verification import probe as probes
from ...verification.record import OutputBounds
from ..calibration_record import CALIBRATION
from ..entry_programs import EntryPrograms
from ..open_artifact import OpenArtifact, Replacement
from ..programs.bound_program import BoundProgram
from ..programs.member_runs import OwnAnswers
from .new_weights import NewWeights, changed_weights, check_own_extra, checked_answers
from .weight_exchange import MemberUpdate, WeightChanges

_Bound = tuple[EntryPrograms, str, BoundProgram]
"""An entry, a pattern, and a program that is bound for it."""


@dataclass(frozen=True)
class SwapReport:
    """What `WideModel.swap` did.

    Attributes:
        member: The member's name.
        checkpoint: Where the new weights came from.
        seconds: The time of each stage: `open`, `check`, `derive`, `wait` (for calls in flight), `copy`,
            `verify`.
        pause: The seconds for which new calls waited: `wait` and `copy`.
        bytes: How many bytes were written in the pause.
        weights: How many weights of the member differ from those before.
        exchanged: How many values were replaced as a whole.
        unused: How many names in the checkpoint no member uses, by patterns such as `model_ema.*`.
        uncalibrated: Whether the artifact's calibration no longer counts here: it was of the member before.

    Example:
        >>> report = ens.swap("fold0", "new.pt")
        >>> print(f"{1000 * report.pause:.1f} ms")
    """

    __module__ = "widepack"  # pickles name the public place

    member: str
    checkpoint: str
    seconds: Mapping[str, float]
    pause: float
    bytes: int
    weights: int
    exchanged: int
    unused: dict[str, int] = field(default_factory=dict)
    uncalibrated: bool = False

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {1000 * s:.1f}" for name, s in self.seconds.items())
        return (
            f"{self.member} is {self.checkpoint}: {self.weights} weights, {self.bytes:,} bytes written "
            f"in a pause of {1000 * self.pause:.1f} ms (ms: {stages})"
            f"{'; left out: ' + unused_text(self.unused) if self.unused else ''}"
            f"{'; the calibration no longer counts' if self.uncalibrated else ''}"
        )


def swap(
    artifact: OpenArtifact,
    entries: Sequence[EntryPrograms],
    member: int | str,
    checkpoint: str | Path,
    how: NewMemberRequest,
    agreed: Callable[[], None],
) -> SwapReport:
    """Replaces a loaded member by a checkpoint.

    Args:
        artifact: The open artifact.
        entries: The programs of every entry.
        member, checkpoint: What is replaced, and by what.
        how: How the checkpoint is opened.
        agreed: Is called before the exchange, and when the new member's answers are verified.

    Returns:
        What was done.

    Raises:
        as `WideModel.swap`; what `agreed` raises, and then the old member stays.
    """
    place = artifact.index(member)
    for e in entries:
        if uses_random_ops(e.source.member(place)[0]):
            raise UsageError(
                f"swap: entry {e.name} draws random numbers at every call, so that the new member's answers "
                "cannot be compared while others call; build another artifact"
            )
    with artifact.swapping, plain_modes():
        artifact.check_open()
        artifact.check_unchanged()
        if artifact.manifest.factored.weights and not artifact.factors:
            raise UsageError(
                "swap: this artifact stores factors, and a load in a wider dtype runs whole weights; load"
                " without dtype to swap members"
            )
        stages = StageClock()
        new = open_new_member(artifact.reader, artifact.weights.files, checkpoint, how)
        if new.set_by_eval:
            raise MemberMismatch(
                f"checkpoint {checkpoint}: eval() of the model sets {some(new.set_by_eval)} beside"
                " the weights, and a swap does not compare the answers of the member's own module with those"
                " of the programs, which may depend on it: use `widepack update` with --model, which does"
            )
        if how.model is not None:
            check_own_extra(artifact, entries, place, new, how)
        report = _Swap(artifact, entries, place, checkpoint, stages, agreed).run(new)
        ignore = (*artifact.manifest.state_dicts.ignored, *how.ignore)
        uncalibrated = CALIBRATION in artifact.manifest.provenance and bool(artifact.swapped)
        return replace(report, unused=unused_names([new.checkpoint], ignore), uncalibrated=uncalibrated)


class _Swap:
    """One swap of one member."""

    def __init__(
        self,
        artifact: OpenArtifact,
        entries: Sequence[EntryPrograms],
        place: int,
        checkpoint: str | Path,
        stages: StageClock,
        agreed: Callable[[], None],
    ) -> None:
        self.artifact, self.entries, self.place = artifact, entries, place
        self.checkpoint, self.stages, self.agreed = checkpoint, stages, agreed
        self.number = artifact.chosen[place]
        self._answers: dict[tuple[str, str], OwnAnswers] = {}  # of the new member, by entry and pattern
        self._before = artifact.replaced.get(self.number)  # of the old member, if it was swapped too

    def run(self, new: NewMember) -> SwapReport:
        """Runs all stages. Raises: as `WideModel.swap`."""
        artifact = self.artifact
        found = changed_weights(artifact, self.place, new, self.checkpoint)
        place = artifact.weights.place
        update = MemberUpdate(
            artifact,
            self.place,
            {n: place(v, f"checkpoint {self.checkpoint}: {n}") for n, v in found.stored.items()},
            {n: found.member[n] for n in found.factors},
            found.factors,
        )
        self.stages.done("open")
        name, source = artifact.members[self.place], str(self.checkpoint)
        file = Member(name, source, new.checkpoint.sha256(), new.checkpoint.bytes)
        old = self._before
        replacement = Replacement(
            file,
            found.unread,
            new.checkpoint.extra_state(),
            old.answers if old is not None else {},
            old.bounds if old is not None else {},
        )
        differing = len(found.member) + len(found.unread)
        if not found.member:
            self.agreed()
            self.agreed()
            artifact.replaced[self.number] = replacement
            return SwapReport(name, source, self.stages.seconds, 0.0, 0, differing, 0)
        for e in self.entries:
            for pattern in PATTERNS:
                self._answer(e, pattern, update, found)
        self.stages.done("check")
        changes, known, pause = self._replace(update, found, replacement)
        try:
            for e, pattern, bound in known:
                _verify(
                    artifact, self.place, e, pattern, bound, self._answers[e.name, pattern], self.checkpoint
                )
            self.stages.done("verify")
            self.agreed()
        except BaseException:
            self._restore(update, found, changes, [b for _, _, b in known])
            raise
        return SwapReport(
            name, source, self.stages.seconds, pause, changes.bytes, differing, changes.exchanged
        )

    def _answer(self, e: EntryPrograms, pattern: str, update: MemberUpdate, new: NewWeights) -> None:
        """Computes and checks the new member's answers. Raises: VerificationError."""
        if (e.name, pattern) not in self._answers:
            self._answers[e.name, pattern] = checked_answers(e, pattern, update, new, self.checkpoint)

    def _replace(
        self, update: MemberUpdate, new: NewWeights, replacement: Replacement
    ) -> tuple[WeightChanges, list[_Bound], float]:
        """Computes all new values, and exchanges them as soon as no program was bound meanwhile.

        Returns:
            the changes, the programs that they are of, and the pause in seconds. Raises: UsageError.
        """
        artifact, waiting = self.artifact, True
        while True:
            known = [(e, pattern, bound) for e in self.entries for pattern, bound in e.bound()]
            for e, pattern, _ in known:
                self._answer(e, pattern, update, new)
            changes = WeightChanges(update.canonical(new.stored))
            update.replace_factors(changes)
            for e, pattern, bound in known:
                update.changes(bound, changes, partial(e.binder.rebind, pattern))
            self.stages.done("derive")
            if waiting:
                waiting = False
                self.agreed()
            with artifact.lock:  # no program is bound meanwhile
                now = [b for e in self.entries for _, b in e.bound()]
                if now == [b for _, _, b in known] and not artifact.closed:
                    changes.written += update.copies(changes.written)  # of members that were made meanwhile
                    return changes, known, self._exchange(changes, replacement)
            if artifact.closed:
                raise UsageError("this model was closed while a member was swapped")

    def _exchange(self, changes: WeightChanges, replacement: Replacement) -> float:
        """Closes the gate, makes the changes, and opens it. Returns: the pause in seconds."""
        artifact, replacement = self.artifact, self._with_answers(replacement)
        self.stages.done("derive")
        began = time.perf_counter()
        with artifact.gate.shut():
            _synchronize(artifact)
            self.stages.done("wait")
            artifact.changes[self.place] += 1
            changes.apply()
            artifact.replaced[self.number] = replacement
            _synchronize(artifact)
            self.stages.done("copy")
        return time.perf_counter() - began

    def _with_answers(self, new: Replacement) -> Replacement:
        """Returns a replacement with the new member's answers to the probe's inputs."""
        tensors: dict[str, Tensor] = {}
        bounds: dict[str, Sequence[OutputBounds]] = {}
        for e in self.entries:
            for (entry, pattern), found in self._answers.items():
                if entry == e.name:
                    prefix = e.inputs.probe_prefix(pattern)
                    bounds[prefix] = found.bounds
                    for k, t in enumerate(found.truth):
                        tensors[f"{prefix}.y{k}.{self.number}"] = probes.thin(t.cpu(), 1)
        return replace(new, answers=tensors, bounds=bounds)

    def _restore(
        self,
        update: MemberUpdate,
        weights: NewWeights,
        changes: WeightChanges,
        known: Sequence[BoundProgram],
    ) -> None:
        """Restores the old member, also in what was bound or copied since the exchange."""
        with self.artifact.lock:
            since = WeightChanges()
            try:
                self._add_since(update, weights, changes, known, since)
            finally:
                with self.artifact.gate.shut():
                    _synchronize(self.artifact)
                    self.artifact.changes[self.place] += 1
                    changes.undo()
                    since.apply()
                    self.artifact.replaced.pop(self.number, None)
                    if self._before is not None:
                        self.artifact.replaced[self.number] = self._before
                    _synchronize(self.artifact)
                self.stages.done("put back")

    def _add_since(
        self,
        new: MemberUpdate,
        stored: NewWeights,
        changes: WeightChanges,
        known: Sequence[BoundProgram],
        since: WeightChanges,
    ) -> None:
        """Adds the old member's values for programs that were bound, and copies that were made, since the
        exchange.

        known: the programs that `changes` is of. since: gets the changes.
        """
        weights = self.artifact.weights
        # The first changes are those of the mapped files, one for each weight.
        before = {name: w.before for name, w in zip(stored.stored, changes.written)}
        old = MemberUpdate(
            self.artifact,
            new.place,
            {name: weights.place(value, f"weight {name}") for name, value in before.items()},
            stored.before,
        )
        since.written += old.copies(changes.written)
        for e in self.entries:
            e.probe_check.forget_cast()
            for pattern, bound in e.bound():
                if any(bound is b for b in known):
                    continue
                try:
                    old.changes(bound, since, partial(e.binder.rebind, pattern))
                except UsageError:  # the compiled program cannot take another member: a new one replaces it
                    values = {s.source: old.weight(s.source) for s in bound.program.weights}
                    new_run = e.binder.rebind(pattern, bound, values, new.place)
                    since.replace(bound.replace_runnable, new_run, bound.runnable, 1)


def _synchronize(artifact: OpenArtifact) -> None:
    """Waits for kernels on the GPU: those of earlier calls, or those that wrote the new values."""
    if artifact.device.type == "cuda":
        with ONE_CAPTURE:  # to wait for a device is an error while another model captures a graph on it
            torch.cuda.synchronize(artifact.device)


def _verify(
    artifact: OpenArtifact,
    place: int,
    e: EntryPrograms,
    pattern: str,
    bound: BoundProgram,
    member_answers: OwnAnswers,
    path: str | Path,
) -> None:
    """Compares a wide program's answers for the new member with its float64 answers. Raises:
    VerificationError.
    """
    program = f"checkpoint {path}: the wide program ({e.name}, {pattern})"
    try:
        answers = artifact.gate.run(bound, e.inputs.of_probe(pattern))
    except (RuntimeError, IndexError, ValueError) as error:
        raise VerificationError(
            f"{program} fails with these weights, and the old member is restored: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    kinds = [o.kind for o in bound.program.outputs]
    alone = [a if kind == "shared" else a[place : place + 1] for a, kind in zip(answers, kinds)]
    prefix, number = e.inputs.probe_prefix(pattern), artifact.chosen[place]
    tensors = {f"{prefix}.y{k}.{number}": probes.thin(t.cpu(), 1) for k, t in enumerate(member_answers.truth)}
    bounds = e.probe_check.bounds(pattern) or member_answers.bounds
    try:
        if bound.int8:
            e.probe_check.weight_errors(pattern, bound)
            return
        probes.check(tensors, prefix, alone, kinds, bounds, [number])
    except VerificationError as error:
        raise VerificationError(
            f"{program} gives wrong answers with these weights, and the old member is restored: {error}"
        ) from error
