"""Finds the state dict in the content of a file, and removes what wrappers left in its names.

A state dict is a dict of tensors by name. It is found

1. at `key`: `ema`; `model.weights` for a dict in a dict; `models.0` in a list; `model_ema.module` also as a
   prefix of names in a state dict. A key that is an integer has the name of its digits: `0` in
   `{fold: state_dict}`;
2. in the file itself, if it has tensors, and beside them only extra state, numbers and texts; numbers and
   texts are names that the model does not have;
3. under one of the usual names (`AUTOMATIC_KEYS`), also nested. If another dict in the file has weights of
   the same names, for example an average beside the weights, the user must choose.

These parts of names are removed: a prefix `module.` or `_orig_mod.` that all names have (DataParallel,
torch.compile), and the marks of compiled, FSDP-wrapped and checkpointed parts anywhere in a name.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Number
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from widepack_artifacts.errors import some

PREFIXES = ("module.", "_orig_mod.")
AUTOMATIC_KEYS = (
    "state_dict",
    "model",
    "model_state_dict",
    "model_state",
    "module",
    "network",
    "weights",
    "params",
)
PARAMETERS = ("params", "parameters")
SAVE = "save the weights alone: torch.save(model.state_dict(), path)"
UNQUANTIZED = (
    "widepack reads floating weights and does not quantize; give the checkpoint from before"
    " torch.ao.quantization, with --dtype bfloat16 for less memory"
)
OR_TRUST = "; or give --trust-pickle if you trust the origin of the file"

_MARKS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
COUNTER = "n_averaged"  # the counter of torch.optim.swa_utils.AveragedModel, beside `module.`
_MAX_DEPTH = 5
_SHOWN = 12
_LARGEST = 2**2048  # Python refuses to write the digits of very long integers
_KEY_LENGTH = 60  # of a key in a message
_CONTAINERS = (Mapping, list, tuple, nn.Module)


class RefusedFile(Exception):
    """Raised with the reason why a file cannot be used. The callers add its name."""


class Foreign:
    """A placeholder for a pickled object of another class.

    It ignores its content, so no code of the class runs.
    """

    name = ""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class ForeignDict(Foreign):
    """A placeholder for an object whose class is a dict. Its items are read as those of a plain dict."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return OrderedDict()


class ForeignList(Foreign):
    """A placeholder for an object whose class is a list."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return []


def stands_for(name: str, base: type[Foreign] = Foreign) -> type[Foreign]:
    """Returns a placeholder for the class of this full name."""
    module, _, last = name.rpartition(".")
    return type(last, (base,), {"name": name, "__module__": module})


class TensorInfo(NamedTuple):
    """The dtype and shape of a tensor, known without reading it."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


class PickedStateDict(NamedTuple):
    """The state dict of a file.

    tensors: without those of the extra state. module: its module if the file contains one. versions: of its
    submodules, as `nn.Module.state_dict` stores them. settings: the hyperparameters that Lightning stored
    beside it. extra: what `get_extra_state` of its submodules returned, and numbers and texts that are
    beside the weights, by name.
    """

    tensors: dict[str, torch.Tensor]
    module: nn.Module | None = None
    versions: Mapping[str, Any] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})
    extra: Mapping[str, Any] = MappingProxyType({})


EXTRA_STATE = "_extra_state"
"""The last part of the name under which `nn.Module.state_dict` stores what `get_extra_state` returned."""


def is_extra_state(name: str) -> bool:
    """Returns whether a name of a state dict is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def settings_of(content: object) -> dict[str, Any]:
    """Returns the `hyper_parameters` of a Lightning checkpoint that are numbers, texts or lists."""
    stored = content.get("hyper_parameters") if isinstance(content, Mapping) else None
    if not isinstance(stored, Mapping):
        return {}
    rows = list(stored.items())[:1000]
    return {k: v for k, v in rows if isinstance(k, str) and k.isidentifier() and _short(v)}


def _short(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(not isinstance(v, (list, tuple)) and _short(v) for v in value)
    if isinstance(value, str):
        return len(value) <= 80 and value.isprintable()
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """Returns a tensor's dtype and shape."""
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def pick(content: object, key: str | None) -> PickedStateDict:
    """Returns the state dict in the content of a file. Raises: RefusedFile that lists the possible keys."""
    if isinstance(content, torch.Tensor):
        raise RefusedFile(f"has a single tensor, {info_of(content)}, not a state dict; {SAVE}")
    whole = isinstance(content, (Mapping, nn.Module)) or joined(content) is not None
    if not whole and not (key and isinstance(content, (list, tuple))):
        raise RefusedFile(f"has {an(content)}, not a state dict; {_several(content) or SAVE}")
    if not key:
        if (chosen := state_dict_in(content)) is not None:
            return chosen
        assert isinstance(content, Mapping)  # `state_dict_in` never returns None for the others
        if not content:
            raise RefusedFile("has an empty dict, no tensors")
        if packed := _packed(content):
            raise RefusedFile(f"is of a quantized model: it has {packed}; {UNQUANTIZED}")
        hint = _hint(content)
        if hint:
            raise RefusedFile(f"is not a dict of tensors: it has {_listed(content)}.{hint}")
        if unnamed := without_a_name(content):
            raise RefusedFile(unnamed)
        pickled = OR_TRUST if _has_foreign(content) else ""
        raise RefusedFile(f"has no dict of tensors: it has {_listed(content)}; {SAVE}{pickled}")
    inside = follow(content, key)
    if inside is None and isinstance(content, Mapping):
        # The key may be a prefix of names in the state dict that is the default.
        inside = next(
            (deeper for name in AUTOMATIC_KEYS if (deeper := follow(content.get(name), key)) is not None),
            None,
        )
    if inside is None:
        raise RefusedFile(f"has no {key!r}.{_hint(content) or ' It has ' + _listed(content) + '.'}")
    chosen = state_dict_in(inside)
    if chosen is None:
        trust = f" Loading it can run code{OR_TRUST}." if _has_foreign(inside) else ""
        raise RefusedFile(f"{key!r} is {_described(inside)}, not a dict of tensors.{trust}{_hint(content)}")
    return chosen


def _has_foreign(value: object, depth: int = 0) -> bool:
    """Returns whether a value is or holds a pickled object of another class, such as a NumPy array."""
    inside = keyed(value) if isinstance(value, (Mapping, list, tuple)) and depth < _MAX_DEPTH else {}
    return isinstance(value, Foreign) or any(_has_foreign(inner, depth + 1) for inner in inside.values())


def _several(content: object) -> str:
    """Returns the key for a list in which every value is a state dict; "" for any other value."""
    values = list(content) if isinstance(content, (list, tuple)) else []
    if values and all(isinstance(v, (Mapping, nn.Module)) and state_dict_in(v) is not None for v in values):
        return (
            f"its {len(values)} values are state dicts: give --key '*' for a member of each, or --key 0 for"
            " one"
        )
    return ""


def pattern_of(paths: Sequence[str]) -> str:
    """Returns the pattern of keys that differ in a number: `model_*`; "" if there is none."""
    if len(paths) < 2:
        return ""
    patterns = {re.sub(r"[0-9]+", "*", path) for path in paths}
    return next(iter(patterns)) if len(patterns) == 1 and "*" in next(iter(patterns)) else ""


def _packed(value: Mapping[Any, Any], depth: int = 0) -> str:
    """Returns the name of a packed weight of torch.ao.quantization in a state dict; "" if there is none."""
    for name, inner in value.items():
        if isinstance(name, str) and name.endswith("._packed_params"):
            return name[:80]
        if isinstance(inner, Mapping) and depth < _MAX_DEPTH and (packed := _packed(inner, depth + 1)):
            return packed
    return ""


def state_dict_in(value: object) -> PickedStateDict | None:
    """Returns the state dict in a value by rules 2 and 3 of the module's docstring.

    Returns: None if the user must choose, or nothing is found.
    """
    if (own := _state(value)) is not None:
        return own
    if not isinstance(value, Mapping):
        return None
    inside = dict(_dicts(value))
    usual = [path for path in inside if all(part in AUTOMATIC_KEYS for part in path.split("."))]
    if len(usual) != 1:
        return None
    picked = inside.pop(usual[0])
    return None if any(_alike(picked.tensors, other.tensors) for other in inside.values()) else picked


def _alike(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether two state dicts may be of one model.

    They may if half of the smaller one's names are in the other, with equal shapes.
    """
    plain = [{name: s[stored].shape for name, stored in without_wrappers(s).items()} for s in (a, b)]
    small, large = sorted(plain, key=len)
    return 2 * sum(large.get(name) == shape for name, shape in small.items()) >= len(small)


def _state(value: object) -> PickedStateDict | None:
    """Returns the value as a state dict, or None."""
    value = joined(value) or value
    if isinstance(value, nn.Module):
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        module = value.module if isinstance(value, wrappers) else value
        state = module.state_dict()
        tensors, extra = _tensors(state), _extra(state)
        if not tensors:
            raise RefusedFile(f"has a {type(module).__name__} without weights")
        return PickedStateDict(tensors, module, _versions(state), extra=extra)
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return None
    tensors, extra = _tensors(value), _extra(value)
    whole = tensors and len(tensors) + len(extra) == len(value)
    return PickedStateDict(tensors, None, _versions(value), extra=extra) if whole else None


def joined(value: object) -> dict[str, Any] | None:
    """Returns parameters and buffers that a value has in two dicts as one dict; None for another value.

    The dicts are at the keys `params` (or `parameters`) and `buffers`, or a tuple, as
    `torch.func.stack_module_state` returns it.
    """
    parts: Sequence[object] = value if type(value) is tuple else ()
    if isinstance(value, Mapping):
        parts = [value[key] for key in (*PARAMETERS, "buffers") if key in value]
        parts = parts if "buffers" in value else ()
    dicts = [p for p in parts if isinstance(p, Mapping) and len(_tensors(p)) == len(p)]
    if len(parts) != 2 or len(dicts) != 2 or not dicts[0] or set(dicts[0]) & set(dicts[1]):
        return None
    return {**dicts[0], **dicts[1]}


def _tensors(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights of a dict. NumPy arrays of numbers count as tensors."""
    tensors = {k: as_tensor(v) for k, v in value.items() if not is_extra_state(k)}
    return {k: v for k, v in tensors.items() if v is not None}


def _extra(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the extra state in a dict, and the numbers and texts beside its weights."""
    beside = (Number, str, type(None))
    return {k: v for k, v in value.items() if is_extra_state(k) or isinstance(v, beside)}


def as_tensor(value: object) -> torch.Tensor | None:
    """Returns a tensor, or a NumPy array of numbers as a tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ != "numpy" or not hasattr(value, "__array_interface__"):
        return None
    array: Any = value
    if array.dtype.kind not in "biufc":
        return None
    native = array.astype(array.dtype.newbyteorder("="), copy=True)
    try:
        return torch.as_tensor(native)
    except TypeError:  # float128 and others that torch does not have
        return None


def _versions(state: object) -> dict[str, Any]:
    """Returns what `state_dict()` stores beside the tensors: `{submodule: {"version": 2}}`.

    Modules read it when they load older weights.
    """
    metadata = getattr(state, "_metadata", None)
    rows = metadata.items() if isinstance(metadata, Mapping) else ()
    return {k: v for k, v in rows if isinstance(k, str) and isinstance(v, Mapping)}


def _dicts(
    value: Mapping[Any, Any] | Sequence[Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, PickedStateDict]]:
    """Yields all state dicts and modules inside a value, by dotted key, without those of an optimizer."""
    if isinstance(value, Mapping) and {"state", "param_groups"} <= set(value):
        return
    for key, inner in keyed(value).items() if depth < _MAX_DEPTH else ():
        if not isinstance(inner, _CONTAINERS):
            continue
        path = f"{prefix}{key}"
        if (picked := _state(inner)) is not None:
            yield path, picked
        elif isinstance(inner, (Mapping, list, tuple)):
            yield from _dicts(inner, f"{path}.", depth + 1)


def follow(value: object, key: str) -> object | None:
    """Returns the value at a dotted key; None if there is none.

    Keys that contain dots are found too. The key may also be a prefix of names in a state dict.
    """
    if isinstance(value, (list, tuple)):
        head, _, tail = key.partition(".")
        inner = value[int(head)] if head.isdecimal() and int(head) < len(value) else None
        return follow(inner, tail) if tail and inner is not None else inner
    if isinstance(value, nn.Module):
        state = _state(value)
        value = state.tensors if state is not None else {}
    if not isinstance(value, Mapping):
        return None
    inside = keyed(value)
    if key in inside:
        stored: object = inside[key]
        return stored
    for at in (i for i, char in enumerate(key) if char == "."):
        if key[:at] in inside and (deeper := follow(inside[key[:at]], key[at + 1 :])) is not None:
            return deeper
    return named_under(value, key) or None


def keyed(value: Mapping[Any, Any] | Sequence[Any]) -> dict[str, Any]:
    """Returns what is in a dict or list, in order, by the names of its keys and places.

    Keys that are no texts or integers have no name and are left out. Raises: RefusedFile if the keys 0 and
    "0" both have a dict or list.
    """
    if not isinstance(value, Mapping):
        return {str(i): inner for i, inner in enumerate(value)}
    named: dict[str, Any] = {}
    for key, inner in value.items():
        if (name := _name_of(key)) is None:
            continue
        if name in named and not isinstance(inner, _CONTAINERS):
            continue
        if isinstance(named.get(name), _CONTAINERS):
            raise RefusedFile(f"has the keys {name} and '{name}' in one dict; --key cannot tell them apart")
        named[name] = inner
    return named


def _name_of(key: object) -> str | None:
    """Returns the name of a key of a dict; None if it has none."""
    if isinstance(key, str):
        return key
    if type(key) is bool or not isinstance(key, Integral) or abs(int(key)) >= _LARGEST:
        return None
    return str(int(key))


def _key_text(key: object) -> str:
    """Returns a key for a message."""
    if (name := _name_of(key)) is not None:
        return name
    try:
        text = _type(key) if isinstance(key, Foreign) else repr(key)
    except Exception:  # noqa: BLE001  # a key may be of any class, or an integer of too many digits
        text = an(key)
    return text if len(text) <= _KEY_LENGTH else f"{text[:_KEY_LENGTH]}..."


def without_a_name(value: object, depth: int = 0) -> str:
    """Returns what to do about a state dict at a key that is no text or integer; "" if there is none."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if (
            _name_of(key) is None
            and isinstance(inner, (Mapping, nn.Module))
            and state_dict_in(inner) is not None
        ):
            return (
                f"has a state dict at the key {_key_text(key)}, {an(key)}; --key names texts and integers:"
                " save the file with one of them as the key"
            )
        if depth < _MAX_DEPTH and (advice := without_a_name(inner, depth + 1)):
            return advice
    return ""


def named_under(value: Mapping[Any, Any], key: str) -> dict[str, Any]:
    """Returns the entries whose names begin with `key.`, under names without it."""
    return {
        k[len(key) + 1 :]: v
        for k, v in value.items()
        if isinstance(k, str) and k.startswith(f"{key}.") and len(k) > len(key) + 1
    }


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Returns names without what wrappers left in them: `{name: the name in the file}`."""
    stored = list(names)
    counted = [n for n in stored if n != COUNTER]

    def is_prefix(text: str) -> bool:
        return bool(counted) and all(n.startswith(text) and n != text for n in counted)

    prefix = ""
    while (longer := next((prefix + p for p in PREFIXES if is_prefix(prefix + p)), None)) is not None:
        prefix = longer
    plain = {name[len(prefix) :]: name for name in (counted if prefix else stored)}
    bare = {_MARKS.sub("", name): name_in_file for name, name_in_file in plain.items()}
    return bare if len(bare) == len(plain) and "" not in bare else plain


def _hint(content: object) -> str:
    """Returns the keys with tensors, their number of tensors, and how to choose a key."""
    inside = list(_dicts(content)) if isinstance(content, Mapping) else []
    if not inside:
        return ""
    counts = [(path, len(picked.tensors)) for path, picked in inside]
    keys = some((f"{path} ({count} tensor{'s' if count > 1 else ''})" for path, count in counts), _SHOWN)
    pattern = pattern_of([path for path, _ in inside])
    if not pattern and len(inside) > 1 and all("." not in path for path, _ in inside):
        pattern = "*"
    several = f", or all of them as members: --key {pattern!r}" if pattern else ""
    return f" Dicts of tensors in it: {keys}; name one, for example --key {inside[0][0]}{several}."


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor, {info_of(value)}"
    if isinstance(value, Mapping):
        others = [(k, v) for k, v in value.items() if not isinstance(v, torch.Tensor)]
        odd = [f"{repr(k) if isinstance(k, str) else _key_text(k)} is {_type(v)}" for k, v in others]
        return f"a dict ({some(odd, 3)})" if odd else "an empty dict"
    return an(value)


def _type(value: object) -> str:
    return value.name if isinstance(value, Foreign) else type(value).__name__


def an(value: object) -> str:
    """Returns a value's type with its article: `an int`, `a list`."""
    name = f"pickled {value.name}" if isinstance(value, Foreign) else type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _listed(value: object) -> str:
    if not isinstance(value, Mapping):
        return an(value)
    # What is no tensor comes first: it is why the value is no state dict.
    items = sorted(value.items(), key=lambda item: as_tensor(item[1]) is not None)
    return some((f"{_key_text(key)} ({_type(inner)})" for key, inner in items), 8) or "nothing"


def bytes_of(piece: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, which may repeat numbers of its storage or leave some out."""
    return piece.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
