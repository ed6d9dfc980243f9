"""Makes the example call of a build from input specs, and reads a user's sample and its dynamic axes.

Sizes of dims without a given size: 4 for the batch (the first dim of the first input), and 16, 24, 40, ...
for the others, within their bounds. They are at least 2, because torch.export takes 1 for a constant, and
even, because most code expects that.

Rows of a sample that has one row are repeated (`without_ones`). `dynamic={input: {axis: letter}}` names axes:

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
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts import guards

from ..errors import UsageError
from ..ir.guards import factor_of
from ..spec.draws import InputSource, draw
from ..spec.entries import FORWARD, method_of
from ..spec.input_spec import Bounds, DimExpr, InputSpec, parse_type, type_text
from .call import MemberCall
from .export import run_once
from .named_fields import known_forms, named_fields, refuse_packed

_BATCH = 4
_OTHERS = (16, 24, 40, 56, 72)
_FACTORED = (2, 3, 4, 5, 6)  # of dims such as 32*H
_DOUBLINGS = 6


def example_sizes(specs: Sequence[InputSpec], bounds: Mapping[str, Bounds]) -> dict[str, int]:
    """Returns a size for every letter of the specs, within its bounds. Raises: UsageError."""
    sizes: dict[str, int] = {}
    for spec in specs:
        for position, dim in enumerate(spec.dims):
            if isinstance(dim, int) or dim.letter in sizes:
                continue
            wish = (_OTHERS if dim.factor == 1 else _FACTORED)[min(len(sizes), 4)]
            if not sizes and position == 0:
                wish = _BATCH
            least, most = bounds.get(dim.letter, (1, None))
            size = max(wish, least, 2)
            # Stay below the bound: a slice up to the bound would take the whole dim, and torch.export would
            # fix that.
            if most is not None and size >= most:
                size = min(most, max(least, 2, (most - 1) // 2 * 2))
            sizes[dim.letter] = size
    for letter, (_, most) in bounds.items():
        if letter not in sizes:
            raise UsageError(
                f"the bounds of {letter} are given, but no input has a dim {letter}; "
                f"the inputs name {', '.join(sizes) or 'no dims'}"
            )
        if most == 1:
            raise UsageError(
                f"the dim {letter} may only be 1: write 1 in its place, a dynamic dim has at least two sizes"
            )
    return sizes


def sizes_without_ones(
    sizes: Mapping[str, int], conditions: Sequence[Any], bounds: Mapping[str, Bounds]
) -> dict[str, int] | None:
    """Returns larger sizes, if the example's sizes make a size inside the member 1 (`H // 32 == 1`).

    torch.export takes such a 1 for a constant. Returns None if no size inside the member is 1, or if the
    bounds allow no larger sizes. conditions: those of the export, as expressions.
    """
    ones = [
        e for e in conditions if isinstance(e, list) and e[0] == "eq" and 1 in e[1:] and guards.letters(e)
    ]
    if not ones:
        return None
    larger = dict(sizes)
    for _ in range(_DOUBLINGS):
        tight = {d for e in ones if guards.holds(e, larger) for d in guards.letters(e)}
        if not tight:
            return larger
        doubled = {
            d: 2 * n if d in tight and 2 * n <= (bounds.get(d, (1, None))[1] or 2 * n) else n
            for d, n in larger.items()
        }
        if doubled == larger:
            return None
        larger = doubled
    return None


def from_specs(
    specs: Sequence[InputSpec], sizes: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    """Returns drawn keyword inputs, and the letters of their dynamic axes."""
    sources = {s.name: InputSource(s.name, type_text(s), s.low, s.high) for s in specs}
    values = {name: draw(source, sizes, 1 + i) for i, (name, source) in enumerate(sources.items())}
    axes = {s.name: {i: str(d) for i, d in enumerate(s.dims) if not isinstance(d, int)} for s in specs}
    return values, axes


def _default_axes(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the letters of a sample: axis 0 of every tensor is the batch B.

    If the sizes there differ, only tensors with the size of the first tensor have a batch.
    """
    tensors = (x for x in pytree.tree_leaves(dict(inputs)) if isinstance(x, torch.Tensor) and x.ndim)
    size = next((x.shape[0] for x in tensors), None)

    def axes(x: Any) -> Any:
        if (fields := named_fields(x)) is not None:
            return {k: axes(v) for k, v in fields[0]}
        if isinstance(x, dict):
            return {k: axes(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [axes(v) for v in x]
        return {0: "B"} if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == size else None

    return {n: axes(v) for n, v in inputs.items()}


def without_ones(
    call: MemberCall, make: Callable[[], nn.Module], named_dims: bool, entry: str = FORWARD
) -> MemberCall:
    """Returns a call in which no dynamic dim has size 1, if the member takes such a call.

    Args:
        call: The sample.
        make: Returns a fresh member at every call, which runs once. It is not called if no dim has size 1.
        named_dims: The user named the dims. Otherwise the sample stays as it is where the member answers with
            other ranks at larger sizes (`squeeze()`).
        entry: The method that runs.
    """
    ones = [letter for letter, size in call.sizes.items() if size == 1]
    if not ones:
        return call
    free = (k for k in itertools.count(2) if k not in call.sizes.values())  # equal sizes could become one dim
    larger = _resized(call, dict(zip(ones, free)))
    answers = []
    for each in (larger, call):
        module = make()
        before = _shapes(dict(module.named_buffers()))
        with torch.enable_grad():
            answer, error = run_once(module, each, entry)
        if each is larger and (error is not None or _shapes(dict(module.named_buffers())) != before):
            return call
        answers.append(answer)
        if named_dims or error is not None:
            return larger
    ranks = [[getattr(y, "ndim", None) for y in pytree.tree_leaves(known_forms(a))] for a in answers]
    return larger if ranks[0] == ranks[1] else call


def _resized(call: MemberCall, sizes: dict[str, int]) -> MemberCall:
    """Returns the call with these sizes of dims that have size 1."""
    tensors: dict[int, torch.Tensor] = {}
    for leaf in call.leaves:
        value = leaf.example
        for axis, text in leaf.axes.items():
            value = value.repeat_interleave(sizes.get(factor_of(text)[1], 1), axis)
        tensors[id(leaf.example)] = value

    def resized(value: Any) -> Any:
        return tensors.get(id(value), value)

    args, kwargs = pytree.tree_map(resized, (call.args, call.kwargs))
    leaves = tuple(replace(leaf, example=resized(leaf.example)) for leaf in call.leaves)
    return replace(call, args=args, kwargs=kwargs, leaves=leaves, sizes={**call.sizes, **sizes})


def _shapes(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in buffers.items()}


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
        return _default_axes({**dict(zip(signature.parameters, args)), **kwargs})
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
