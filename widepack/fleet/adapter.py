"""Reads the folder of a LoRA adapter as PEFT writes it, without PEFT.

The folder has adapter_config.json and adapter_model.safetensors, or adapter_model.bin. It is untrusted: the
files are read as those of any checkpoint (checkpoints/open_file.py), and no code of them runs. Every tensor
must have a meaning; one that has none is refused, never left out.

`AdapterConfig` reads the settings of a LoRA adapter: `adapter_config.json` as PEFT writes it.

A setting that changes the weights in a way that widepack does not compute is refused. So is a setting that
it does not know, unless it is null, false or empty.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.open_file import look, open_file
from ..checkpoints.plain_file import read_plain
from ..checkpoints.shards import folders_inside, has_weights
from ..checkpoints.state_dict import RefusedFile
from ..errors import CheckpointError
from .name_patterns import name_pattern

FILE = "adapter_config.json"
MAX_BYTES = 1 << 20
_MOST_PATTERNS = 10_000
_SWITCHES = ("use_rslora", "use_dora", "fan_in_fan_out")
# Settings that say how the adapter was made or where it goes, and do not change what its weights mean.
_WITHOUT_EFFECT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "layers_to_transform",
    "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config", "ensure_weight_tying",
}  # fmt: skip  # one list
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "init_lora_weights"}
_STARTS = ("gaussian", "eva", "orthogonal")
_REFUSED = {
    "lora_bias": "adds a bias of its own to each layer",
    "layer_replication": "repeats layers, so the base model has another architecture",
    "trainable_token_indices": "changes single rows of embeddings",
    "target_parameters": "changes parameters that are not of linear layers",
}
_MERGE = "merge it with PEFT (merge_and_unload) and give the merged checkpoint"


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a LoRA adapter.

    rank, alpha: of all layers that no pattern names. rank_pattern, alpha_pattern: by regular expressions for
    the end of a module's name. rslora: whether the scale is alpha / sqrt(r). dora: whether each weight has
    magnitudes. transposed: PEFT's fan_in_fan_out. bias: "none", "all" or "lora_only". modules_to_save: the
    ends of names of modules that are saved whole. base_model: the name or path of the base model, or "".
    """

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    rslora: bool
    dora: bool
    transposed: bool
    bias: str
    modules_to_save: tuple[str, ...]
    base_model: str

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        pattern = _matching(self.rank_pattern, module)
        return self.rank if pattern is None else self.rank_pattern[pattern]

    def scale_of(self, module: str, rank: int) -> float:
        """Returns the scale of a module's difference."""
        pattern = _matching(self.alpha_pattern, module)
        alpha = self.alpha if pattern is None else self.alpha_pattern[pattern]
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Reads the settings in an adapter's folder. Raises: RefusedFile."""
    try:
        data = read_plain(str(folder / FILE), MAX_BYTES)
    except RefusedFile as refused:
        raise RefusedFile(f"{FILE} {refused}") from None
    except FileNotFoundError:
        raise RefusedFile(f"{FILE} there is no such file") from None
    except OSError as error:
        raise RefusedFile(f"{FILE} cannot be read: {error.strerror or error}") from None
    try:
        found = strict_json.parse(data, FILE)
    except ArtifactError as error:
        raise RefusedFile(str(error)) from None
    if not isinstance(found, dict):
        raise RefusedFile(f"{FILE} is not an object of settings")
    return _checked(found)


def _checked(found: Mapping[str, Any]) -> AdapterConfig:
    kind = found.get("peft_type")
    if kind != "LORA":
        raise RefusedFile(f"{FILE}: peft_type is {str(kind)[:40]!r}; widepack reads 'LORA'; {_MERGE}")
    for key, why in _REFUSED.items():
        if found.get(key):
            raise RefusedFile(f"{FILE}: {key} {why}, which widepack does not read; {_MERGE}")
    known = _WITHOUT_EFFECT | _READ | set(_SWITCHES)
    unknown = next((key for key, value in found.items() if key not in known and value), None)
    if unknown is not None:
        raise RefusedFile(
            f"{FILE}: widepack does not know the setting {unknown[:60]!r} ="
            f" {str(found[unknown])[:60]}; {_MERGE}"
        )
    start = found.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in _STARTS:
        raise RefusedFile(
            f"{FILE}: init_lora_weights is {str(start)[:40]!r}, and such a start can change the base's"
            f" weights; known are true, false, {', '.join(_STARTS)}; save the adapter relative to the base"
            f" (path_initial_model_for_weight_conversion), or {_MERGE}"
        )
    switches = {key: _switch(found, key) for key in _SWITCHES}
    bias = found.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise RefusedFile(f"{FILE}: bias is {str(bias)[:40]!r}; known: none, all, lora_only")
    saved = found.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) and name for name in saved):
        raise RefusedFile(f"{FILE}: modules_to_save is not a list of names")
    base = found.get("base_model_name_or_path")
    return AdapterConfig(
        rank=_rank(found.get("r", 8), "r"),
        alpha=_alpha(found.get("lora_alpha", 8), "lora_alpha"),
        rank_pattern={k: _rank(v, f"rank_pattern {k[:60]!r}") for k, v in _patterns(found, "rank_pattern")},
        alpha_pattern={
            k: _alpha(v, f"alpha_pattern {k[:60]!r}") for k, v in _patterns(found, "alpha_pattern")
        },
        rslora=switches["use_rslora"],
        dora=switches["use_dora"],
        transposed=switches["fan_in_fan_out"],
        bias=bias,
        modules_to_save=tuple(saved),
        base_model=base if isinstance(base, str) else "",
    )


def _switch(found: Mapping[str, Any], key: str) -> bool:
    value = found.get(key)
    if value is not None and not isinstance(value, bool):
        raise RefusedFile(f"{FILE}: {key} is {str(value)[:40]!r}, not true or false")
    return bool(value)


def _rank(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RefusedFile(f"{FILE}: {what} is {str(value)[:40]!r}, not a positive integer")
    return value


def _alpha(value: object, what: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise RefusedFile(f"{FILE}: {what} is {str(value)[:40]!r}, not a finite number")
    return float(value)


def _patterns(found: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    patterns = found.get(key) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
        raise RefusedFile(f"{FILE}: {key} is not an object of at most {_MOST_PATTERNS} patterns")
    for pattern in patterns:
        try:
            name_pattern(pattern)
        except ValueError as error:
            raise RefusedFile(
                f"{FILE}: the pattern {pattern[:60]!r} of {key}: {error}; name the modules instead"
            ) from None
    return list(patterns.items())


def _matching(patterns: Mapping[str, object], module: str) -> str | None:
    """Returns the first pattern that matches the end of a module's name, as PEFT chooses it."""
    return next((p for p in patterns if name_pattern(p).matches(module)), None)


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


def adapters_inside(path: str) -> list[str]:
    """Returns the adapters in the subfolders of a folder that has no weights; [] for any other path."""
    if not os.path.isdir(path) or has_weights(path):
        return []
    return folders_inside(path, is_adapter)


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
