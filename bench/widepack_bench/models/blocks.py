"""Reference blocks by name: `widepack trace -m NAME` shows them, and the benchmark and the self-test of
blocks run them.

This file does not import torch, so that a list of the blocks is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .factory import MODELS, factory_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """factory: `file:function` among the models. inputs: specs in the form of `--input`, with `B` for the
    batch. doc: one line that describes the block.
    """

    factory: str
    inputs: tuple[str, ...]
    doc: str

    @property
    def model(self) -> str:
        """Returns the factory in the form of `--model`."""
        return f"{MODELS}.{self.factory}"

    @property
    def make(self) -> Callable[[], nn.Module]:
        """Returns the factory. Each call makes a block with fresh weights."""
        return factory_of(self.model)


_X, _TEXT, _VECTOR = "x=float32[B,12,64]", "text=float32[B,6,64]", "vector=float32[B,64]"
_ROPE, _BOTH = "rope=float32[B,1,12,8,2]", "rope=float32[B,1,18,8,2]"

BLOCKS: dict[str, BlockSpec] = {
    "mlp": BlockSpec("mlp:mlp", ("input=float32[B,64]",), "a perceptron with one hidden layer"),
    "resblock": BlockSpec(
        "resnet:block", ("x=float32[B,64,8,8]",), "a residual block of two 3x3 convolutions with batch norms"
    ),
    "transformer": BlockSpec(
        "transformer:block",
        ("x=float32[B,16,64]",),
        "a transformer block: self-attention and a perceptron, norms before them",
    ),
    "mlp_embedder": BlockSpec(
        "embedders:mlp_embedder", ("x=float32[B,32]",), "a vector as one of the model's width: MLPEmbedder"
    ),
    "ada_norm": BlockSpec(
        "embedders:ada_norm",
        (_X, _VECTOR),
        "a norm scaled, shifted and gated by a vector: AdaLayerNormZeroSingle",
    ),
    "cross_attention": BlockSpec(
        "embedders:cross_attention",
        (_X, "context=float32[B,9,48]"),
        "attention over another sequence: MultiheadCrossAttention",
    ),
    "rotary": BlockSpec(
        "embedders:rotary",
        (_X, "positions=float32[B,12,3]"),
        "heads turned by rotary positions of three axes",
    ),
    "mlp_block": BlockSpec("flux:mlp", (_X,), "Flux-style: a perceptron between norm and residual"),
    "attention": BlockSpec(
        "flux:attention", (_X, _ROPE), "Flux-style: attention with QK-norm and rotary positions"
    ),
    "joint_attention": BlockSpec(
        "flux:joint_attention", (_X, _TEXT, _BOTH), "Flux-style: image and text in one attention"
    ),
    "double_stream": BlockSpec(
        "flux:double_stream",
        (_X, _TEXT, _VECTOR, _BOTH),
        "Flux-style: two modulated streams that meet in one attention",
    ),
    "single_stream": BlockSpec(
        "flux:single_stream", (_X, _VECTOR, _ROPE), "Flux-style: attention and perceptron side by side, gated"
    ),
}
