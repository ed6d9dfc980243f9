"""Defines `Adapter`, a LoRA fine-tune as its files have it, and how it changes the weights of a base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .adapter_config import AdapterConfig


@dataclass(frozen=True)
class LoraDelta:
    """The difference of one weight from the base's.

    It is `scale * left @ right` for the weight seen as the matrix [O, I], `weight.flatten(1)`, or for its
    transpose.

    left: [O, r]. right: [r, I]. scale: lora_alpha / r, or lora_alpha / sqrt(r) for rsLoRA. magnitude: [O] of
    DoRA, else None: row o of the weight is then magnitude[o] * (base + difference)[o] / ||(base +
    difference)[o]||. transposed: whether the weight is stored as [I, O], as in Conv1D and embeddings. One
    setting of the file is for all linear layers, so for those that are not square the shape decides.
    embedding: whether the weight is that of an embedding, whose difference PEFT rounds before it is added.
    """

    left: Tensor
    right: Tensor
    scale: float
    magnitude: Tensor | None
    transposed: bool
    embedding: bool = False

    @property
    def rank(self) -> int:
        return int(self.left.shape[1])


@dataclass(frozen=True)
class Adapter:
    """A LoRA fine-tune.

    path: of its folder. deltas: by the parameter's name in the base model. replaced: whole tensors that
    replace those of the base model: of modules_to_save, biases, embeddings. A delta of the same name is
    added to the tensor that replaces. config: the settings.

    The names are not checked against a base model. The caller must refuse a name that the base model lacks.
    """

    path: str
    deltas: dict[str, LoraDelta]
    replaced: dict[str, Tensor]
    config: AdapterConfig


class LowRankDifference(NamedTuple):
    """How an adapter changes a weight, seen as the matrix [O, I]: to `(weight + left @ right) * scale`.

    left: [O, r], with the adapter's lora_alpha in it. right: [r, I]. scale: [O, 1] or [1, I], or None.
    """

    left: Tensor
    right: Tensor
    scale: Tensor | None


def difference_of(weight: Tensor, delta: LoraDelta, turned: bool | None = None) -> LowRankDifference:
    """Returns how a delta changes a weight.

    Args:
        weight: Of the base model.
        delta: Of this weight.
        turned: Whether the model stores the weight transposed, for a square one; None for the setting of the
            adapter.

    Returns: the difference, in float32, or in float64 for a float64 weight. Only DoRA has a scale. It is
        [1, I] for a weight that is stored transposed.

    Raises:
        CheckpointError: The delta is of another shape than the weight.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    left, right = delta.left.to(dtype) * delta.scale, delta.right.to(dtype)
    dim = 1
    if is_transposed(weight, delta, turned):
        left, right, dim = right.t(), left.t(), 0
    scale = None
    if delta.magnitude is not None:
        full = torch.addmm(weight.flatten(1).double(), left.double(), right.double())
        norms = torch.linalg.vector_norm(full, dim=dim, keepdim=True)
        scale = (delta.magnitude.double().reshape(norms.shape) / norms).to(dtype)
    return LowRankDifference(left.contiguous(), right.contiguous(), scale)


def is_transposed(weight: Tensor, delta: LoraDelta, known: bool | None = None) -> bool:
    """Returns whether a weight is the transpose of the matrix that a delta is of.

    known: whether the model stores it so, which decides for a square weight; None for the adapter's setting.
    Raises: CheckpointError if the delta is of another shape.
    """
    rows, columns = delta.left.shape[0], delta.right.shape[1]
    straight = weight.ndim >= 2 and (weight.shape[0], weight.shape[1:].numel()) == (rows, columns)
    turned = weight.ndim == 2 and tuple(weight.shape) == (columns, rows)
    if not straight and not turned:
        raise CheckpointError(
            f"the adapter changes a weight of [{rows}, {columns}], and the base has {list(weight.shape)};"
            " give the base model that the adapter was trained on"
        )
    if turned and straight and known is not None and not delta.embedding:
        return known
    return turned and (delta.transposed or not straight)
