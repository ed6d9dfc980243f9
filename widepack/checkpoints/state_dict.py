"""Where the weights are in what a training script saved, and under which names.

A state dict is a dict of tensors by name. It is found

1. where `key` says: `ema`, `model.weights` for a dict in a dict, `models.0` in a list, `model_ema.module` also for the names of a state dict that begin so;
2. in the file itself, when all that it holds is tensors;
3. under one of the usual names (`AUTOMATIC_KEYS`), alone or in one another, unless another dict in the file holds weights of the same names (an average
   beside the weights, say): then the user has to choose.

What wrappers leave in the names is taken off: a prefix `module.` or `_orig_mod.` that all names have (DataParallel, torch.compile), and the marks of
compiled, FSDP-wrapped and checkpointed parts wherever they stand.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

PREFIXES = ("module.", "_orig_mod.")
AUTOMATIC_KEYS = ("state_dict", "model", "model_state_dict", "model_state", "module", "network", "weights", "params")
SAVE = "save the weights alone: torch.save(model.state_dict(), path)"
OR_TRUST = "; or trust what wrote the file, and give --trust-pickle"

_MARKS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_COUNTER = "n_averaged"  # what torch.optim.swa_utils.AveragedModel counts with, beside `module.`
_MAX_DEPTH = 5
_SHOWN = 12


class Refused(Exception):
    """Why one file cannot be used; the callers add which one."""


class Foreign:
    """What stands for a pickled object whose class is not torch's: it is made, filled and never looked at, so that nothing of its own runs."""

    name = ""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class ForeignDict(Foreign):
    """The same for a class that is a dict: its items are read, as those of a plain one."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return OrderedDict()


class ForeignList(Foreign):
    """The same for a class that is a list."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return []


def stands_for(name: str, base: type[Foreign] = Foreign) -> type[Foreign]:
    """A class of this full name that stands for it."""
    module, _, last = name.rpartition(".")
    return type(last, (base,), {"name": name, "__module__": module})


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


class Picked(NamedTuple):
    """tensors: the state dict. module: the module that it is of, where the file holds one. versions: of the classes of its submodules, as `state_dict()` notes them."""

    tensors: dict[str, torch.Tensor]
    module: nn.Module | None = None
    versions: Mapping[str, Any] = MappingProxyType({})


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """A tensor's dtype and shape."""
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def pick(found: object, key: str | None) -> Picked:
    """The state dict in what a file holds. Raises: Refused that lists the keys that could be meant."""
    if isinstance(found, torch.Tensor):
        raise Refused(f"holds a single tensor, {info_of(found)}, not a state dict; {SAVE}")
    if not isinstance(found, (Mapping, nn.Module)):
        raise Refused(f"holds {an(found)}, not a state dict; {SAVE}")
    if not key:
        if (chosen := _choose(found)) is not None:
            return chosen
        assert isinstance(found, Mapping)  # a module is always chosen, or refused for holding nothing
        if not found:
            raise Refused("holds an empty dict, no tensors")
        hint = _hint(found)
        if hint:
            raise Refused(f"is not a dict of tensors: it holds {_listed(found)}.{hint}")
        pickled = OR_TRUST if any(isinstance(value, Foreign) for value in found.values()) else ""
        raise Refused(f"holds no dict of tensors: it holds {_listed(found)}; {SAVE}{pickled}")
    inside = _follow(found, key)
    if inside is None and isinstance(found, Mapping):  # names that begin so, in the state dict that would be taken without a key
        inside = next((deeper for name in AUTOMATIC_KEYS if (deeper := _follow(found.get(name), key)) is not None), None)
    if inside is None:
        raise Refused(f"has no {key!r}.{_hint(found) or ' It holds ' + _listed(found) + '.'}")
    chosen = _choose(inside) if isinstance(inside, (Mapping, nn.Module)) else None
    if chosen is None:
        trust = f" That can run code when it is loaded{OR_TRUST}." if isinstance(inside, Foreign) else ""
        raise Refused(f"{key!r} is {_described(inside)}, not a dict of tensors.{trust}{_hint(found)}")
    return chosen


def _choose(value: Mapping[Any, Any] | nn.Module) -> Picked | None:
    """Rules 2 and 3 of the module's page; None where the user has to choose, or there is nothing."""
    if (own := _state(value)) is not None:
        return own
    assert isinstance(value, Mapping)
    inside = dict(_dicts(value))
    usual = [path for path in inside if all(part in AUTOMATIC_KEYS for part in path.split("."))]
    if len(usual) != 1:
        return None
    picked = inside.pop(usual[0])
    return None if any(_alike(picked.tensors, other.tensors) for other in inside.values()) else picked


def _alike(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two state dicts may be of one model: half of the smaller one's names are in the other, with equal shapes."""
    plain = [{name: state[stored].shape for name, stored in without_wrappers(state)[0].items()} for state in (a, b)]
    small, large = sorted(plain, key=len)
    return 2 * sum(large.get(name) == shape for name, shape in small.items()) >= len(small)


def _state(value: object) -> Picked | None:
    """The value as a state dict, if it is one. Entries of `get_extra_state` that are no tensors are no weights."""
    if isinstance(value, nn.Module):
        module = value.module if isinstance(value, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else value
        state = module.state_dict()
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        if not tensors:
            raise Refused(f"holds a {type(module).__name__} without weights")
        return Picked(tensors, module, _versions(state))
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return None
    tensors = {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
    rest = [k for k in value if k not in tensors and not k.endswith("_extra_state")]
    return Picked(tensors, None, _versions(value)) if tensors and not rest else None


def _versions(state: object) -> dict[str, Any]:
    """What `state_dict()` notes beside the tensors: `{submodule: {"version": 2}}`. Code that loads older weights goes by it."""
    found = getattr(state, "_metadata", None)
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, Mapping)} if isinstance(found, Mapping) else {}


def _dicts(value: Mapping[Any, Any] | Sequence[Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Picked]]:
    """All state dicts and modules inside, by dotted key; those of an optimizer are none."""
    if isinstance(value, Mapping) and {"state", "param_groups"} <= set(value):
        return
    rows: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ((str(i), v) for i, v in enumerate(value))
    for key, inner in rows:
        if not isinstance(key, str) or depth >= _MAX_DEPTH or not isinstance(inner, (Mapping, list, tuple, nn.Module)):
            continue
        path = f"{prefix}{key}"
        if (picked := _state(inner)) is not None:
            yield path, picked
        elif isinstance(inner, (Mapping, list, tuple)):
            yield from _dicts(inner, f"{path}.", depth + 1)


def _follow(value: object, key: str) -> object | None:
    """What a dotted key names; a key that holds dots itself is found too, and so are the names of a state dict that begin with it."""
    if isinstance(value, (list, tuple)):
        head, _, tail = key.partition(".")
        inner = value[int(head)] if head.isdecimal() and int(head) < len(value) else None
        return _follow(inner, tail) if tail and inner is not None else inner
    if isinstance(value, nn.Module):
        state = _state(value)
        value = state.tensors if state is not None else {}
    if not isinstance(value, Mapping):
        return None
    if key in value:
        found: object = value[key]
        return found
    for at in (i for i, char in enumerate(key) if char == "."):
        if key[:at] in value and (deeper := _follow(value[key[:at]], key[at + 1 :])) is not None:
            return deeper
    return named_under(value, key) or None


def named_under(value: Mapping[Any, Any], key: str) -> dict[str, Any]:
    """The entries whose names begin with `key.`, without it."""
    return {k[len(key) + 1 :]: v for k, v in value.items() if isinstance(k, str) and k.startswith(f"{key}.") and len(k) > len(key) + 1}


def without_wrappers(names: Iterable[str]) -> tuple[dict[str, str], str]:
    """What wrappers left in the names, taken off: `{name: the name in the file}`, and the prefix that all of them had."""
    stored = list(names)
    counted = [n for n in stored if n != _COUNTER]
    prefix = ""
    while True:
        found = next((p for p in PREFIXES if counted and all(n.startswith(prefix + p) and n != prefix + p for n in counted)), None)
        if found is None:
            break
        prefix += found
    plain = {name[len(prefix) :]: name for name in (counted if prefix else stored)}
    bare = {_MARKS.sub("", name): name_in_file for name, name_in_file in plain.items()}
    return (bare if len(bare) == len(plain) and "" not in bare else plain), prefix


def _hint(found: object) -> str:
    """The keys that hold tensors, with how many, and how to choose one."""
    inside = list(_dicts(found)) if isinstance(found, Mapping) else []
    if not inside:
        return ""
    shown = [f"{path} ({len(picked.tensors)} tensor{'s' if len(picked.tensors) > 1 else ''})" for path, picked in inside[:_SHOWN]]
    more = f" and {len(inside) - _SHOWN} more" if len(inside) > _SHOWN else ""
    return f" Dicts of tensors in it: {', '.join(shown)}{more}; name one, for example --key {inside[0][0]}."


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor, {info_of(value)}"
    if isinstance(value, Mapping):
        odd = [f"{k!r} is {_type(v)}" for k, v in value.items() if not isinstance(v, torch.Tensor)]
        return f"a dict ({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})" if odd else "an empty dict"
    return an(value)


def _type(value: object) -> str:
    return value.name if isinstance(value, Foreign) else type(value).__name__


def an(value: object) -> str:
    """A value's type with its article: `an int`, `a list`."""
    name = f"pickled {value.name}" if isinstance(value, Foreign) else type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _listed(value: object) -> str:
    if not isinstance(value, Mapping):
        return an(value)
    shown = [f"{key} ({_type(inner)})" for key, inner in list(value.items())[:8]]
    return (", ".join(shown) or "nothing") + (f" and {len(value) - 8} more" if len(value) > 8 else "")
