"""`--model hf`: members made by transformers from the config.json beside the first checkpoint's weights. Only transformers' own classes are made: no code of
the folder is run, and nothing is downloaded.

The class is the one that `architectures` names, else what AutoModel takes for the config. Arguments of the factory are the config's: `--model-arg use_cache=true`;
one more, `folder`, says where config.json is. `use_cache` is off unless it is asked for: a cache of keys and values is no output of a member.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .alignment import Factory

NAME = "hf"


def hugging_face(args: Mapping[str, object] | None, beside: str) -> Factory:
    """The factory of a folder that `save_pretrained` wrote. beside: the first checkpoint, a folder or a file in one. Raises: UsageError."""
    given = dict(args or {})
    folder = str(given.pop("folder", "") or (beside if os.path.isdir(beside) else os.path.dirname(beside) or os.curdir))
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except FileNotFoundError:
        raise UsageError(
            f"--model {NAME} needs the config.json that save_pretrained writes, and there is none in {folder}; give --model-arg folder=PATH, or another --model"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {NAME}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"--model {NAME}: {path} holds no object")
    try:
        import transformers
    except ImportError:
        raise UsageError(f"--model {NAME} needs transformers, which is not installed: pip install 'widepack[hf]'") from None
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    found = getattr(transformers, name, None) if name else None
    if name and not (isinstance(found, type) and issubclass(found, nn.Module)):
        code = "its code is in the folder, which is not run" if "auto_map" in raw else f"transformers {transformers.__version__} has no such class"
        raise UsageError(f"--model {NAME}: {path} names the architecture {name}, but {code}; name a factory of your own: --model file.py:make")

    def make(**overrides: object) -> nn.Module:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for key, value in {"use_cache": False, **overrides}.items():
            if not hasattr(config, key) and key != "use_cache":
                raise UsageError(f"--model {NAME}: the config of {folder} has no {key!r}")
            setattr(config, key, value)
        with _default_dtype(getattr(config, "dtype", None)):
            module: nn.Module = transformers.AutoModel.from_config(config, trust_remote_code=False) if found is None else found(config)
        return module

    return Factory(NAME, make, given)


@contextmanager
def _default_dtype(dtype: object) -> Iterator[None]:
    """While a model is made: weights without a dtype of their own get this one, as `from_pretrained` does it."""
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
