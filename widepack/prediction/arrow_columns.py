"""Moves numbers between Arrow arrays and tensors, without NumPy.

The numbers of an array are copied into the tensor. The numbers of answers are shared with the array.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..spec.dtypes import dtype_name, dtype_of
from .arrow_package import arrow
from .table import TEXT, ColumnType

SHAPE = b"shape"
"""The key of the shape of a row in the metadata of a field, for rows with more than one dim."""


class BadRow(ValueError):
    """Raised for a row of an array that cannot be read. row: its number in the array."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


def column_type(type_: Any) -> ColumnType:
    """Returns the type of a column. type_: of Arrow."""
    pa = arrow()
    text, inner, shape = str(type_), type_, []
    while True:
        if inner is type_ and _is_shaped(inner):
            shape += _logical(inner)
            inner = inner.value_type
        elif (stored := _stored(inner)) is not inner:
            inner = stored
        elif _is_list(inner):
            shape.append(inner.list_size if pa.types.is_fixed_size_list(inner) else None)
            inner = inner.value_type
        else:
            break
    if pa.types.is_decimal(inner):
        return ColumnType(text, "float64", tuple(shape))
    if pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner):
        return ColumnType(text, TEXT, tuple(shape))
    return ColumnType(text, _dtypes().get(inner, ""), tuple(shape))


def _stored(type_: Any) -> Any:
    """Returns the type of the values of a dictionary, of repeated values, or of an extension type."""
    pa = arrow()
    if isinstance(type_, pa.BaseExtensionType):
        return type_.storage_type
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return type_.value_type
    return type_


def _is_shaped(type_: Any) -> bool:
    """Returns whether a type is that of tensors of one shape."""
    return isinstance(type_, getattr(arrow(), "FixedShapeTensorType", ()))


def _logical(type_: Any) -> list[int]:
    """Returns the shape of a tensor of such a type, whose memory may have the dims in another order."""
    shape = list(type_.shape)
    return shape if type_.permutation is None else [shape[k] for k in type_.permutation]


def _dtypes() -> dict[Any, str]:
    pa = arrow()
    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = {pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64"}
    return {**{getattr(pa, n)(): n for n in names}, **floats, pa.bool_(): "bool"}


def plain(array: Any) -> Any:
    """Returns an array with each value in its row, where a dictionary or runs of equal values are stored."""
    pa = arrow()
    if pa.types.is_run_end_encoded(array.type):
        array = pa.compute.run_end_decode(array)
    if pa.types.is_dictionary(array.type):
        return _no_view(array.dictionary).take(array.indices)
    return _no_view(array)


def _no_view(array: Any) -> Any:
    """Returns texts in the layout that every function of pyarrow takes."""
    pa = arrow()
    return array.cast(pa.large_string()) if pa.types.is_string_view(array.type) else array


def tensor_of(array: Any) -> Tensor:
    """Returns the numbers of an array, `[rows, ...]`. Raises: BadRow for a null, and for lists of another
    length.
    """
    pa = arrow()
    if _is_shaped(array.type):
        return _shaped(array)
    shape, per_row = [len(array)], 1
    while True:
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
            continue
        array = plain(array)
        if array.null_count:
            at = array.is_null().index(True).as_py()
            raise BadRow(at // per_row, "there is no value (null)")
        if not _is_list(array.type):
            break
        length = _length(array, per_row)
        shape.append(length)
        per_row *= length
        array = array.flatten()
        if not per_row:
            break
    if pa.types.is_decimal(array.type):
        return torch.tensor([float(v) for v in array.to_pylist()], dtype=torch.float64).view(shape)
    if array.type == pa.bool_():
        return _numbers(array.cast(pa.uint8()), torch.uint8).bool().view(shape)
    return _numbers(array, dtype_of(_dtypes()[array.type])).view(shape)


def _shaped(array: Any) -> Tensor:
    """Returns tensors of one shape, `[rows, ...]`, with their dims in the logical order. Raises: BadRow."""
    type_ = array.type
    found = tensor_of(array.storage).view(len(array), *type_.shape)
    return found if type_.permutation is None else found.permute(0, *(1 + k for k in type_.permutation))


def _numbers(array: Any, dtype: torch.dtype) -> Tensor:
    """Returns a copy of the numbers of an array without nulls."""
    if not len(array):
        return torch.empty(0, dtype=dtype)
    start = array.offset * dtype.itemsize
    memory = memoryview(array.buffers()[1])[start : start + len(array) * dtype.itemsize]
    return torch.frombuffer(bytearray(memory), dtype=dtype)


def _is_list(type_: Any) -> bool:
    pa = arrow()
    kinds = ("fixed_size_list", "list", "large_list", "list_view", "large_list_view")
    return any(
        getattr(pa.types, f"is_{k}", lambda t: False)(type_) for k in kinds
    )  # older versions lack some


def _length(array: Any, per_row: int) -> int:
    """Returns the one length of all lists. Raises: BadRow."""
    pa = arrow()
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    if not len(array):
        return 0
    lengths = array.value_lengths()
    first = lengths[0].as_py()
    other = pa.compute.not_equal(lengths, first).index(True).as_py()
    if other >= 0:
        raise BadRow(
            other // per_row,
            f"a list of {lengths[other].as_py()}, and the rows before have lists of {first}; give all rows "
            "lists of one length",
        )
    return int(first)


def values_of(array: Any) -> tuple[list[Any], Tensor]:
    """Returns the different values of an array, and for each row the number of its value. Raises: BadRow."""
    pa = arrow()
    if array.null_count:
        raise BadRow(array.is_null().index(True).as_py(), "there is no value (null)")
    coded = plain(array).dictionary_encode()
    return coded.dictionary.to_pylist(), _numbers(coded.indices.cast(pa.int64()), torch.int64)


def array_of(values: Tensor) -> Any:
    """Returns numbers `[rows, ...]` as an array; rows with dims are lists of one length, row-major.

    Half precision becomes float32. The memory is shared.

    Raises: InputError for complex numbers.
    """
    pa = arrow()
    if values.dtype.is_complex:
        raise InputError(
            f"an answer is {dtype_name(values.dtype)}, and tables have no complex numbers; write a .npy file"
        )
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    values = values.contiguous()
    name = "uint8" if values.dtype == torch.bool else dtype_name(values.dtype)
    memory = pa.foreign_buffer(values.data_ptr(), values.nbytes, base=values)
    array = pa.Array.from_buffers(getattr(pa, name)(), values.numel(), [None, memory])
    if values.dtype == torch.bool:
        array = array.cast(pa.bool_())
    if values.dim() == 1:
        return array
    type_ = pa.list_(array.type, math.prod(values.shape[1:]))
    return pa.Array.from_buffers(type_, values.shape[0], [None], children=[array])


def field_of(name: str, value: Any) -> Any:
    """Returns the field of a column: a tensor, or an array that is passed on."""
    pa = arrow()
    if not isinstance(value, Tensor):
        return pa.field(name, value.type)
    shape = list(value.shape[1:])
    more = {SHAPE: json.dumps(shape)} if len(shape) > 1 else None
    return pa.field(name, array_of(value[:0]).type, metadata=more)
