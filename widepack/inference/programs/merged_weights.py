"""Tells which wide programs merge the factors of weights, and whether there is memory for it.

A program for few rows reads a base and thin factors. A program for many rows computes each member's whole
weight once, when it is bound: this takes the memory of N models. Such programs are bound when a call first
needs one.
"""

from __future__ import annotations

from widepack_artifacts.program import Program, refs

from ...runtime.prologue import split
from ...system.memory import available_bytes
from ..open_artifact import OpenArtifact

LEAST, AUTO, MOST = "least", "auto", "most"
MEMORY = (AUTO, LEAST, MOST)
"""What `load(memory=)` takes."""
SPLIT = ("split",)
"""The strategies of programs that merge nothing."""
MOST_TIMES = 64
"""How many times the bytes of the weights files merged weights may take, times the limit of the load."""
_SHARE = 2
"""Merged weights may take one of so many parts of the memory that is available."""


def merged_bytes(artifact: OpenArtifact, program: Program) -> int:
    """Returns how many bytes the weights take that a wide program merges; 0 if it merges none."""
    if not artifact.manifest.factored.weights:
        return 0
    parts = split(program)
    from_weights: dict[str, frozenset[str]] = {s.name: frozenset([s.source]) for s in program.weights}
    for node in parts.prologue.nodes:
        read = [from_weights[r] for r in refs((node.args, node.kwargs)) if r in from_weights]
        from_weights[node.name] = frozenset().union(*read)
    values = [from_weights[name] for name in parts.names if name in from_weights]
    merged = [
        artifact.weights.row(w.base)
        for w in artifact.manifest.factored.weights
        if any(w.base in value and w.left in value for value in values)
    ]
    return len(artifact.chosen) * sum(row.bytes(1) for row in merged)


def has_memory(artifact: OpenArtifact, size: int) -> bool:
    """Returns whether weights of this many bytes may be merged now."""
    return artifact.options.memory != LEAST and fits_memory(artifact, size)


def fits_memory(artifact: OpenArtifact, size: int) -> bool:
    """Returns whether merged weights of this many bytes fit: in the memory that is available, and in what the
    files of the artifact justify.
    """
    limits = artifact.limits
    if limits.limit is not None and size > limits.limit * MOST_TIMES * limits.weights_bytes:
        return False
    available = available_bytes() if artifact.device.type == "cpu" else None
    return available is None or _SHARE * size <= available
