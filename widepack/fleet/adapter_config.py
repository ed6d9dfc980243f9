"""Reads the settings of a LoRA adapter: `adapter_config.json` as PEFT writes it.

A setting that changes the weights in a way that widepack does not compute is refused. So is a setting that
it does not know, unless it is null, false or empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from ..checkpoints.plain_file import read_plain
from ..checkpoints.state_dict import RefusedFile
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
