"""Predicts the bytes of memory that a call takes from the system anew, because the last call gave them back.

glibc keeps freed memory up to twice the largest block that was ever freed, at most twice `MOST_BLOCK`. A call
whose results need more at the same time gives all of it back at its end, and the next call waits for the
system at each page. Blocks above `MOST_BLOCK` are always new memory; the table of kernel times has these.
"""

from __future__ import annotations

from collections.abc import Mapping

from widepack_artifacts.program import Program, refs

LEAST_BLOCK, MOST_BLOCK = 4 << 20, 32 << 20
"""The least and the largest block that counts. A process that has loaded a model has freed the first."""


def bytes_given_back(program: Program, made: Mapping[str, float]) -> float:
    """Returns the bytes that a call takes from the system anew.

    Args:
        program: The program.
        made: The bytes of new memory of each node; a node that is not in it makes a view, or none.
    """
    block = max([LEAST_BLOCK, *(size for size in made.values() if size <= MOST_BLOCK)])
    peak = _peak(program, {n: size for n, size in made.items() if 0 < size <= MOST_BLOCK})
    return peak if peak > 2 * block else 0.0


def _peak(program: Program, made: Mapping[str, float]) -> float:
    """Returns the most bytes that live at the same time. Views keep what they view alive."""
    reads: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for i, node in enumerate(program.nodes):
        found = {r for name in refs((node.args, node.kwargs)) for r in reads.get(name, ())}
        last.update(dict.fromkeys(found, i))
        reads[node.name] = {node.name} if node.name in made else found
    for output in program.outputs:
        last.update((r, len(program.nodes)) for name in refs(output.value) for r in reads.get(name, ()))
    ends: dict[int, float] = {}
    live = most = 0.0
    for i, node in enumerate(program.nodes):
        if node.name in made:
            live += made[node.name]
            most = max(most, live)
            end = last.get(node.name, i)
            ends[end] = ends.get(end, 0.0) + made[node.name]
        live -= ends.pop(i, 0.0)
    return most
