"""Finds the control groups of this process, by which containers and batch systems limit cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """Yields the folders of the control groups that limit this process, and their version: 1 or 2.

    A group has the limits of every group above it, too. In a container the path may be that of the machine:
    the folder need not exist.

    Args:
        controller: What is limited: `cpu` or `memory`.
        root: Where the groups are mounted, version 2 at its top and version 1 in a folder of the controller.
        own: The file that lists the groups of a process.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "")
        if not controllers:
            top, version = root, 2
        elif controller in controllers.split(","):
            top, version = root / controller, 1
        else:
            continue
        folder = top / path.lstrip("/")
        for level in (folder, *folder.parents):
            yield level, version
            if level == top:
                break
