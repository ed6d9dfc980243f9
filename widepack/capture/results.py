"""Turns what a member returns into forms that torch's pytrees know.

During an export and a comparison a plain dataclass becomes `Fields`, and so do a distribution and a packed
sequence of torch. A class that the user registered, a named tuple and a mapping class stay as they are,
because pytrees know them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributions import Distribution, Independent
from torch.nn.utils.rnn import PackedSequence

from .patches.packed_sequences import fields_of


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
