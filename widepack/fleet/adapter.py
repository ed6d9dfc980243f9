"""Defines `Adapter`, a LoRA fine-tune as its files have it, and merges it into a base."""

from __future__ import annotations

from dataclasses import dataclass

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


def merged(base: Tensor, delta: LoraDelta, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a weight with its delta, as `merge_and_unload` of PEFT gives it.

    The difference is computed in float32, or float64 if the factors are, added, and rounded once; that of an
    embedding is rounded before and after.

    Args:
        base: The weight of the base model.
        delta: Of this weight.
        dtype: In which the base model is loaded; None for that of `base`.

    Returns: the weight, in the dtype.

    Raises:
        CheckpointError: The delta is of another shape than the base.
    """
    weight = base if dtype is None else base.to(dtype)
    rows, columns = delta.left.shape[0], delta.right.shape[1]
    transposed = is_transposed(weight, delta)
    difference = _wide(delta.left) @ _wide(delta.right)
    if transposed:
        difference = difference.t()
    difference = (difference * delta.scale).reshape(weight.shape)
    if delta.magnitude is None:
        result = weight.clone()
        result += difference.to(weight.dtype) if delta.embedding else difference
        return result
    full = weight + difference
    matrix = full.t() if transposed else full.reshape(rows, columns)
    factor = _wide(delta.magnitude) / torch.linalg.norm(matrix, dim=1)
    shape = (1, rows) if transposed else (rows, *[1] * (weight.ndim - 1))
    scaled: Tensor = factor.reshape(shape) * full
    return scaled.to(weight.dtype)


def is_transposed(weight: Tensor, delta: LoraDelta) -> bool:
    """Returns whether a weight is the transpose of the matrix that a delta is of.

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
    return turned and (delta.transposed or not straight)


def _wide(values: Tensor) -> Tensor:
    """Returns a tensor in float32 at least, as PEFT loads adapters."""
    return values if values.dtype == torch.float64 else values.float()
