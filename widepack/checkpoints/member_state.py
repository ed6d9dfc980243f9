"""Reads what an artifact stores of a member's state dict beside its tensors."""

from __future__ import annotations

from typing import Any

from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

from .extra_state import state_in


def extra_file(reader: Reader) -> Weights | None:
    """Maps the file of the members' extra states; None if there is none. Raises: ArtifactError."""
    name = reader.manifest.state_dicts.extra
    return Weights([reader.path(name)]) if name else None


def extra_of_member(reader: Reader, file: Weights | None, member: int) -> dict[str, Any]:
    """Returns the extra state of one member, by name.

    file: what `extra_file` returned. member: its number. Raises: ArtifactError.
    """
    if file is None:
        return {}
    try:
        return state_in(file, len(reader.manifest.members), member)
    except ArtifactError as e:
        raise ArtifactError(f"{reader.root / reader.manifest.state_dicts.extra}: {e}") from None
