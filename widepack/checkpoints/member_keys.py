"""Finds several members in one file by a key with `*`.

| key | members |
|---|---|
| `*` | every state dict of a list or dict at the top of the file; a dict may have integers as keys |
| `model_*`, `models.*` | those whose keys match; also parts of names: `models.0.weight`, `models.1.weight` |
| `[*]`, `params[*]` | the slices `[i]` of stacked tensors, as `torch.func.stack_module_state` makes them |

Each member has a key without `*`: `model_0`, `models.1`, `params[3]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from widepack_artifacts.errors import some

from .state_dict import (
    AUTOMATIC_KEYS,
    PARAMETERS,
    PickedStateDict,
    RefusedFile,
    as_tensor,
    follow,
    joined,
    keyed,
    state_dict_in,
    without_a_name,
)

_STACKED = re.compile(r"(.*)\[(\*|[0-9]{1,9})\]\Z", re.DOTALL)
_SHOWN = 6


def is_pattern(key: str | None) -> bool:
    """Returns whether a key names several members."""
    return key is not None and "*" in key


def stacked(key: str | None) -> tuple[str, str] | None:
    """Returns the key of a stacked state dict and the number in it (or `*`); None for another key."""
    match = _STACKED.match(key or "")
    return (match[1], match[2]) if match else None


def keys_in(content: object, key: str) -> list[str]:
    """Returns the key of each member in the content of a file. Raises: RefusedFile if there is none."""
    if (place := stacked(key)) is not None:
        base, _ = place
        return [f"{base}[{i}]" for i in range(_members(stacked_state(content, base), base))]
    for head in ("", *AUTOMATIC_KEYS):
        inside = follow(content, head) if head else content
        keys = [] if inside is None else list(dict.fromkeys(_matches(inside, key.split("."))))
        if keys:
            return [f"{head}.{k}" if head else k for k in keys]
    raise RefusedFile(without_a_name(content) or f"has no state dict that the key {key!r} matches")


def _matches(value: object, parts: list[str], prefix: str = "") -> Iterator[str]:
    """Yields the keys of the state dicts that a pattern matches."""
    if not parts:
        if isinstance(value, (Mapping, nn.Module)) and state_dict_in(value) is not None:
            yield prefix
        return
    head, *rest = parts
    inside = keyed(value) if isinstance(value, (Mapping, list, tuple)) else {}
    for name in _names(inside, isinstance(value, Mapping)) if "*" in head else [head]:
        if not fnmatchcase(name, head):
            continue
        if (inner := inside[name] if name in inside else follow(value, name)) is not None:
            yield from _matches(inner, rest, f"{prefix}.{name}" if prefix else name)


def _names(inside: Mapping[str, Any], of_tensors: bool) -> list[str]:
    """Returns what may stand in place of a `*`: keys, places in a list, and first parts of tensors' names."""
    names: dict[str, None] = {}
    for name, value in inside.items():
        names[name.partition(".")[0] if of_tensors and as_tensor(value) is not None else name] = None
    return list(names)


def stacked_state(content: object, base: str) -> PickedStateDict:
    """Returns a stacked state dict. Parameters and buffers in two dicts are one. Raises: RefusedFile."""
    inside = follow(content, base) if base else content
    above, _, last = base.rpartition(".")
    outside = follow(content, above) if above else content
    if last in PARAMETERS and joined(outside) is not None:
        inside = outside  # the buffers of these parameters
    picked = state_dict_in(tuple(inside) if isinstance(inside, list) else inside)
    if picked is None:
        raise RefusedFile(f"has no state dict {f'at {base!r}' if base else 'at its top'} to take slices of")
    return picked


def _members(state: PickedStateDict, base: str) -> int:
    """Returns the size of axis 0 of all tensors. Raises: RefusedFile if they have no common one."""
    sizes: dict[int, str] = {}
    for name, tensor in state.tensors.items():
        sizes.setdefault(tensor.shape[0] if tensor.ndim else -1, name)
    if len(sizes) != 1 or -1 in sizes or 0 in sizes:
        texts = [f"{name} is {list(state.tensors[name].shape)}" for name in sizes.values()]
        raise RefusedFile(
            f"is not a stack of members{f' at {base!r}' if base else ''}: the tensors have no common size of "
            f"axis 0 ({some(texts, _SHOWN)})"
        )
    return next(iter(sizes))


def slice_of(state: PickedStateDict, number: int, key: str) -> PickedStateDict:
    """Returns one member of a stacked state dict. Raises: RefusedFile if there is none of this number."""
    count = _members(state, stacked(key)[0])  # type: ignore[index]  # the key was parsed
    if number >= count:
        raise RefusedFile(f"has no {key!r}: there are {count} members, counted from 0")
    tensors = {name: tensor[number] for name, tensor in state.tensors.items()}
    return state._replace(tensors=tensors, module=None)
