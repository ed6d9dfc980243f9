"""Reads `widepack.toml`, model arguments, and sizes in bytes, as a user writes them.

It does not import torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .input_spec import NAME, did_you_mean, kind_of_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


TOML_KEYS = ("model", "input", "key", "model_arg", "entry", "state", "features")
SERVE_TABLE = "serve"
"""The table of `widepack serve`, which `build` does not read."""
_TOML_LISTS = {"input": "x=float32[B,3,32,32]", "entry": "encode", "state": "cache", "features": "age,height"}
_TOML_EXAMPLE = {"model": "pkg.mod:factory", "key": "state_dict"}


def parse_model_args(items: Sequence[str]) -> dict[str, Any]:
    """Reads `width=64`, `name=small`, `sizes=[1,2]`.

    A value that is not JSON is a string. Raises: UsageError.
    """
    args: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or not NAME.match(name):
            raise UsageError(f"model argument {item!r}: write NAME=VALUE, for example width=64")
        if name in args:
            raise UsageError(f"model argument {name} is given twice: {args[name]!r} and {value!r}")
        try:
            args[name] = json.loads(value)
        except (ValueError, RecursionError):
            args[name] = value
    return args


_SIZES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?)?B?\Z", re.ASCII | re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Returns the bytes of `5GB`, `500 MB`, `2GiB`, or a number. Raises: UsageError."""
    match = _SIZES.match(size.strip()) if isinstance(size, str) else None
    number = 0.0 if match is None else float(match[1]) * _unit(match[2] or "")
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    if not 1 <= number < 2**63:
        raise UsageError(
            f"size {size!r}: write bytes as a number from 1, or with a unit, for example 5GB or 500MB"
        )
    return int(number)


def _unit(name: str) -> int:
    power = "kmgt".find(name[:1].lower()) + 1 if name else 0
    return int((1024 if name.endswith(("i", "I")) else 1000) ** power)


def read_toml(folder: str | Path, name: str = "widepack.toml") -> dict[str, Any]:
    """Reads `widepack.toml` of a folder, or another file of it.

    Its keys are `model`, `key`, `model_arg` (a table), and as lists `input`, `entry`, `state` and `features`.
    Returns: the keys that it has; {} without the file. Raises: UsageError, also for an unknown key or a wrong
    type.
    """
    path = Path(folder) / name
    content = _parsed(path)
    content.pop(SERVE_TABLE, None)
    for key in content:
        if key not in TOML_KEYS:
            raise UsageError(
                f"{path}: unknown key {key!r}{did_you_mean(key, TOML_KEYS) or '.'}"
                f" Known keys: {', '.join(TOML_KEYS)}"
            )
    for key in ("model", "key"):
        if not isinstance(content.get(key, ""), str):
            raise UsageError(
                f"{path}: {key} is {kind_of_text(content[key])}; it must be a string,"
                f' for example {key} = "{_TOML_EXAMPLE[key]}"'
            )
    for key, text in _TOML_LISTS.items():
        if key in content:
            rows = [content[key]] if isinstance(content[key], str) else content[key]
            if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
                raise UsageError(
                    f'{path}: {key} must be a string or a list of strings, for example {key} = ["{text}"]'
                )
            content[key] = rows
    if not isinstance(content.get("model_arg", {}), dict):
        raise UsageError(
            f"{path}: model_arg is {kind_of_text(content['model_arg'])};"
            " it must be a table: [model_arg], then width = 64"
        )
    return dict(content)


def read_table(folder: str | Path, table: str, name: str = "widepack.toml") -> dict[str, Any]:
    """Reads one table of `widepack.toml` of a folder.

    Returns: its keys; {} without the file or the table. Raises: UsageError.
    """
    path = Path(folder) / name
    content = _parsed(path).get(table, {})
    if not isinstance(content, dict):
        raise UsageError(f"{path}: {table} is {kind_of_text(content)}; it must be a table: [{table}]")
    return content


def _parsed(path: Path) -> dict[str, Any]:
    """Returns a TOML file; {} without the file. Raises: UsageError."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_bytes().decode("utf-8"))
        return content
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
