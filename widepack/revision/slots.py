"""Defines the members of a revised artifact."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoints.new_member import NewMember


@dataclass(frozen=True)
class MemberSlot:
    """A member of the revised artifact.

    old: its number in the old artifact; None for a new member. new: the checkpoint of a new member. place:
    the number of the old member whose inputs in the probe it takes.
    """

    name: str
    old: int | None
    new: NewMember | None = None
    place: int = 0

    @property
    def like(self) -> int:
        """The number of an old member with its shapes."""
        if self.new is not None:
            return self.new.like
        return self.place if self.old is None else self.old
