"""Reads the checkpoints of a build, finds the factory, and aligns the members' weights in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from widepack_artifacts.errors import some

from ..capture.pt2.factory import ExportedProgramFactory, other_programs, unreadable
from ..checkpoints.alignment import Alignment, align, repeated
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.differences import tied_names
from ..checkpoints.discovery import LeftOut, bad_ones, open_checkpoint, open_good
from ..checkpoints.factory import Factory, PickledModules
from ..checkpoints.loading import MemberLoader
from ..checkpoints.named_factory import find_factory
from ..errors import MemberMismatch, UsageError
from ..fleet.adapter_members import (
    AdapterMember,
    FleetBase,
    base_of,
    check_ties,
    read_adapters,
    transposed_in_module,
)
from ..fleet.fleet import AdapterFleet, Fleet, MergedFleet
from .hyper_parameters import advice
from .request import BuildRequest, adapters_in
from .write import MemberStates, member_states


class ReadMembers(NamedTuple):
    """The members of a build.

    left_out: the checkpoints that were skipped, in order; empty without `skip_bad`. states: what their state
    dicts have beside tensors. fleet: gives the factors of weights; None if weights are stored as they are.
    base: that the request names; None without one.
    """

    factory: Factory
    aligned: Alignment
    left_out: list[LeftOut]
    states: MemberStates
    fleet: Fleet | None = None
    base: FleetBase | None = None


def read_members(request: BuildRequest) -> ReadMembers:
    """Opens all checkpoints, finds the factory, and aligns the members' weights in one table.

    With `skip_bad`, checkpoints are left out that cannot be read, or that are of another model than the first
    readable one; of torch.export programs also those that differ from the first in more than weights.

    Raises: UsageError; CheckpointError and MemberMismatch, each with all problems.
    """
    if adapters_in(request.paths):
        return _read_adapters(request)
    opened, left_out = open_good(request.places, request.trust_pickle)
    members = OpenedMembers(request.paths, opened, left_out)
    members.leave_out([unreadable(c) if request.model is None else "" for c in members.opened])
    if request.dtype is not None:
        members.opened = [c.as_dtype(request.dtype) for c in members.opened]
    factory = choose_factory(request.model, request.model_args, members.opened, request.dtype)
    try:
        return _aligned(request, members, factory)
    except (UsageError, MemberMismatch) as error:
        if words := advice(factory, members.opened):
            raise type(error)(f"{error}{words}") from error
        raise


def _aligned(request: BuildRequest, members: OpenedMembers, factory: Factory) -> ReadMembers:
    """Loads open checkpoints as the factory's model does, and aligns the members' weights."""
    loader = MemberLoader(factory, request.ignore)
    loaded = _loaded(request, members, loader)
    names = [request.names[i] for i in members.numbers]
    aligned = align(loaded, names, request.share, loader.state, ragged=loader.ragged)
    if request.one_checkpoint:
        aligned = repeated(aligned, request.names)
    states = member_states(aligned, loader)
    if not request.unmerge:
        return ReadMembers(factory, aligned, members.left_out, states)
    base = None if request.base is None else loader.base(_open_base(request))
    if base is not None and not set(base.tensors()) & set(loader.state):
        raise UsageError(
            f"the base {request.base} has no weight of the model: it has"
            f" {some(base.tensors(), 3) or 'nothing'}, and the model"
            f" {some(loader.state, 3)}"
        )
    record = None if base is None else FleetBase(base)
    fleet = MergedFleet(base, request.tolerance)
    return ReadMembers(factory, aligned, members.left_out, states, fleet, record)


def _loaded(request: BuildRequest, members: OpenedMembers, loader: MemberLoader) -> list[Checkpoint]:
    """Returns the states of the members after their checkpoints were loaded.

    Raises: MemberMismatch with all differences.
    """
    states: dict[int, Checkpoint] = {}
    reasons = []
    for i, checkpoint in zip(members.numbers, members.opened):
        try:
            states[i] = loader.load(checkpoint)
            reasons.append("")
        except MemberMismatch as e:
            reasons.append(str(e))
    if members.left_out or request.skip_bad:
        members.leave_out(reasons)
        if isinstance(loader.factory, ExportedProgramFactory):
            members.leave_out(other_programs(members.opened, request.calls.forward_inputs))
        if not request.skip_bad:
            raise bad_ones(members.left_out, len(request.paths))
    elif any(reasons):
        raise loader.mismatch(members.opened, reasons)
    return [states[i] for i in members.numbers]


def _open_base(request: BuildRequest) -> Checkpoint:
    """Opens the base of a fleet. Raises: CheckpointError."""
    assert request.base is not None  # the request was checked
    base = open_checkpoint(request.base, request.key, request.trust_pickle)
    return base if request.dtype is None else base.as_dtype(request.dtype)


def _read_adapters(request: BuildRequest) -> ReadMembers:
    """Reads adapters over a base, and aligns the weights of the members that they make.

    Raises: UsageError; CheckpointError and MemberMismatch.
    """
    base = _open_base(request)
    factory = choose_factory(request.model, request.model_args, [base], request.dtype)
    loader = MemberLoader(factory, request.ignore)
    try:
        base = loader.load(base)
    except MemberMismatch as e:
        raise MemberMismatch(f"the base {request.base}: {e}") from None
    state, turned = loader.state, transposed_in_module(factory.fresh(base))
    adapters, left_out = read_adapters(request.paths)
    if left_out and not request.skip_bad:
        raise bad_ones(left_out, len(request.paths))
    _, tied = tied_names(state, [base.tensors()])
    for adapter in adapters:
        check_ties(adapter, [(name, *others) for name, others in tied.items()])
    record = base_of(base, adapters)
    fleet = [AdapterMember(base, adapter, turned) for adapter in adapters]
    members = OpenedMembers(request.paths, [m.checkpoint for m in fleet], left_out)
    if not fleet:
        raise bad_ones(left_out, len(request.paths))
    names = [request.names[i] for i in members.numbers]
    aligned = align(members.opened, names, request.share, state)
    states = member_states(aligned, loader)
    if not states.record.verbatim_bare:
        raise UsageError(
            f"the base {request.base}: load_state_dict of the model changes its own state dict, so an adapter"
            " cannot be applied to the loaded weights; merge the adapters with PEFT, and build from the"
            " merged checkpoints"
        )
    return ReadMembers(factory, aligned, members.left_out, states, AdapterFleet(base, fleet), record)


def choose_factory(
    model: str | Callable[..., object] | None,
    args: Mapping[str, object] | None,
    checkpoints: Sequence[Checkpoint],
    dtype: torch.dtype | None,
) -> Factory:
    """Returns the factory of a build: the named one, or the checkpoints' own programs or pickled modules.

    Raises: UsageError.
    """
    if model is not None:
        factory = find_factory(model, args, [c.path for c in checkpoints])
    elif all(c.program is not None for c in checkpoints):
        if dtype is not None:
            raise UsageError(
                "dtype: the members are torch.export programs, which fix their dtypes;"
                " export them in the dtype that you need, or name a --model"
            )
        factory = ExportedProgramFactory()
    elif all(c.module is not None for c in checkpoints):
        factory = PickledModules()
    else:
        raise _without_model(checkpoints)
    if model is None and args:
        raise UsageError("model arguments are given, but no model: the checkpoints contain the members' code")
    factory.dtype = dtype
    return factory


def _without_model(checkpoints: Sequence[Checkpoint]) -> UsageError:
    """Returns the error for checkpoints of which some contain no code."""
    whole = next((c for c in checkpoints if c.program is not None or c.module is not None), None)
    other = next((c for c in checkpoints if c.program is None and c.module is None), checkpoints[0])
    mixed = f" ({whole.path} contains its own code, {other.path} does not)" if whole is not None else ""
    return UsageError(
        f"no model: a state dict has weights and no code{mixed}, so name what makes the module:"
        " --model package.module:factory, or file.py:factory"
    )


class OpenedMembers:
    """The open checkpoints of a build, some of which may be left out.

    numbers: for each open checkpoint its place in `paths`.
    """

    def __init__(
        self, paths: Sequence[str], opened: Sequence[Checkpoint], left_out: Sequence[LeftOut]
    ) -> None:
        self.paths, self.opened, self.left_out = paths, list(opened), list(left_out)
        bad = {b.number for b in left_out}
        self.numbers = [i for i in range(len(paths)) if i not in bad]

    def leave_out(self, reasons: Sequence[str]) -> None:
        """Leaves checkpoints out.

        reasons: for each open checkpoint why it is left out; empty if it stays. Raises: CheckpointError if
        none stays.
        """
        bad = [LeftOut(i, self.paths[i], why) for i, why in zip(self.numbers, reasons) if why]
        self.left_out = sorted([*self.left_out, *bad])
        self.opened = [c for c, why in zip(self.opened, reasons) if not why]
        self.numbers = [i for i, why in zip(self.numbers, reasons) if not why]
        if not self.opened:
            raise bad_ones(self.left_out, len(self.paths))
