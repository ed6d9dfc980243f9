"""Reads the config.json of a Hugging Face folder, which an untrusted source may have written.

The file is read once. transformers gets a copy of what was checked, in a folder of its own.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from ..errors import UsageError
from .plain_file import read_plain
from .state_dict import RefusedFile

FILE = "config.json"
MOST_BYTES = 16 << 20
MOST_PARTS = 4096
"""The most layers, experts or heads that a field of the config may name."""
MOST = 2**40
"""The largest integer of a config. transformers makes lists of as many entries as some fields say."""
MOST_LABELS = 10**6
LOCAL = frozenset({"eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""Implementations that transformers and torch contain. transformers downloads others as code."""
_FLASH = re.compile(r"(paged\|)?flash_attention_\d")
_COUNT = re.compile(
    r"(?:^|_)(?:layers?|depths?|blocks?|stages?|experts?|heads?|groups?|levels?|repeats?|stacks?|branches)"
    r"(?:_|$)"
)
_NO_COUNT = re.compile(
    r"(?:^|_)(?:size|sizes|dim|dims|length|width|ids?|tokens?|window|channels?|eps|max)(?:_|$)"
)


def read_config(path: str, folder: str, model: str) -> dict[str, Any]:
    """Returns the content of a config.json, checked.

    Args:
        path: The file.
        folder: Its folder, in errors.
        model: The value of `--model`, in errors.

    Raises:
        UsageError: It cannot be read, or names more parts than a model has, or code of somebody.
    """
    try:
        config = strict_json.parse(read_plain(path, MOST_BYTES), FILE, constants=True)
    except FileNotFoundError:
        raise UsageError(
            f"--model {model} needs the config.json that save_pretrained writes, but {folder} has none;"
            " give --model-arg folder=PATH, or another --model"
        ) from None
    except RefusedFile as refused:
        raise UsageError(f"--model {model}: {path} {refused}") from None
    except (OSError, ArtifactError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--model {model}: {path} cannot be read: {reason}") from None
    if not isinstance(config, dict):
        raise UsageError(f"--model {model}: {path} is not a JSON object")
    _check(config, f"--model {model}: {path}")
    without_flash_attention(config)
    return config


def _check(config: dict[str, Any], title: str) -> None:
    """Checks each number, and each name of an implementation. Raises: UsageError."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            if "implementation" in key:
                left += [(key, v) for v in value.values()]
            else:
                left += [(str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            left += [(key, v) for v in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            _check_number(key, value, title)
        elif "implementation" in key:
            check_implementation(key, value, title)


def _check_number(key: str, value: int, title: str) -> None:
    most = MOST_LABELS if key == "num_labels" else MOST
    if _COUNT.search(key) and not _NO_COUNT.search(key):
        most = MOST_PARTS
    if abs(value) > most:
        raise UsageError(f"{title}: {key[:60]} is {value}; at most {most} is possible")


def check_implementation(key: str, value: object, title: str) -> None:
    """Checks the name of an implementation of attention or experts. Raises: UsageError."""
    if value is None or (isinstance(value, str) and (value in LOCAL or _FLASH.fullmatch(value))):
        return
    raise UsageError(
        f"{title}: {key[:60]} is {str(value)[:80]!r}, for which transformers may download code;"
        f" known are {', '.join(sorted(LOCAL))}"
    )


def without_flash_attention(config: dict[str, Any]) -> None:
    """Removes implementations that need another package, which transformers would download.

    The weights are the same, and transformers then chooses an implementation of its own.
    """
    left: list[dict[str, Any]] = [config]
    while left:
        part = left.pop()
        for key in [k for k in part if "implementation" in k]:
            several = part[key].values() if isinstance(part[key], dict) else [part[key]]
            if any(isinstance(v, str) and v not in LOCAL for v in several):
                del part[key]
        left += [v for v in part.values() if isinstance(v, dict)]


@contextmanager
def copied(config: dict[str, Any], folder: str) -> Iterator[str]:
    """Yields a new folder with the config. transformers guesses a model's type by the name of the folder."""
    with tempfile.TemporaryDirectory(prefix="widepack-") as place:
        name = os.path.basename(os.path.abspath(folder))[:200] or "model"
        made = os.path.join(place, name)
        os.mkdir(made, 0o700)
        with open(os.path.join(made, FILE), "w", encoding="utf-8") as file:
            json.dump(config, file)
        yield made
