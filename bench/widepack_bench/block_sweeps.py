"""The reference blocks as sweeps, so that `bench --primitive block` measures them as it measures layers."""

from __future__ import annotations

from widepack.sweeps import SWEEPS, Shape, Sweep

from .models.blocks import BLOCKS

FAMILY = "block"
BATCH, SMALL_BATCH = 8, 3


def sweeps() -> tuple[Sweep, ...]:
    """Layers, then blocks: `block:mlp`; `all` names the layers, `block` the blocks."""
    return (
        *SWEEPS,
        *(Sweep(f"{FAMILY}:{name}", b.make, Shape((), BATCH, b.inputs), Shape((), SMALL_BATCH, b.inputs), FAMILY) for name, b in BLOCKS.items()),
    )
