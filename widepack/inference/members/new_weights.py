"""Checks a checkpoint that replaces a member: its weights against the artifact, and its own answers to the
probe.

`check_own_extra` finds out whether a new member's answers depend on its extra state.

The programs were captured from members with other extra state, which forward may read. The new member's
module answers the probe's inputs with its own extra state and with that of a member of the artifact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from widepack_artifacts.errors import some

from ...checkpoints.differences import bit_equal
from ...checkpoints.extra_state import differing_names, extra_file, extra_of_member
from ...checkpoints.new_member import NewMember, NewMemberRequest, check_extra, with_extra
from ...errors import MemberMismatch, VerificationError
from ...fleet.open_member import new_factors
from ...spec.entries import PATTERNS, callable_of
from ...verification.rounding import coarsest
from ...verification.tolerance import floating, same_places
from ..entry_programs import EntryPrograms
from ..open_artifact import OpenArtifact
from ..programs.member_runs import OwnAnswers
from .weight_exchange import MemberUpdate


@dataclass(frozen=True)
class NewWeights:
    """The weights of a new member that differ from those of the files, in memory.

    Attributes:
        member: Those that programs read, by the names of the member.
        stored: The same as the files have them: a factored weight is its left and right factors.
        factors: Of each factored weight among them the rank and the correction.
        before: The present values of these factored weights.
        unread: Those that all members share and that no program reads (`num_batches_tracked` of a batch norm
            in eval mode).
    """

    member: dict[str, Tensor]
    stored: dict[str, Tensor]
    factors: dict[str, tuple[int, bytes]]
    before: dict[str, Tensor]
    unread: dict[str, Tensor]


def changed_weights(artifact: OpenArtifact, place: int, new: NewMember, path: str | Path) -> NewWeights:
    """Returns the new weights that differ from those of the files.

    Raises: MemberMismatch for other shapes, for weights that all members share and that a program reads, and
    for factored weights that are no low-rank fine-tune of the base.
    """
    number, name = artifact.chosen[place], artifact.members[place]
    rows = [w for w in artifact.manifest.member_weights if w.role != "constant"]
    if other := [w for w in rows if w.of(new.like) != w.of(number)]:
        shapes = some(f"{w.name} is {w.of(new.like)}, the member's {w.of(number)}" for w in other)
        raise MemberMismatch(
            f"checkpoint {path} has other shapes than member {name} ({shapes}); a swap cannot change "
            "shapes: use `widepack update`, which changes the artifact"
        )
    weights = artifact.weights
    found = {
        w.name: value for w in rows if not bit_equal(value := new.value(w.name), weights.part(w.name, number))
    }
    common = [n for n in found if weights.row(n).kind == "shared"]
    unread = {n: found.pop(n) for n in common if not artifact.reads(n)}
    shared = [(n, v.numel() * v.element_size()) for n, v in found.items() if n in common]
    if shared:
        names = some((f"{n} ({size:,} bytes)" for n, size in shared), 10)
        raise MemberMismatch(
            f"checkpoint {path} differs in {len(shared)} weight{'s' if len(shared) > 1 else ''} that "
            f"all members share, {sum(s for _, s in shared):,} bytes: {names}. One member alone "
            "cannot change them in a running service: `widepack update` stores them for each member "
            "and lowers the programs again"
            + (
                ""
                if artifact.manifest.factored.weights
                else "; an artifact that was built with --share none takes such a checkpoint in a swap"
            )
        )
    member, factors = _copies(found), {}
    stored = {n: v for n, v in member.items() if n not in artifact.factors}
    for weight in artifact.manifest.factored.weights if artifact.factors else ():
        if weight.name in member:
            room = artifact.factors[weight.name].rank
            own = new_factors(weight, weights.files, new, path, room)
            stored |= own.parts(weight)
            factors[weight.name] = own.rank, own.correction
    before = _copies({name: weights.part(name, number) for name in factors})
    return NewWeights(member, stored, factors, before, _copies(unread))


def _copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: v.detach().clone(memory_format=torch.contiguous_format) for n, v in values.items()}


def checked_answers(
    e: EntryPrograms, pattern: str, update: MemberUpdate, new: NewWeights, path: str | Path
) -> OwnAnswers:
    """Returns the new member's own answers to the probe's inputs.

    new: its weights that differ, in the files' dtype.
    Raises: VerificationError if the member fails, or if its answers are not close enough to float64.
    """
    artifact, place, weights = e.artifact, update.place, e.artifact.weights

    def weight(name: str) -> Tensor:
        if name in update.values:
            return update.values[name]
        if name in new.factors:
            return weights.place(new.member[name], f"checkpoint {path}: {name}")
        return weights.of_member(name, place)

    def exact(name: str) -> Tensor:
        value = new.member[name] if name in new.member else weights.part(name, artifact.chosen[place])
        return value.to(artifact.device)

    where = f"checkpoint {path}, entry {e.name}, the probe's inputs ({pattern})"
    try:
        found = e.probe_check.runs.answers(pattern, place, weight, exact)
    except (RuntimeError, IndexError, ValueError) as error:  # for example an eigenvalue problem with NaN
        raise VerificationError(
            f"{where}: the member program fails with these weights, but not with those of the present "
            f"member: {type(error).__name__}: {' '.join(str(error).split())[:300]}; look at its "
            "weights"
        ) from error
    _check_answers(e, pattern, place, found, where)
    return found


def _check_answers(e: EntryPrograms, pattern: str, place: int, found: OwnAnswers, where: str) -> None:
    """Checks that a new member's answers are finite and close to float64. Raises: VerificationError."""
    others = e.probe_check.answers(pattern)
    prefix = e.inputs.probe_prefix(pattern)
    program = e.source.member_program(place)
    rows = zip(found.own, found.truth, coarsest(program), e.probe_check.runs.new_stats(pattern))
    for k, (own, truth, eps, stats) in enumerate(rows):
        if not floating(own):
            continue
        name = e.entry.outputs[k].name or k
        finite = all(
            bool(torch.isfinite(t).all()) for n, t in others.items() if n.startswith(f"{prefix}.y{k}.")
        )
        bad = int((~torch.isfinite(own)).sum())
        # A member may mean -inf. If no other member answers it, the weights are broken.
        if bad and finite:
            raise VerificationError(
                f"{where}: {bad} of {own.numel()} numbers of output {name} are NaN or inf, and all other "
                "members' answers are finite: its weights are damaged, or its training diverged"
            )
        stats.name = str(name)
        stats.add_own(own, truth)
        if not same_places(own, truth) or (e.probe_check.runs.float64 and stats.unsteady(eps)):
            why = stats.unsteady(eps) or f"output {name} is NaN or inf where float64 is not"
            raise VerificationError(
                f"{where}: {why}; answers so far from float64 cannot be verified. Look at its weights"
            )


def check_own_extra(
    artifact: OpenArtifact,
    entries: Sequence[EntryPrograms],
    place: int,
    new: NewMember,
    how: NewMemberRequest,
) -> None:
    """Refuses a new member whose answers depend on extra state that no member of the artifact has.

    place: of the replaced member among the loaded ones. how: with the model. Raises: MemberMismatch.
    """
    path = new.checkpoint.path
    try:
        check_extra(artifact.reader, path, new.checkpoint)
    except MemberMismatch as refusal:
        why = "an entry has state" if any(e.entry.state for e in entries) else ""
        if left_out := artifact.manifest.state_dicts.left_out:
            why = f"the artifact does not store {some(left_out)} (--ignore)"
        if why:
            raise MemberMismatch(
                f"checkpoint {path}: its extra state cannot be compared with that of the members in a swap:"
                f" {why}. `widepack update` with --model compares the member's own module, where it can"
            ) from refusal
        factory = how.factory(path)
        assert factory is not None  # the caller has a model
        extra = extra_of_member(artifact.reader, extra_file(artifact.reader), 0)
        factory.dtype = new.dtype
        modules = [with_extra(factory, new, x) for x in (new.checkpoint.extra_state(), extra)]
        names = some(differing_names(new.checkpoint.extra_state(), extra))
        for e in entries:
            for pattern in PATTERNS:
                own, other = (_answers(module, e, pattern, place) for module in modules)
                if isinstance(own, str):
                    raise MemberMismatch(
                        f"checkpoint {path}: its module fails at the probe's inputs, so its extra state"
                        f" ({names}) cannot be compared with that of the members: {own}"
                    ) from refusal
                if not _equal(own, other):
                    raise MemberMismatch(
                        f"checkpoint {path} has other extra state than the members ({names}), and its answers"
                        " depend on it: with their extra state and its own weights, its module answers"
                        " otherwise. Build the artifact again with this checkpoint"
                    ) from refusal


def _answers(module: nn.Module, e: EntryPrograms, pattern: str, place: int) -> list[object] | str:
    """Returns the leaves of a module's answer to the probe's inputs, or the error that it raises."""
    from ...capture.named_fields import known_forms
    from ...verification.subject import caller_arguments

    inputs = [
        (x[place] if own else x).cpu().clone()
        for own, x in zip(e.inputs.per_member(pattern), e.inputs.of_probe(pattern, exact=True))
    ]
    args, kwargs = caller_arguments(e.entry.signature, inputs)
    method = callable_of(module, e.name)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return list(pytree.tree_leaves(known_forms(method(*args, **kwargs))))
    except Exception as error:  # noqa: BLE001  # the user's code may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _equal(a: list[object], b: list[object] | str) -> bool:
    """Whether two answers have the same values. An error is equal to no answer."""
    if isinstance(b, str) or len(a) != len(b):
        return False
    return all(
        bit_equal(x.detach(), y.detach()) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        for x, y in zip(a, b)
    )
