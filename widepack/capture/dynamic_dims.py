"""Reads which axes of a sample are dynamic: `dynamic={input: {axis: letter}}`.

| the input is | its entry is |
|---|---|
| a tensor | `{axis: letter}` |
| a list, a tuple, or `*args` | one entry for all its parts, or a list with one for each |
| a dict | `{key: entry}` |
| a named tuple, or an object of a registered class | `{field: entry}`, or as a tuple |

None in the place of an entry names no axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..spec.entries import FORWARD, method_of
from ..spec.input_spec import DimExpr, parse_type
from .example import default_axes
from .named_fields import named_fields, refuse_packed


def dynamic_axes(
    dynamic: Mapping[str, Any] | None,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    entry: str = FORWARD,
) -> Mapping[str, Any]:
    """Returns the dynamic axes of a sample, nested as its inputs are.

    Args:
        dynamic: What the user named. Default: axis 0 of every input is "B".
        module: The member. It does not run.
        args: The sample's positional inputs.
        kwargs: The sample's inputs by name.
        entry: The method that takes the sample.

    Raises:
        UsageError: `dynamic` has another form, or names an input or a part that is not in the sample.
        CaptureError: An input is a packed sequence.
    """
    signature = inspect.signature(method_of(module, entry))
    refuse_packed([*zip(signature.parameters, args), *kwargs.items()])
    if dynamic is None:
        return default_axes(list(signature.parameters), args, kwargs)
    if not isinstance(dynamic, Mapping):
        raise UsageError(
            f"dynamic is {short(dynamic)}, of the type {type(dynamic).__name__}; give a dict with "
            'the dynamic axes of each input: {"x": {0: "B"}}'
        )
    try:
        values = _values(signature.bind(*args, **kwargs))
    except TypeError:
        return dynamic  # the member does not take the sample, which is reported with it
    known = dict.fromkeys(
        [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD] + list(values)
    )
    if unknown := [str(name) for name in dynamic if name not in known]:
        raise UsageError(
            f"dynamic names {', '.join(unknown)}, which {entry} does not take; it takes {', '.join(known)}"
        )
    return {name: _axes(name, values.get(name), given) for name, given in dynamic.items()}


def _values(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns the inputs of a sample by name; those of `*args` also as args_0, args_1, ..."""
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        values |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        if kind is inspect.Parameter.VAR_POSITIONAL:
            values |= {f"{name}_{i}": v for i, v in enumerate(value)}
    return values


def _axes(name: str, value: Any, given: Any) -> Any:
    """Returns the axes of one input or part, with an entry for each of its own parts."""
    if given is None:
        return None
    fields = named_fields(value)
    if fields is not None and isinstance(given, Mapping) and any(isinstance(k, str) for k in given):
        value = dict(fields[0])
    elif fields is not None:
        rows = fields[0]
        each = _axes(name, [v for _, v in rows], tuple(given) if isinstance(given, tuple) else given)
        return {k: axes for (k, _), axes in zip(rows, each)}
    if isinstance(value, (list, tuple)):
        if isinstance(given, (list, tuple)) and len(given) != len(value):
            raise UsageError(
                f"dynamic has a list of {len(given)} for input {name}, which has {len(value)} parts in the "
                "sample; give one entry for each part, or a dict for all of them"
            )
        each = given if isinstance(given, (list, tuple)) else [given] * len(value)
        return [_axes(f"{name}.{i}", v, g) for i, (v, g) in enumerate(zip(value, each))]
    if isinstance(value, dict):
        if not isinstance(given, Mapping) or any(k not in value for k in given):
            key = next(iter(value), "key")
            raise UsageError(
                f"dynamic has {short(given)} for input {name}, which is a dict with the keys "
                f"{', '.join(map(str, value))} in the sample; give a dict with an entry for each of its keys "
                f"that has dynamic axes: {{{key!r}: {{0: 'B'}}}}"
            )
        return {k: _axes(f"{name}.{k}", value[k], g) for k, g in given.items()}
    return _letters(name, given) if isinstance(value, torch.Tensor) else None


def _letters(name: str, given: Any) -> dict[int, str]:
    """Returns the letter of each dynamic axis of a tensor."""
    if not isinstance(given, Mapping):
        raise UsageError(
            f"dynamic has {short(given)} for input {name}, which is a tensor in the sample; "
            'give a dict with the letter of each dynamic axis: {0: "B"}'
        )
    found: dict[int, str] = {}
    for axis, text in given.items():
        number = int(axis) if isinstance(axis, str) and axis.lstrip("-").isdecimal() else axis
        if not isinstance(number, int) or isinstance(number, bool):
            raise UsageError(
                f"dynamic names axis {axis!r} of input {name}; an axis is a whole number, 0 for the first one"
            )
        found[number] = _letter(name, number, text)
    return found


def _letter(name: str, axis: int, text: Any) -> str:
    """Returns the name of a dim, with a factor as `32*H`."""
    try:
        dims = parse_type(f"float32[{text}]")[1] if isinstance(text, str) else ()
    except UsageError:
        dims = ()
    if len(dims) != 1 or not isinstance(dims[0], DimExpr):
        raise UsageError(
            f"dynamic names axis {axis} of input {name} with {short(text)}; the name of a dim is a letter or "
            'a word, with a factor where sizes are its multiples: "B", "time", "32*H"'
        )
    return str(dims[0])
