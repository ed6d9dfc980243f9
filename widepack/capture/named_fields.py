"""Reads the named fields of inputs and results: of named tuples, and of classes.

An artifact has the names of the fields and none of these classes. A build keeps the classes of its example
call, so that the members' own modules get objects of them.

torch's pytrees know named tuples, mapping classes, and classes that the user registered. In a result, during
an export and a comparison, a plain dataclass becomes `Fields`, and so do a distribution and a packed sequence
of torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributions import Distribution, Independent
from torch.nn.utils.rnn import PackedSequence

from ..errors import CaptureError, UsageError
from ..ir.torch_tuples import torch_fields
from ..spec.entries import method_of
from .patches.packed_sequences import fields_of

Make = Callable[[Sequence[Any]], Any]


def named_fields(value: Any) -> tuple[list[tuple[str, Any]], Make] | None:
    """Returns the fields of an object, and what makes such an object of other values of its fields.

    None for a tensor, a literal, a list, a plain tuple, a dict, and for a class that pytrees do not know.
    """
    if isinstance(value, tuple):
        names = tuple_fields(type(value))
        make = getattr(type(value), "_make", type(value))
        return None if names is None else (list(zip(names, value)), make)
    if isinstance(value, (list, dict)) or type(value) not in pytree.SUPPORTED_NODES:
        return None
    children, spec = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    try:
        keys: list[Any] = [
            path[0] for path, _ in pytree.tree_flatten_with_path(value, lambda v: v is not value)[0]
        ]
    except ValueError:  # the class was registered without names of its parts
        keys = list(range(len(children)))
    rows = [(_name(key), child) for key, child in zip(keys, children)]
    return rows, lambda parts: pytree.tree_unflatten(list(parts), spec)


def sample_arguments(sample: Any) -> tuple[Any, ...]:
    """Returns the positional inputs of a sample: a tensor or a named tuple is one input.

    Raises: UsageError for a dict or an array.
    """
    if isinstance(sample, Mapping):
        raise UsageError(
            f"sample is a dict with the keys {', '.join(map(str, sample))}; give inputs by name as"
            " sample_kwargs, and an input that is a dict in a tuple: sample=({...},)"
        )
    if hasattr(sample, "__array__") and not isinstance(sample, torch.Tensor):
        raise UsageError(
            f"sample is a {type(sample).__name__}; give a tensor, such as torch.from_numpy(array)"
        )
    if isinstance(sample, torch.Tensor) or tuple_fields(type(sample)) is not None:
        return (sample,)
    return tuple(sample or ())


def tuple_fields(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a class of named tuples; None for any other class."""
    names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return tuple(names) if names is not None else torch_fields(kind)


def _name(key: Any) -> str:
    """Returns the name of a part of an object, as a key of pytrees has it."""
    found = (getattr(key, attribute) for attribute in ("name", "key", "idx") if hasattr(key, attribute))
    return str(next(found, key))


def as_annotated(
    module: nn.Module, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs of a call, with dicts and tuples as the named tuples that the method declares.

    A file of a sample has no classes, so it holds the fields of a named tuple as a dict or a plain tuple.
    """
    method = method_of(module, entry)
    try:
        hints = typing.get_type_hints(method)
    except Exception:  # noqa: BLE001  # an annotation may name what does not exist at run time
        return tuple(args), dict(kwargs)
    names = list(inspect.signature(method).parameters)
    converted = [_converted(hints.get(name), value) for name, value in zip(names, args)]
    return (
        (*converted, *args[len(converted) :]),
        {name: _converted(hints.get(name), value) for name, value in kwargs.items()},
    )


def _converted(kind: Any, value: Any) -> Any:
    """Returns a dict or a plain tuple as a named tuple of this class, if it has its fields."""
    names = tuple_fields(kind) if isinstance(kind, type) else None
    if names is None:
        return value
    try:
        hints = typing.get_type_hints(kind)
    except Exception:  # noqa: BLE001  # as above
        hints = {}
    if type(value) is dict and set(value) <= set(names):
        given = value
    elif type(value) is tuple and len(value) <= len(names):
        given = dict(zip(names, value))
    else:
        return value
    try:
        return kind(**{name: _converted(hints.get(name), v) for name, v in given.items()})
    except TypeError:  # a field without a default is missing, which the member reports
        return value


def refuse_packed(inputs: Iterable[tuple[str, Any]]) -> None:
    """Refuses inputs that have a packed sequence: a program has its padded form, and lengths.

    inputs: names and values. Raises: CaptureError.
    """
    for name, value in inputs:
        leaves = pytree.tree_leaves(value, is_leaf=lambda v: isinstance(v, PackedSequence))
        if any(isinstance(v, PackedSequence) for v in leaves):
            raise CaptureError(
                f"input {name} has a PackedSequence, whose number of rows is data. Let the member take the "
                "padded sequence and the lengths, and call pack_padded_sequence itself"
            )


class Fields(dict[str, Any]):
    """The fields of a dataclass, in its order. kind: the name of the class."""

    def __init__(self, kind: str, rows: Iterable[tuple[str, Any]]) -> None:
        super().__init__(rows)
        self.kind = kind


def _flatten(fields: Fields) -> tuple[list[Any], tuple[str, tuple[str, ...]]]:
    return list(fields.values()), (fields.kind, tuple(fields))


def _unflatten(values: Iterable[Any], context: tuple[str, tuple[str, ...]]) -> Fields:
    return Fields(context[0], zip(context[1], values))


pytree.register_pytree_node(Fields, _flatten, _unflatten, serialized_type_name="widepack.Fields")


def known_forms(result: Any) -> Any:
    """Returns a result in which `Fields` replaces every dataclass, distribution and packed sequence."""

    def fields(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return Fields(type(value).__name__, zip(PackedSequence._fields, fields_of(value)))
        if isinstance(value, Distribution):
            return Fields(type(value).__name__, [(k, known_forms(v)) for k, v in _parameters(value)])
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        return Fields(
            type(value).__name__,
            [(f.name, known_forms(getattr(value, f.name))) for f in dataclasses.fields(value)],
        )

    return pytree.tree_map(fields, result, is_leaf=lambda v: isinstance(v, PackedSequence))


def _parameters(distribution: Distribution) -> list[tuple[str, Any]]:
    """Returns the parameters of a distribution: those that it was made of (`loc`, `scale`)."""
    if isinstance(distribution, Independent):
        return [("base_dist", distribution.base_dist)]
    given = vars(distribution)
    try:
        names = list(distribution.arg_constraints)
    except NotImplementedError:
        names = []
    return [(n, given[n]) for n in names if n in given] or [
        (n, v) for n, v in given.items() if isinstance(v, (torch.Tensor, Distribution))
    ]
