"""Parses the type texts of programs: `float32[B,3]` becomes a `TensorType` with a dtype and sizes.

| type text | value |
|---|---|
| `float32[B,3,32*H]` | a tensor; a size is a number, a dim, a multiple of a dim, or an expression |
| `float32[3]\\|float32[4]` | a Ragged value: one type for each member |
| `(float32[3], int)`, `int`, the empty text | several values, a number, an unknown type: no tensor |

Every text is parsed once; the results are cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..spec.input_spec import NAME, DimExpr, Dims, parse_type

Size = int | DimExpr | str  # a str is an expression over dims, or a size that only values determine

_TENSOR = re.compile(r"(\w+)\[([^\[\]|]*)\]\Z", re.ASCII)
_MULTIPLE = re.compile(r"([0-9]{1,19})\*(\w+)\Z", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,19}\Z", re.ASCII)
_FLOATING = re.compile(r"\b(?:float16|bfloat16|float32|float64|complex32|complex64|complex128)\b(?=\[)")
_CACHED = 1 << 14


@dataclass(frozen=True, slots=True)
class TensorType:
    """The dtype and the sizes of a tensor of a program. `str()` gives the text that programs store."""

    dtype: str
    sizes: tuple[Size, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.sizes)

    @property
    def dims(self) -> Dims:
        """The sizes of a weight or an input.

        Raises: ValueError for an expression, which only results of nodes have.
        """
        found = tuple(s for s in self.sizes if not isinstance(s, str))
        if len(found) != len(self.sizes):
            raise ValueError(f"the type {self} has a size that is neither a number nor a multiple of a dim")
        return found

    @property
    def numbers(self) -> tuple[int, ...] | None:
        """The sizes if all of them are numbers, else None."""
        found = tuple(s for s in self.sizes if isinstance(s, int))
        return found if len(found) == len(self.sizes) else None

    @property
    def is_floating(self) -> bool:
        """Whether the numbers are real floats."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def is_rounded(self) -> bool:
        """Whether the numbers are floats, real or complex."""
        return self.is_floating or self.dtype.startswith("complex")

    def with_dtype(self, dtype: str) -> TensorType:
        """The same sizes with another dtype."""
        return replace(self, dtype=dtype)

    def with_sizes(self, sizes: Iterable[Size]) -> TensorType:
        """The same dtype with other sizes."""
        return replace(self, sizes=tuple(sizes))

    def shape(self, dims: Mapping[str, Any]) -> list[Any]:
        """The sizes of a weight or an input, where each dim has a size: `32*H` is 32 times `dims["H"]`."""
        return [d if isinstance(d, int) else dims[d.letter] * d.factor for d in self.dims]


@lru_cache(maxsize=_CACHED)
def parse_slot(text: str) -> TensorType:
    """Parses the type of a weight or an input. Raises: UsageError that points at the first mistake."""
    return TensorType(*parse_type(text))


@lru_cache(maxsize=_CACHED)
def tensor_type(text: str) -> TensorType | None:
    """Parses the type of any value; None where it is not one tensor, or not known."""
    found = _TENSOR.match(text)
    return TensorType(found[1], tuple(_size(s) for s in _split_sizes(found[2]))) if found else None


def _split_sizes(text: str) -> list[str]:
    """The parts between commas. A size may have commas inside parentheses: `Max(1,u0)`."""
    parts, depth = [""] if text else [], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _size(text: str) -> Size:
    if _NUMBER.match(text):
        return int(text)
    if NAME.match(text):
        return DimExpr(text)
    found = _MULTIPLE.match(text)
    return DimExpr(found[2], int(found[1])) if found and NAME.match(found[2]) and int(found[1]) else text


def rank_of(text: str) -> int:
    """The number of dims of a type text; 0 where it is not one tensor, or not known."""
    type_ = tensor_type(text)
    return type_.rank if type_ is not None else 0


def sizes_of(text: str) -> tuple[Size, ...]:
    """The sizes of a type text; empty where it is not one tensor, or not known."""
    type_ = tensor_type(text)
    return type_.sizes if type_ is not None else ()


def dtype_in(text: str) -> str:
    """The name of the dtype of a type text; empty where it is not one tensor, or not known."""
    type_ = tensor_type(text)
    return type_.dtype if type_ is not None else ""


def member_types(text: str) -> list[str]:
    """The types of the members' values, from the type text of a Ragged value."""
    return text.split("|")


def ragged_type(types: Iterable[str]) -> str:
    """The type text of a Ragged value, from the types of the members' values."""
    return "|".join(types)


def has_floats(text: str) -> bool:
    """Whether a type text, also one of several values, contains a tensor of real or complex floats."""
    return _FLOATING.search(text) is not None


def with_dtypes(text: str, table: Mapping[str, str]) -> str:
    """A type text, also one of several values, with each floating dtype replaced by the one in the table."""
    return _FLOATING.sub(lambda m: table.get(m[0], m[0]), text)
