"""Describes a swap of one member, and finds its checkpoint: only in one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError


@dataclass(frozen=True)
class SwapOrder:
    """What a process has to replace.

    Attributes:
        artifact: The artifact's name on the wire.
        digest: Its digest. A process that serves another one refuses.
        member: The member's number.
        path: The checkpoint.
        title: What messages call it.
    """

    artifact: str
    digest: str
    member: int
    path: str
    title: str


@dataclass(frozen=True)
class SwapResult:
    """What a swap did.

    Attributes:
        pause: For how many seconds calls waited.
        uncalibrated: Whether the artifact's calibration no longer counts.
    """

    pause: float
    uncalibrated: bool


def checkpoint_in(folder: Path, name: str) -> Path:
    """Returns a checkpoint of a folder.

    Args:
        folder: The only folder from which checkpoints are read.
        name: The path of the file, or of a folder (of shards, or of a LoRA adapter), relative to the folder.

    Raises:
        RequestError: The path leaves the folder, also by way of a link, or there is no such file.
    """
    if not name or "\0" in name or Path(name).is_absolute():
        raise RequestError(f"checkpoint is {name[:80]!r}; it is a path relative to the folder of --swap-from")
    try:
        root = folder.resolve()
        path = (root / name).resolve()
        inside = path.is_relative_to(root)
        found = inside and (path.is_file() or (path.is_dir() and _stays_inside(path, root)))
    except (OSError, RuntimeError):  # a name that is too long, or links in a circle
        inside, found = True, False
    if not inside:
        raise RequestError(f"checkpoint {name[:80]!r} is outside of the folder of --swap-from")
    if not found:
        raise RequestError(f"there is no checkpoint {name[:80]!r} in the folder of --swap-from")
    return path


def _stays_inside(path: Path, root: Path) -> bool:
    """Returns whether no file of a folder is a link to outside of the folder of swaps, which it is not."""
    return path != root and all(file.resolve().is_relative_to(root) for file in path.rglob("*"))
