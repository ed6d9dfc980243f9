"""Turns what a member returns into forms that torch's pytrees know.

During an export and a comparison a plain dataclass becomes `Fields`. A class that the user registered, a
named tuple and a mapping class stay as they are, because pytrees know them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch.utils._pytree as pytree


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
    """Returns a result in which `Fields` replaces every dataclass, at any depth."""

    def fields(value: Any) -> Any:
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        return Fields(
            type(value).__name__,
            [(f.name, known_forms(getattr(value, f.name))) for f in dataclasses.fields(value)],
        )

    return pytree.tree_map(fields, result)
