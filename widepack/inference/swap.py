"""`ens.swap`: another checkpoint in the place of one member, while calls go on.

1. The checkpoint is opened and held to the artifact's table: names, shapes, dtypes, ties, and the bits of what all members share.
2. Its member is asked the probe's inputs with each entry's own program, in its dtype and in float64: finite where the other members are, and no further from
   float64 than a build allows.
3. All that bound programs hold of its weights is made aside (derived.py); a program that is bound meanwhile is made ready too.
4. The gate closes: calls in flight end, new ones wait. Slices are written, values exchanged. The gate opens. That is the pause.
5. The wide programs are asked the probe's inputs again and held to the new member's float64 answers. A wrong answer puts the old weights back, also into what was
   bound or copied since then.

The artifact stays as it is: weights are mapped privately, and the swap is this process's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..verification import probe as probes
from ..checkpoints.newcomer import Newcomer, newcomer
from ..verification.tolerance import Pool, floating, same_places
from .weight_exchange import Changes, Member
from ..spec.entries import PATTERNS
from .programs import Bound, Programs
from ..errors import MemberMismatch, UsageError, VerificationError
from .open_artifact import Answers, Held
from ..checkpoints.alignment import bit_equal
from .probe_check import Own
from ..ir.at_rest import draws


@dataclass(frozen=True)
class SwapReport:
    """What a swap did.

    member: its name. checkpoint: where the new weights came from. seconds: by stage: `open`, `check`, `derive`, `wait` (for calls in flight), `copy`, `verify`.
    pause: seconds for which new calls were held: `wait` and `copy`. bytes: written while they were. weights: how many of the member's differ from those that were there.
    exchanged: values that took the place of others whole.
    """

    member: str
    checkpoint: str
    seconds: Mapping[str, float]
    pause: float
    bytes: int
    weights: int
    exchanged: int

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {1000 * s:.1f}" for name, s in self.seconds.items())
        return f"{self.member} is {self.checkpoint}: {self.weights} weights, {self.bytes:,} bytes written in a pause of {1000 * self.pause:.1f} ms (ms: {stages})"


@dataclass
class Stages:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now


def swap(
    held: Held, entries: Sequence[Programs], member: int | str, checkpoint: str | Path, key: str | None = None, trust_pickle: bool = False
) -> SwapReport:
    """Put a checkpoint in the place of a loaded member. entries: the programs of every entry. Raises: as `WideModel.swap`."""
    place = held.index(member)
    for e in entries:
        if draws(e.member(place)[0]):
            raise UsageError(
                f"swap: entry {e.name} draws random numbers at every call, so that the new member's answers cannot be compared while others call; build another artifact"
            )
    with held.swapping:
        held.must_be_open()
        stages = Stages()
        mapped = _fitting(held, place, newcomer(held.manifest, checkpoint, key, trust_pickle), checkpoint)
        values = Member(held, place, {n: held.placed(value, f"checkpoint {checkpoint}: {n}") for n, value in mapped.items()})
        stages.done("open")
        name = held.members[place]
        if not mapped:
            return SwapReport(name, str(checkpoint), stages.seconds, 0.0, 0, 0, 0)
        asked = {(e.name, p): _asked(e, p, values, mapped, checkpoint) for e in entries for p in PATTERNS}
        stages.done("check")
        while True:
            known = [(e, pattern, bound) for e in entries for pattern, bound in e.bound()]
            for e, pattern, _ in known:
                if (e.name, pattern) not in asked:
                    asked[e.name, pattern] = _asked(e, pattern, values, mapped, checkpoint)
            changes = Changes(values.canonical(mapped))
            for e, pattern, bound in known:
                values.changes(bound, changes, partial(e.anew, pattern))
            stages.done("derive")
            with held.lock:  # nothing is bound meanwhile
                if [b for e in entries for _, b in e.bound()] == [b for _, _, b in known] and not held.closed:
                    changes.written += values.copies(changes.written)  # those that members were given meanwhile
                    pause = _exchange(held, place, changes, _answers(held, place, checkpoint, entries, asked), stages)
                    break
            if held.closed:
                raise UsageError("this model was closed while a member was swapped")
        try:
            for e, pattern, bound in known:
                _verify(held, place, e, pattern, bound, asked[e.name, pattern], checkpoint)
        except BaseException:
            with held.lock:
                since = Changes()
                try:
                    _since(held, entries, values, mapped, changes, [b for _, _, b in known], since)
                finally:
                    _exchange(held, place, changes, None, stages, since)
            raise
        stages.done("verify")
        return SwapReport(name, str(checkpoint), stages.seconds, pause, changes.bytes, len(mapped), changes.exchanged)


def _fitting(held: Held, place: int, new: Newcomer, path: str | Path) -> dict[str, Tensor]:
    """The new weights that differ from the member's, in memory. Raises: MemberMismatch for those that a single member cannot change."""
    number, name = held.chosen[place], held.members[place]
    rows = [w for w in held.manifest.weights if w.role != "constant"]
    if other := [w for w in rows if w.of(new.like) != w.of(number)]:
        said = ", ".join(f"{w.name} is {w.of(new.like)}, the member's {w.of(number)}" for w in other[:5])
        raise MemberMismatch(
            f"checkpoint {path} has other shapes than member {name} ({said}); a member of a running service keeps its shapes: `widepack update` puts it into the artifact"
        )
    differing = {w.name: value for w in rows if not bit_equal(value := new.value(w.name), held.part(w.name, number))}
    shared = [(n, differing[n].numel() * differing[n].element_size()) for n in differing if held.row(n).kind == "shared"]
    if shared:
        said = ", ".join(f"{n} ({size:,} bytes)" for n, size in shared[:10]) + (f" and {len(shared) - 10} more" if len(shared) > 10 else "")
        raise MemberMismatch(
            f"checkpoint {path} differs in {len(shared)} weight{'s' if len(shared) > 1 else ''} that all members share, {sum(s for _, s in shared):,} bytes: {said}. One "
            f"member alone cannot change them in a running service: `widepack update` parts them and lowers the programs again; an artifact that was built with "
            "--share none takes such a checkpoint in a swap"
        )
    return {n: value.detach().clone(memory_format=torch.contiguous_format) for n, value in differing.items()}


def _asked(e: Programs, pattern: str, values: Member, mapped: Mapping[str, Tensor], path: str | Path) -> Own:
    """What the new member answers on its own. Raises: VerificationError where nothing could be held to it."""
    held, place, probing = e.held, values.place, e.probing

    def given(name: str) -> Tensor:
        return values.values[name] if name in values.values else held.own(name, place)

    def exact(name: str) -> Tensor:
        return (mapped[name] if name in mapped else held.part(name, held.chosen[place])).to(held.device)

    where = f"checkpoint {path}, entry {e.name}, the probe's inputs ({pattern})"
    try:
        found = probing.ask(pattern, place, given, exact)
    except (RuntimeError, IndexError, ValueError) as error:  # an eigenvalue problem of NaN
        raise VerificationError(
            f"{where}: the member's own program fails where the member that is there answers: {type(error).__name__}: {' '.join(str(error).split())[:300]}; look at its weights"
        ) from error
    others = probing.answers(pattern)
    from ..verification.answers import coarsest  # the rules come with it

    coarse = coarsest(held.program(e.entry.member[e.entry.signatures[held.chosen[place]]], e.name))
    for k, (own, truth, eps) in enumerate(zip(found.own, found.truth, coarse)):
        if not floating(own):
            continue
        name = e.entry.outputs[k].name or k
        finite = all(bool(torch.isfinite(t).all()) for n, t in others.items() if n.startswith(f"{probing.at(pattern)}.y{k}."))
        bad = int((~torch.isfinite(own)).sum())
        if bad and finite:  # a member may well answer -inf; one that does where no other member does is broken
            raise VerificationError(
                f"{where}: {bad} of {own.numel()} numbers of output {name} are NaN or inf, and all other members' answers are finite: its weights are damaged, or its training diverged"
            )
        pool = Pool(str(name))
        pool.add_own(own, truth)
        if not same_places(own, truth) or (probing.exactly and pool.unsteady(eps)):
            raise VerificationError(
                f"{where}: {pool.unsteady(eps) or f'output {name} is NaN or inf where float64 is not'}; nothing can be proved of answers so far from the exact ones. Look at its weights"
            )
    return found


def _answers(held: Held, place: int, path: str | Path, entries: Sequence[Programs], asked: Mapping[tuple[str, str], Own]) -> Answers:
    """What stands in the place of the member's answers in the probe."""
    tensors: dict[str, Tensor] = {}
    records: dict[str, Sequence[Mapping[str, float]]] = {}
    for e in entries:
        for (entry, pattern), found in asked.items():
            if entry == e.name:
                at = e.probing.at(pattern)
                records[at] = found.record
                tensors.update({f"{at}.y{k}.{held.chosen[place]}": probes.thin(t.cpu(), 1) for k, t in enumerate(found.truth)})
    return Answers(str(path), tensors, records)


def _since(
    held: Held, entries: Sequence[Programs], new: Member, mapped: Mapping[str, Tensor], changes: Changes, known: Sequence[Bound], back: Changes
) -> None:
    """The old member for all that came to hold the new one since its weights were written: programs that were bound, copies that were made. Under the lock.

    known: the programs that `changes` is of. back: gets what has to happen.
    """
    before = {name: w.before for name, w in zip(mapped, changes.written)}  # as the files have them: these are written first
    old = Member(held, new.place, {name: held.placed(value, f"weight {name}") for name, value in before.items()})
    back.written += old.copies(changes.written)
    for e in entries:
        e.probing.renew()
        for pattern, bound in e.bound():
            if any(bound is b for b in known):
                continue
            try:
                old.changes(bound, back, partial(e.anew, pattern))
            except UsageError:  # it takes no other member: another one takes its place
                weights = {s.source: old.weight(s.source) for s in bound.program.weights}
                back.bound.append((bound, e.anew(pattern, bound, weights), bound.executable))


def _exchange(held: Held, place: int, changes: Changes, answers: Answers | None, stages: Stages, since: Changes | None = None) -> float:
    """Close the gate, write, open it. answers: of the new member; None puts the old one back. since: what has to happen beside that. Gives the pause in seconds."""
    began = time.perf_counter()
    stages.last = began
    number = held.chosen[place]
    with held.gate.shut():
        _settle(held)
        stages.done("wait" if answers else "put back")
        if answers is not None:
            changes.apply()
            changes.before = held.swapped.get(number)
            held.swapped[number] = answers
        else:
            changes.undo()
            if since is not None:
                since.apply()
            if changes.before is not None:
                held.swapped[number] = changes.before
            else:
                held.swapped.pop(number, None)
        _settle(held)
        stages.done("copy" if answers else "put back")
    return time.perf_counter() - began


def _settle(held: Held) -> None:
    """Kernels that calls have put on a GPU's streams are done before anything is written, and what was written is there before the next."""
    if held.device.type == "cuda":
        torch.cuda.synchronize(held.device)


def _verify(held: Held, place: int, e: Programs, pattern: str, bound: Bound, own: Own, path: str | Path) -> None:
    """Hold a wide program's answers for the new member to its float64 ones. Raises: VerificationError."""
    try:
        answers = held.gate.run(bound, e.probing.inputs(pattern))
    except (RuntimeError, IndexError, ValueError) as error:
        raise VerificationError(
            f"checkpoint {path}: the wide program ({e.name}, {pattern}) fails with it, and the old member is back: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    kinds = [o.kind for o in bound.program.outputs]
    alone = [a if kind == "shared" else a[place : place + 1] for a, kind in zip(answers, kinds)]
    at, number = e.probing.at(pattern), held.chosen[place]
    tensors = {f"{at}.y{k}.{number}": probes.thin(t.cpu(), 1) for k, t in enumerate(own.truth)}
    record = e.probing.record(pattern) or own.record
    try:
        probes.check(tensors, at, alone, kinds, record, [number])
    except VerificationError as error:
        raise VerificationError(
            f"checkpoint {path}: the wide program ({e.name}, {pattern}) answers wrongly for it, and the old member is back: {error}"
        ) from error
