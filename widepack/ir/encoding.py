"""Converts arguments between programs and torch, and walks over them.

In a program a dtype, device, layout or memory format is a `Tag`. The device is always `self`: the device that
the program runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from widepack_artifacts.program import Tag

from ..errors import ArtifactError
from ..spec.dtypes import dtype_name, dtype_of

_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}

_NESTED = (tuple, list, dict)


def map_arguments(args: Any, fn: Callable[[Any], Any], *, as_lists: bool = False) -> Any:
    """Applies a function to every leaf of arguments: to what is neither a tuple, a list nor a dict.

    as_lists: tuples become lists, the form in which programs store them.
    """
    if isinstance(args, tuple) and not as_lists:
        return tuple([map_arguments(a, fn) for a in args])
    if isinstance(args, (list, tuple)):
        return [map_arguments(a, fn, as_lists=as_lists) for a in args]
    if isinstance(args, dict):
        return {k: map_arguments(a, fn, as_lists=as_lists) for k, a in args.items()}
    return fn(args)


def iter_arguments(args: Any) -> Iterator[Any]:
    """Yields every leaf of arguments, in order: what is neither a tuple, a list nor a dict."""
    if not isinstance(args, _NESTED):
        yield args
        return
    for a in args.values() if isinstance(args, dict) else args:
        if isinstance(a, _NESTED):
            yield from iter_arguments(a)
        else:
            yield a


def type_of(value: Any, letters: Mapping[Any, str] = MappingProxyType({})) -> str:
    """The type text of a value: `float32[B,3]`, `int` for a size, `(float32[3], int)` for several.

    letters: the dim of each symbol.
    """
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{','.join(_size(s, letters) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_of(v, letters) for v in value)})"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def _size(size: Any, letters: Mapping[Any, str]) -> str:
    if isinstance(size, int):
        return str(size)
    import sympy  # takes a quarter of a second, and loading does not need it

    return str(size.node.expr.xreplace({s: sympy.Symbol(letter) for s, letter in letters.items()})).replace(
        " ", ""
    )


def decode(value: Any, device: torch.device) -> Any:
    """Arguments of a program in the form that torch takes.

    A `Ref` stays a `Ref`. Raises: ArtifactError for an unknown tag.
    """
    return map_arguments(value, lambda v: _decode_tag(v, device) if isinstance(v, Tag) else v)


def _decode_tag(tag: Tag, device: torch.device) -> Any:
    if tag.kind == "dtype":
        return dtype_of(tag.name)
    if tag.kind == "device":
        return device
    table: dict[str, Any] = _LAYOUTS if tag.kind == "layout" else _FORMATS
    if tag.name not in table:
        raise ArtifactError(f"{tag.kind} {tag.name!r} is unknown; known: {', '.join(table)}")
    return table[tag.name]


def encode(value: Any) -> Any:
    """Arguments of torch in the form that programs store: the inverse of `decode`."""
    return map_arguments(value, _encode_leaf, as_lists=True)


def _encode_leaf(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return Tag("dtype", dtype_name(value))
    if isinstance(value, torch.device):
        return Tag("device", "self")
    if isinstance(value, (torch.layout, torch.memory_format)):
        kind = "layout" if isinstance(value, torch.layout) else "memory_format"
        return Tag(kind, str(value).split(".")[1])
    return value
