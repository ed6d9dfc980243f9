"""Makes the members of a build as modules with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..capture.call import MemberCall
from ..capture.capture import Captured, capture
from ..checkpoints.alignment import Alignment
from ..checkpoints.factory import Factory
from ..checkpoints.loading import filled
from ..spec.dropout import switched_on
from ..spec.entries import FORWARD
from ..spec.state import StateRequest


def filled_member(factory: Factory, aligned: Alignment, i: int) -> nn.Module:
    """Returns member i with its weights, in eval mode. Raises: MemberMismatch."""
    return filled(factory, aligned.checkpoints[i], aligned.names[i])


@dataclass(frozen=True)
class EntryMembers:
    """Makes and captures the members of one entry.

    entries: all entries of the build. states: the states that were requested for this entry. dropout: whether
    dropout is on.
    """

    factory: Factory
    aligned: Alignment
    entry: str = FORWARD
    entries: Sequence[str] = (FORWARD,)
    states: Sequence[StateRequest] = ()
    dropout: bool = False

    def first_of(self, signature: int) -> int:
        """Returns the first member with this shape signature."""
        return self.aligned.signatures.index(signature)

    def module(self, i: int) -> nn.Module:
        """Returns a fresh member i in the mode that is captured."""
        module = filled_member(self.factory, self.aligned, i)
        return switched_on(module) if self.dropout else module

    def capture(
        self, i: int, call: MemberCall, named_dims: bool = True, fresh: list[nn.Module] | None = None
    ) -> Captured:
        """Captures member i.

        named_dims: as `capture.capture` takes it. fresh: modules of member i that exist and have not run.
        They are taken out of the list, so the list does not keep their weights in memory.
        """
        return capture(
            lambda: fresh.pop() if fresh else self.module(i),
            call,
            named_dims=named_dims,
            entry=self.entry,
            states=self.states,
            dropout=self.dropout,
        )


@dataclass(frozen=True)
class MemberCapture:
    """The capture of one member, and the call that it was captured with.

    named_dims: as `capture.capture` takes it.
    """

    captured: Captured
    members: EntryMembers
    call: MemberCall
    named_dims: bool = True

    def repeat(self, i: int, module: nn.Module | None) -> Captured:
        """Captures another member with the same call. module: a fresh member i, or None; it is used up."""
        return self.members.capture(i, self.call, self.named_dims, [] if module is None else [module])
