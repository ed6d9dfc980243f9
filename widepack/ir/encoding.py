"""Arguments of programs <-> what torch takes.

In a program a dtype, device, layout or memory format is a `Tag`; the device is always `self`: wherever the program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from widepack_artifacts.program import Tag

from ..errors import ArtifactError

_DTYPES = {str(d).split(".")[1]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`; aliases (`half`) get the name that torch prints."""
    return str(dtype).split(".")[1]


def type_of(value: Any, letters: Mapping[Any, str] = MappingProxyType({})) -> str:
    """A value's type as programs write it: `float32[B,3]`, `int` for a size, `(float32[3], int)` for several. letters: symbol of a size -> its dim's name."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(_size(s, letters) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_of(v, letters) for v in value)})"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def _size(size: Any, letters: Mapping[Any, str]) -> str:
    if isinstance(size, int):
        return str(size)
    import sympy  # a quarter of a second, and loading needs none of it

    return str(size.node.expr.xreplace({s: sympy.Symbol(letter) for s, letter in letters.items()})).replace(" ", "")


def dtype_of(name: str) -> torch.dtype:
    """Raises: ArtifactError for a dtype that torch does not have."""
    if name not in _DTYPES:
        raise ArtifactError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return _DTYPES[name]


def decode(value: Any, device: torch.device) -> Any:
    """A program's argument as torch takes it; `Ref`s stay."""
    if isinstance(value, Tag):
        if value.kind == "dtype":
            return dtype_of(value.name)
        if value.kind == "device":
            return device
        table: dict[str, Any] = _LAYOUTS if value.kind == "layout" else _FORMATS
        if value.name not in table:
            raise ArtifactError(f"{value.kind} {value.name!r} is unknown; known: {', '.join(table)}")
        return table[value.name]
    if isinstance(value, tuple):
        return tuple(decode(v, device) for v in value)
    if isinstance(value, list):
        return [decode(v, device) for v in value]
    if isinstance(value, dict):
        return {k: decode(v, device) for k, v in value.items()}
    return value


def encode(value: Any) -> Any:
    """What torch takes as a program's argument; the opposite of `decode`."""
    if isinstance(value, torch.dtype):
        return Tag("dtype", dtype_name(value))
    if isinstance(value, torch.device):
        return Tag("device", "self")
    if isinstance(value, torch.layout):
        return Tag("layout", str(value).split(".")[1])
    if isinstance(value, torch.memory_format):
        return Tag("memory_format", str(value).split(".")[1])
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {k: encode(v) for k, v in value.items()}
    return value
