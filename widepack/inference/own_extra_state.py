"""Finds out whether a new member's answers depend on its extra state.

The programs were captured from members with other extra state, which forward may read. The new member's
module answers the probe's inputs with its own extra state and with that of a member of the artifact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..checkpoints.differences import bit_equal
from ..checkpoints.extra_state import differing_names, extra_file, extra_of_member
from ..checkpoints.new_member import NewMember, NewMemberRequest, check_extra, with_extra
from ..errors import MemberMismatch
from ..spec.entries import FORWARD, PATTERNS, method_of
from .open_artifact import OpenArtifact
from .programs import EntryPrograms


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
            why = f"the artifact does not store {', '.join(left_out[:5])} (--ignore)"
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
        names = ", ".join(differing_names(new.checkpoint.extra_state(), extra)[:5])
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
    from ..capture.named_fields import known_forms
    from ..verification.subject import caller_arguments

    inputs = [
        (x[place] if own else x).cpu().clone()
        for own, x in zip(e.inputs.per_member(pattern), e.inputs.of_probe(pattern, exact=True))
    ]
    args, kwargs = caller_arguments(e.entry.signature, inputs)
    method = module if e.name == FORWARD else method_of(module, e.name)
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
