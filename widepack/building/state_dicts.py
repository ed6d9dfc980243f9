"""Collects and writes what the members' state dicts have beside their tensors: versions and extra state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from widepack_artifacts.state_dicts import STEM, StateDicts, is_row
from widepack_artifacts.writer import Writer

from ..checkpoints.alignment import Alignment
from ..checkpoints.extra_state import NotData, encode, tensors_of_states
from ..checkpoints.loading import MemberLoader, ignored
from ..errors import UsageError
from .write import write_tensors


@dataclass(frozen=True)
class MemberStates:
    """What the members' state dicts have beside tensors. record: for the manifest, without the file of extra
    states. extra: of each member, by name.
    """

    record: StateDicts = field(default_factory=StateDicts)
    extra: Sequence[Mapping[str, Any]] = ()

    def write(self, writer: Writer) -> StateDicts:
        """Writes the extra states, and returns the record of the manifest."""
        if not any(self.extra):
            return replace(self.record, extra="")
        return replace(self.record, extra=write_tensors(writer, STEM, tensors_of_states(self.extra)))


def member_states(aligned: Alignment, loader: MemberLoader) -> MemberStates:
    """Returns what the members' state dicts have beside tensors. Raises: UsageError for what is no data."""
    extra = [stored_extra(c.extra_state(), loader.ignore) for c in aligned.checkpoints]
    for name, state in zip(aligned.names, extra):
        refuse_code(state, f"member {name}", ignorable=True)
    versions = {path: dict(row) for path, row in loader.versions.items() if is_row(dict(row))}
    takes = loader.verbatim()
    left_out = sorted({n for c in aligned.checkpoints for n in c.extra_state() if ignored(n, loader.ignore)})
    ignore = list(loader.ignore)
    record = StateDicts(versions, "", takes.versions, takes.bare, loader.plain, ignore, left_out)
    return MemberStates(record, extra)


def stored_extra(state: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the extra state that an artifact stores: without that which a user ignores."""
    return {name: value for name, value in state.items() if not ignored(name, ignore)}


def refuse_code(state: Mapping[str, Any], who: str, ignorable: bool = False) -> None:
    """Raises UsageError for an extra state that is not data.

    who: whose it is. ignorable: whether `--ignore` can leave it out.
    """
    for name, value in state.items():
        try:
            encode(value, {})
        except NotData as e:
            way_out = (
                f"; or leave it out of the artifact with --ignore {name!r}: members are loaded with it, and"
                " extract cannot write them"
                if ignorable
                else ""
            )
            raise UsageError(
                f"{who}: the extra state {name} contains {e}. An artifact stores data and no code: let"
                f" get_extra_state return dicts, lists, numbers, texts and tensors{way_out}"
            ) from None
