"""Reads the folder of a LoRA adapter as PEFT writes it, without PEFT.

The folder has adapter_config.json and adapter_model.safetensors, or adapter_model.bin. It is untrusted: the
files are read as those of any checkpoint (checkpoints/open_file.py), and no code of them runs. Every tensor
must have a meaning; one that has none is refused, never left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.open_file import look, open_file
from ..checkpoints.state_dict import RefusedFile
from ..errors import CheckpointError
from .adapter import Adapter, LoraDelta
from .adapter_config import FILE, AdapterConfig, read_config

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_WRAPPED = ".base_layer."
_SAVED, _ORIGINAL = ".modules_to_save.", ".original_module."
_LEFT = {"lora_B.weight": "lora_A.weight", "lora_embedding_B": "lora_embedding_A"}
_MAGNITUDES = ("lora_magnitude_vector", "lora_magnitude_vector.weight")
_EMBEDDINGS = ("embed_tokens", "lm_head", "word_embeddings", "wte", "shared", "embed_in", "embed_out")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_CHARACTERS = 1000  # of a tensor's name


def read_adapter(path: str | Path) -> Adapter:
    """Reads the folder of a LoRA adapter.

    Args:
        path: The folder, with the files that PEFT's `save_pretrained` writes.

    Returns: the adapter. Its tensors are mapped where the file allows; do not write into them.

    Raises:
        CheckpointError: The folder is no LoRA adapter, is damaged, or has something that widepack does not
            compute. The message names the file and the setting or tensor.
    """
    try:
        return _read(Path(path))
    except RefusedFile as refused:
        raise CheckpointError(f"adapter {path}: {refused}") from None


def is_adapter(path: str | Path) -> bool:
    """Returns whether a path is a folder with the settings of an adapter."""
    return os.path.isfile(os.path.join(path, FILE))


def _read(folder: Path) -> Adapter:
    status, _ = look(str(folder))
    if not stat.S_ISDIR(status.st_mode):
        raise RefusedFile(f"is not a folder; name the folder with {FILE}")
    config = read_config(folder)
    file = next((name for name in WEIGHTS if os.path.lexists(folder / name)), None)
    if file is None:
        raise RefusedFile(f"has no {' or '.join(WEIGHTS)}")
    try:
        checkpoint = open_file(str(folder / file)).unstripped()
        tensors = dict(_tensors(checkpoint))
        deltas, replaced = _sorted(tensors, config)
    except RefusedFile as refused:
        raise RefusedFile(f"{file}: {refused}") from None
    return Adapter(str(folder), deltas, replaced, config)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors by their names in the base model. Lora's own names follow that of the module."""
    for key in checkpoint.tensors():
        if not key.startswith(_PREFIX) or len(key) > _MOST_CHARACTERS:
            raise RefusedFile(
                f"the tensor {key[:80]!r} does not begin with {_PREFIX!r}; save the adapter with PEFT's"
                " save_pretrained"
            )
        yield key.removeprefix(_PREFIX), checkpoint.get(key)


def _sorted(
    tensors: Mapping[str, Tensor], config: AdapterConfig
) -> tuple[dict[str, LoraDelta], dict[str, Tensor]]:
    """Returns the deltas, and the tensors that replace those of the base."""
    left = dict(tensors)
    deltas: dict[str, LoraDelta] = {}
    for key in tensors:
        ending = next((end for end in _LEFT if key.endswith(f".{end}")), None)
        if ending is None:
            continue
        module = key.removesuffix(f".{ending}")
        name = f"{module}.weight".replace(_WRAPPED, ".")
        partner = f"{module}.{_LEFT[ending]}"
        if partner not in left:
            raise RefusedFile(f"{key[:200]} has no {partner[:200]} beside it; copy or save the adapter again")
        if name in deltas:
            raise RefusedFile(f"{name[:200]} has two pairs of factors: as an embedding and as another layer")
        magnitude = next((left.pop(k) for end in _MAGNITUDES if (k := f"{module}.{end}") in left), None)
        deltas[name] = _delta(module, left.pop(key), left.pop(partner), magnitude, config, ending)
    if not deltas:
        raise RefusedFile("it has no factors: no tensor's name ends with lora_B.weight or lora_embedding_B")
    replaced: dict[str, Tensor] = {}
    for key, value in left.items():
        if _ORIGINAL in key:  # with bias="all", PEFT also saves the bias of the module that it replaces
            continue
        name = key.replace(_WRAPPED, ".").replace(_SAVED, ".")
        _check_replaced(key, config)
        if name in replaced and _SAVED in key and torch.equal(replaced[name], value):
            continue
        if name in replaced:
            raise RefusedFile(f"two tensors replace {name[:200]}")
        replaced[name] = value
    return deltas, replaced


def _delta(
    module: str, left: Tensor, right: Tensor, magnitude: Tensor | None, config: AdapterConfig, ending: str
) -> LoraDelta:
    embedding = ending == "lora_embedding_B"
    what = module[:200]
    for value in (left, right, *([] if magnitude is None else [magnitude])):
        if value.dtype not in _FLOATS:
            raise RefusedFile(f"the factors of {what} are {value.dtype}; known are floating numbers")
    rank = config.rank_of(module.replace(_WRAPPED, "."))
    pointwise = left.ndim >= 2 and all(size == 1 for size in left.shape[2:])
    fits = left.ndim == right.ndim and (left.ndim == 2 or (left.ndim in (3, 4, 5) and not embedding))
    if not fits or not pointwise or left.shape[1] != rank or right.shape[0] != rank or not left.numel():
        raise RefusedFile(
            f"the factors of {what} are {list(left.shape)} and {list(right.shape)}; of rank {rank}, which"
            f" {FILE} says, they would be [out, {rank}] and [{rank}, in]; copy or save both files again"
        )
    if magnitude is None and config.dora:
        raise RefusedFile(f"{what} has no lora_magnitude_vector, and {FILE} says use_dora")
    if magnitude is not None:
        if not config.dora:
            raise RefusedFile(f"{what} has a lora_magnitude_vector, and {FILE} does not say use_dora")
        if magnitude.numel() != left.shape[0]:
            raise RefusedFile(f"{what} has {magnitude.numel()} magnitudes for {left.shape[0]} outputs")
        magnitude = magnitude.flatten()
    return LoraDelta(
        left.flatten(1),
        right.flatten(1),
        config.scale_of(module.replace(_WRAPPED, "."), rank),
        magnitude,
        embedding or (config.transposed and left.ndim == 2),
        embedding,
    )


def _check_replaced(key: str, config: AdapterConfig) -> None:
    """Raises: RefusedFile for a tensor that the settings do not explain."""
    module, _, last = key.rpartition(".")
    if "lora_" in key:
        ending = next((a for a in _LEFT.values() if key.endswith(f".{a}")), None)
        if ending is not None:
            other = next(b for b, a in _LEFT.items() if a == ending)
            beside = f"{key.removesuffix(ending)}{other}"
            raise RefusedFile(f"{key[:200]} has no {beside[:200]} beside it; copy or save the adapter again")
        raise RefusedFile(f"widepack does not know the tensor {key[:200]}")
    parts = module.split(".")
    modules = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    saved = any(name.endswith(end) for name in modules for end in config.modules_to_save)
    bias = last == "bias" and config.bias != "none"
    plain = parts[:-1] if parts[-1] == "base_layer" else parts
    embedding = last in ("weight", "bias") and bool(plain) and plain[-1] in _EMBEDDINGS
    if not saved and not bias and not embedding:
        raise RefusedFile(
            f"{FILE} does not explain the tensor {key[:200]}: it is no factor, modules_to_save does not name"
            f" its module, and bias is {config.bias!r}"
        )
