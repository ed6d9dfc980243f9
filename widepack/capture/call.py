"""A call of the member: what is given to it, leaf by leaf, every dim under its name."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn

from widepack_artifacts.manifest import Parameter
from widepack_artifacts.tree import Tree

from ..ir.encoding import dtype_name
from .guards import Axis, Leaf, factor_of
from ..spec.entries import FORWARD, method_of
from ..errors import CaptureError


@dataclass(frozen=True)
class Call:
    """A call of the member: what was given, leaf by leaf."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Leaf, ...]
    signature: tuple[Parameter, ...]
    sizes: dict[str, int]


def arrange(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Mapping[str, Any], sizes: Mapping[str, int], entry: str = FORWARD
) -> Call:
    """A call bound to the parameters of forward, or of the method that is the entry, every tensor leaf named.

    axes: {input name: {axis: letter}}, nested as the input is where it is not a tensor. sizes: {letter: its size in the example}.
    Raises: CaptureError when the method does not take these inputs.
    """
    forward = inspect.signature(method_of(module, entry))
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as e:
        raise CaptureError(
            f"{type(module).__name__}.{entry}{forward} does not take the inputs {_names(args, kwargs)}: {e}; name each input as {entry} does"
            + (
                ""
                if entry == FORWARD
                else f", and with several entries write {entry}:{next(iter(forward.parameters), 'x')}=... for one of them alone"
            )
        ) from e
    leaves: list[Leaf] = []
    signature: list[Parameter] = []
    found: dict[str, int] = dict(sizes)

    def walk(value: Any, name: str, dims: Any) -> Tree:
        if isinstance(value, torch.Tensor):
            named = {int(a) % max(value.ndim, 1) if -value.ndim <= int(a) < 0 else int(a): str(d) for a, d in (dims or {}).items()}
            named = {a: _own_letter(d, value.shape[a], found) if 0 <= a < value.ndim else d for a, d in named.items()}
            leaves.append(Leaf(name, leaf_type(value, named, name, found), value, named))
            return {"leaf": len(leaves) - 1}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"const": value}
        if isinstance(value, (list, tuple)):
            form = "list" if isinstance(value, list) else "tuple"
            return {form: [walk(v, f"{name}.{i}", dims[i] if isinstance(dims, (list, tuple)) else dims) for i, v in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": [[k, walk(v, f"{name}.{k}", dims.get(k) if isinstance(dims, dict) else None)] for k, v in value.items()]}
        fields = f"; let {entry} take the fields of this dataclass as inputs of their own, or as a dict" if is_dataclass(value) else ""
        raise CaptureError(
            f"input {name} is a {type(value).__name__}; inputs are tensors, numbers, strings, None, and lists, tuples and dicts of them{fields}"
        )

    positional = True  # a caller may give a parameter by position until forward forbids it, or one has no place in the signature
    for name, parameter in forward.parameters.items():
        positional = positional and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        kind = "positional" if positional else "keyword"
        if name not in bound.arguments:
            # a default belongs to the program: its place among the positions is kept, and no other value is taken for it
            if parameter.default is None or (isinstance(parameter.default, (bool, int, float, str)) and _is_finite(parameter.default)):
                signature.append(Parameter(name, kind, {"const": parameter.default}, True))
            elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                positional = False
            continue
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            for i, v in enumerate(value):
                every = axes.get(name)  # of all positions, or a list with one entry each
                own = every[i] if isinstance(every, (list, tuple)) and i < len(every) else every
                signature.append(Parameter(f"{name}_{i}", "positional", walk(v, f"{name}_{i}", axes.get(f"{name}_{i}", own))))
        elif parameter.kind is parameter.VAR_KEYWORD:
            signature += [Parameter(k, "keyword", walk(v, k, axes.get(k))) for k, v in value.items()]
        else:
            shape = walk(value, name, axes.get(name))
            default = "const" in shape and type(shape["const"]) is type(parameter.default) and shape["const"] == parameter.default
            signature.append(Parameter(name, kind, shape, default))
    ordered = {p.name: kwargs[p.name] for p in signature if p.name in kwargs}
    return Call(tuple(args), ordered, tuple(leaves), tuple(signature), found)


def of_any_name(module: nn.Module, call: Call, entry: str) -> tuple[str, ...]:
    """The inputs of a call that the entry takes as `**kwargs`."""
    parameters = inspect.signature(method_of(module, entry)).parameters
    return tuple(k for k in call.kwargs if k not in parameters) if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else ()


def _own_letter(text: str, size: int, sizes: Mapping[str, int]) -> str:
    """The dim's own letter: one that the example holds at two sizes is two dims, `B` and `B2`. Nothing is tied then that the user may have meant to be equal."""
    factor, letter = factor_of(text)
    if size % factor or sizes.get(letter, size // factor) == size // factor:
        return text
    free = next(other for k in itertools.count(2) if sizes.get(other := f"{letter}{k}", size // factor) == size // factor)
    return free if factor == 1 else f"{factor}*{free}"


def _is_finite(value: Any) -> bool:
    """Whether a number can stand in JSON, which has no infinity."""
    return not isinstance(value, float) or math.isfinite(value)


def _names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"argument {i}" for i in range(len(args))] + list(kwargs)) or "(none)"


def leaf_type(value: torch.Tensor, axes: Axis, name: str, sizes: dict[str, int]) -> str:
    """The leaf's type text; notes each letter's size and refuses one letter of two sizes."""
    shape: list[str] = [str(s) for s in value.shape]
    for axis, text in axes.items():
        if not -value.ndim <= axis < value.ndim:
            raise CaptureError(f"input {name}: axis {axis} is named {text}, but the example has {value.ndim} dims, {list(value.shape)}")
        factor, letter = factor_of(text)
        size = value.shape[axis]
        if size % factor or sizes.setdefault(letter, size // factor) != size // factor:
            raise CaptureError(
                f"input {name}: axis {axis} is {text} and has {size} in the example, but {letter} = {sizes.get(letter)} elsewhere; equal letters are equal sizes"
            )
        shape[axis] = text
    return f"{dtype_name(value.dtype)}[{','.join(shape)}]"
