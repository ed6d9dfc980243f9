"""Finds and reads the file of an artifact that has its costs: `costs-<hash>.json`. No torch is imported."""

from __future__ import annotations

from collections.abc import Iterable

from .costs import Costs, read_documents
from .errors import ArtifactError
from .reader import Reader

STEM = "costs"


def costs_file(files: Iterable[str]) -> str:
    """Returns the name of the file of costs in an artifact's list of files; empty if it has none.

    Raises: ArtifactError for several.
    """
    found = [n for n in files if n.startswith(f"{STEM}-") and n.endswith(".json")]
    if len(found) > 1:
        raise ArtifactError(f"files: there are {len(found)} files of costs, at most one is allowed: {found}")
    return found[0] if found else ""


def stored_costs(reader: Reader) -> dict[str, Costs]:
    """Returns the costs that an artifact has, by entry; empty if it has none.

    Raises: ArtifactError if the file is damaged, or has costs of an entry that does not exist.
    """
    name = costs_file(reader.manifest.files)
    if not name:
        return {}
    try:
        found = read_documents(reader.json(name))
    except ArtifactError as e:
        raise ArtifactError(f"{reader.root / name}: {e}") from e
    if unknown := sorted(set(found) - set(reader.manifest.entries)):
        raise ArtifactError(f"{reader.root / name}: there is no entry {unknown[0][:80]!r}")
    return found
