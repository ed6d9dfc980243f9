"""Makes the members of `--model hf`: with transformers, from the config.json beside the first checkpoint.

Only transformers' own classes are used. No code of the folder runs, and nothing is downloaded. The class is
the one that `architectures` names, or what AutoModel chooses for the config. Arguments of the factory are
those of the config: `--model-arg use_cache=true`. The argument `folder` names the folder of config.json.
`use_cache` is off by default: a cache of keys and values is not an output of a member.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .factory import Factory

NAME = "hf"


def hugging_face(args: Mapping[str, object] | None, beside: str) -> Factory:
    """Returns the factory of a folder that `save_pretrained` wrote.

    beside: the first checkpoint, a folder or a file in one. Raises: UsageError.
    """
    config_args = dict(args or {})
    default = beside if os.path.isdir(beside) else os.path.dirname(beside) or os.curdir
    folder = str(config_args.pop("folder", "") or default)
    path = os.path.join(folder, "config.json")
    config = _read_config(path, folder)
    transformers = _transformers()
    model_class = _model_class(transformers, config, path)

    def make(**overrides: object) -> nn.Module:
        return _make(transformers, model_class, folder, overrides)

    return Factory(NAME, make, config_args)


def _read_config(path: str, folder: str) -> dict[str, Any]:
    """Returns the content of config.json. Raises: UsageError."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        raise UsageError(
            f"--model {NAME} needs the config.json that save_pretrained writes, but {folder} has none;"
            " give --model-arg folder=PATH, or another --model"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--model {NAME}: {path} cannot be read: {reason}") from None
    if not isinstance(config, dict):
        raise UsageError(f"--model {NAME}: {path} is not a JSON object")
    return config


def _transformers() -> ModuleType:
    """Imports transformers. Raises: UsageError."""
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"--model {NAME} needs transformers, which is not installed: pip install 'widepack[hf]'"
        ) from None
    module: ModuleType = transformers
    return module


def _model_class(transformers: ModuleType, config: Mapping[str, Any], path: str) -> type[nn.Module] | None:
    """Returns the class that the config names; None if it names none.

    Raises: UsageError for an unknown one.
    """
    architectures = config.get("architectures")
    name = ""
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        name = architectures[0]
    if not name:
        return None
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    reason = (
        "its code is in the folder, and code of a folder is not run"
        if "auto_map" in config
        else f"transformers {transformers.__version__} has no such class"
    )
    raise UsageError(
        f"--model {NAME}: {path} names the architecture {name}, but {reason};"
        " name a factory of your own: --model file.py:make"
    )


def _make(
    transformers: ModuleType,
    model_class: type[nn.Module] | None,
    folder: str,
    overrides: Mapping[str, object],
) -> nn.Module:
    """Makes one member with fresh weights. overrides: values of the config's fields. Raises: UsageError."""
    config: Any = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    for key, value in {"use_cache": False, **overrides}.items():
        if not hasattr(config, key) and key != "use_cache":
            raise UsageError(f"--model {NAME}: the config of {folder} has no {key!r}")
        setattr(config, key, value)
    with _default_dtype(getattr(config, "dtype", None)):
        module: nn.Module = (
            transformers.AutoModel.from_config(config, trust_remote_code=False)
            if model_class is None
            else model_class(config)
        )
    return module


@contextmanager
def _default_dtype(dtype: object) -> Iterator[None]:
    """Sets the dtype of weights that a model makes without a dtype, as `from_pretrained` does."""
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
