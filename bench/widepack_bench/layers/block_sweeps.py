"""Lists the reference blocks as sweeps: `widepack bench-layers block` measures them like layers.

The preset `ci` uses each block's own sizes; `quick` and `full` use the width, heads and tokens of the layers'
sweeps: 128 tokens of width 256, 8 heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from widepack_bench.layers.sweeps import SWEEPS, Shape, Sweep

from ..models.blocks import BLOCKS

FAMILY = "block"
BATCH, SMALL_BATCH = 8, 3

_WIDE = {"dim": 256}
_HEADS = {**_WIDE, "heads": 8}
_X, _TEXT, _VECTOR = "x=float32[B,128,256]", "text=float32[B,64,256]", "vector=float32[B,256]"
_ROPE, _BOTH = "rope=float32[B,1,128,16,2]", "rope=float32[B,1,192,16,2]"

LARGE: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "mlp": ({"inputs": 256, "width": 1024, "outputs": 256}, ("input=float32[B,256]",)),
    "resblock": ({"channels": 64}, ("x=float32[B,64,32,32]",)),
    "transformer": (_HEADS, (_X,)),
    "mlp_embedder": ({"inputs": 256, **_WIDE}, ("x=float32[B,256]",)),
    "ada_norm": (_WIDE, (_X, _VECTOR)),
    "cross_attention": ({**_HEADS, "context": 256}, (_X, "context=float32[B,64,256]")),
    "rotary": ({**_HEADS, "axes": (8, 12, 12)}, (_X, "positions=float32[B,128,3]")),
    "mlp_block": (_WIDE, (_X,)),
    "attention": (_HEADS, (_X, _ROPE)),
    "joint_attention": (_HEADS, (_X, _TEXT, _BOTH)),
    "double_stream": (_HEADS, (_X, _TEXT, _VECTOR, _BOTH)),
    "single_stream": (_HEADS, (_X, _VECTOR, _ROPE)),
}
"""For each block its factory's options and its inputs in `quick` and `full`."""


def sweeps() -> tuple[Sweep, ...]:
    """Returns the sweeps of layers, then of blocks. `all` names the layers, `block` the blocks."""
    return (*SWEEPS, *(_sweep(name) for name in BLOCKS))


def _sweep(name: str) -> Sweep:
    block = BLOCKS[name]
    options, inputs = LARGE[name]
    return Sweep(
        f"{FAMILY}:{name}",
        block.make,
        Shape((), BATCH, inputs, options),
        Shape((), SMALL_BATCH, block.inputs),
        FAMILY,
    )
