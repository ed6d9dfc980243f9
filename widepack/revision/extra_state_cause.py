"""Finds out whether the extra state of a new member is why the artifact's programs do not answer as it does.

The programs were captured from members with other extra state, which forward may read. A new member is made
again, with its own weights and the extra state of a member of the artifact. If the programs answer as this
module, the extra state is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from widepack_artifacts.reader import Reader

from ..checkpoints.extra_state import differing_names, extra_file, extra_of_member
from ..checkpoints.new_member import with_extra
from ..errors import MemberMismatch, VerificationError
from .request import MemberSlot, ReviseRequest
from .revised_entry import Modules


def explained(
    error: VerificationError,
    request: ReviseRequest,
    reader: Reader,
    slots: Sequence[MemberSlot],
    prove: Callable[[Modules], object],
) -> VerificationError | MemberMismatch:
    """Returns the error to raise for a revision whose comparison failed.

    Args:
        error: The error of the comparison.
        request: The revision.
        reader: The artifact before it.
        slots: The members of the revised artifact.
        prove: Makes the comparison with other modules of new members.

    Returns:
        an error that names the extra state, if the comparison passes with that of a member; else `error`.
    """
    extra = extra_of_member(reader, extra_file(reader), 0)
    differing: dict[str, list[str]] = {}
    modules: dict[int, Callable[[], nn.Module]] = {}
    for i, slot in enumerate(slots):
        if slot.new is None or (factory := request.how.factory(slot.new.checkpoint.path)) is None:
            continue
        factory.dtype = slot.new.dtype
        modules[i] = partial(with_extra, factory, slot.new, extra)
        if names := differing_names(slot.new.checkpoint.extra_state(), extra):
            differing[slot.name] = names
    if not differing:
        return error
    try:
        prove(modules)
    except (VerificationError, MemberMismatch):
        return error
    name, names = next(iter(differing.items()))
    return MemberMismatch(
        f"member {name}: its extra state ({', '.join(names[:5])}) differs from that of the artifact's"
        " members, and forward depends on it: with their extra state and its own weights, it answers as the"
        " artifact's programs. Build the artifact again with this checkpoint"
    )
