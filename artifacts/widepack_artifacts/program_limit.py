"""Limits the bytes and the nodes of the programs that one reader opens. No torch is imported."""

from __future__ import annotations

from typing import Any

from .errors import ArtifactError

MOST_BYTES = 32 * 2**20
MOST_NODES = 100_000


class ProgramLimit:
    """Counts the programs of one artifact as they are read, and refuses what is beyond the limit.

    Python needs kilobytes and a good part of a millisecond for each node, however short it is in the file.

    Args:
        factor: How many times the usual amount is allowed.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._bytes = self._nodes = 0

    def add_file(self, name: str, size: int) -> None:
        """Counts a file before it is read. Raises: ArtifactError."""
        self._bytes += size
        self._check(name, self._bytes, MOST_BYTES, "bytes of programs")

    def add_nodes(self, name: str, document: Any) -> None:
        """Counts the nodes of a document before a program is made of it. Raises: ArtifactError."""
        self._nodes += count_nodes(document)
        self._check(name, self._nodes, MOST_NODES, "nodes")

    def _check(self, name: str, found: int, usual: int, what: str) -> None:
        if found > usual * self.factor:
            raise ArtifactError(
                f"{name} brings the programs of this load to {found:,} {what}; a load may take "
                f"{usual * self.factor:,.0f}. If you trust its makers: load(limit={2 * found / usual:.1g}) "
                "allows this much, and limit=None allows anything"
            )


def count_nodes(document: Any) -> int:
    """Returns the nodes of a program's document, with those of its loops. Other documents have none."""
    count, programs = 0, [document]
    while programs:
        program = programs.pop()
        nodes = program.get("nodes") if isinstance(program, dict) else None
        if isinstance(nodes, list):
            count += len(nodes)
            programs += [n["body"] for n in nodes if isinstance(n, dict) and "body" in n]
    return count
