"""Reads and writes Parquet and Arrow files block by block. No other module imports pyarrow.

The numbers of an array are copied into a tensor, without NumPy. An array shares the numbers of an output.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts import strict_json

from ..errors import ArtifactError, InputError, Unavailable
from ..spec.dtypes import dtype_name, dtype_of
from .endings import PACKED
from .table import TEXT, ColumnType, place

SHAPE = b"shape"
"""The key of the shape of a row in the metadata of a field, for rows with more than one dim."""
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = _FLOATS | {name: name for name in (*_INTEGERS, "bool")}
"""The dtypes of torch, by the names that Arrow prints."""
_GROUP_ROWS, _GROUP_BYTES = 2**16, 2**25
"""A row group of a Parquet file ends at one of these."""
_MOST_READ = 2**26
"""An Arrow file with larger record batches is mapped, so that the memory does not grow with them."""
NO_VALUE = "there is no value (null)"
_BUFFER = 2**17  # bytes that are read of each column of a Parquet file at a time


def arrow() -> Any:
    """Returns the package pyarrow, with its submodules. Raises: Unavailable if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.ipc
        import pyarrow.json
        import pyarrow.parquet
    except ImportError as e:
        raise Unavailable(
            f"Parquet, Arrow, CSV and JSON files need pyarrow ({e}): pip install 'widepack[predict]'. "
            "Files of .safetensors need nothing more"
        ) from None
    return pyarrow


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises about the content of a file into InputError."""
    pa = arrow()
    try:
        yield
    except pa.lib.ArrowMemoryError:
        raise
    except (pa.lib.ArrowException, OSError, UnicodeDecodeError) as e:
        if isinstance(e, OSError) and e.filename is not None:
            raise
        lines = str(e).strip().splitlines()
        raise InputError(f"{path}: {lines[0][:300] if lines else type(e).__name__}") from e


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Names the file in an error of the system that pyarrow raises while it writes."""
    pa = arrow()
    try:
        yield
    except OSError as e:
        if e.filename is None:
            raise OSError(e.errno, str(e), str(path)) from e
        raise
    except pa.lib.ArrowException as e:
        lines = str(e).strip().splitlines()
        raise InputError(f"the output cannot hold these columns: {lines[0][:300] if lines else e}") from e


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yields a file that is open, and the stream of its content, which is unpacked by its ending."""
    pa = arrow()
    with pa.OSFile(str(path)) as file:
        codec = PACKED.get(path.suffix.lower())
        if codec is None:
            yield file, file
        else:
            with pa.CompressedInputStream(file, codec) as stream:
                yield file, stream


class BadRow(ValueError):
    """Raised for a row of an array that cannot be read. row: its number in the array."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


def column_type(type_: Any) -> ColumnType:
    """Returns the type of a column. type_: of Arrow."""
    pa = arrow()
    text, inner = str(type_), type_
    shape: list[int | None] = []
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
    return ColumnType(text, _DTYPES.get(str(inner), ""), tuple(shape))


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
    """Returns the numbers of an array, `[rows, ...]`. Raises: BadRow as `filled_tensor`, and for a null."""
    values, missing = filled_tensor(array)
    if missing is not None:
        raise BadRow(int(missing.nonzero()[0, 0]), NO_VALUE)
    return values


def filled_tensor(array: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the numbers of an array, `[rows, ...]`, with 0 for each null, and where the nulls are.

    Raises: BadRow for a list that is null, and for lists of another length.
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
        if not _is_list(array.type):
            break
        if array.null_count:
            raise BadRow(array.is_null().index(True).as_py() // per_row, NO_VALUE)
        length = _length(array, per_row)
        shape.append(length)
        per_row *= length
        array = array.flatten()
        if not per_row:
            break
    missing = None
    if array.null_count:
        missing = _numbers(array.is_null().cast(pa.uint8()), torch.uint8).bool().view(shape)
    if pa.types.is_decimal(array.type):
        values = torch.tensor([float(v or 0) for v in array.to_pylist()], dtype=torch.float64).view(shape)
    elif array.type == pa.bool_():
        values = _numbers(array.cast(pa.uint8()).fill_null(0), torch.uint8).bool().view(shape)
    elif missing is None or pa.types.is_floating(array.type):
        values = _numbers(array, dtype_of(_DTYPES[str(array.type)])).view(shape)
        values = values if missing is None else values.masked_fill(missing, 0)
    else:
        values = _numbers(array.fill_null(0), dtype_of(_DTYPES[str(array.type)])).view(shape)
    return values, missing


def _shaped(array: Any) -> tuple[Tensor, Tensor | None]:
    """Returns tensors of one shape, `[rows, ...]`, with their dims in the logical order, and their nulls."""
    type_ = array.type

    def logical(values: Tensor) -> Tensor:
        values = values.view(len(array), *type_.shape)
        if type_.permutation is None:
            return values
        return values.permute(0, *(1 + k for k in type_.permutation))

    values, missing = filled_tensor(array.storage)
    return logical(values), None if missing is None else logical(missing)


def _numbers(array: Any, dtype: torch.dtype) -> Tensor:
    """Returns a copy of the numbers of an array. Those of nulls are any."""
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
            "lists of one length. Pad texts, and give their mask as another column",
        )
    return int(first)


def values_of(array: Any) -> tuple[list[Any], Tensor]:
    """Returns the different values of an array, and for each row the number of its value. Raises: BadRow."""
    pa = arrow()
    if array.null_count:
        raise BadRow(array.is_null().index(True).as_py(), NO_VALUE)
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
            f"an output is {dtype_name(values.dtype)}, and tables have no complex numbers; write a .npy file"
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


class ArrowBlock:
    """Consecutive rows of a table."""

    def __init__(self, path: Path, start: int, batch: Any) -> None:
        self.start, self.rows = start, int(batch.num_rows)
        self._path, self._batch = path, batch

    def tensor(self, name: str) -> Tensor:
        numbers: Tensor = self._read(tensor_of, name)
        return numbers

    def filled(self, name: str) -> tuple[Tensor, Tensor | None]:
        filled: tuple[Tensor, Tensor | None] = self._read(filled_tensor, name)
        return filled

    def values(self, name: str) -> tuple[list[Any], Tensor]:
        values: tuple[list[Any], Tensor] = self._read(values_of, name)
        return values

    def _read(self, read: Callable[[Any], Any], name: str) -> Any:
        try:
            return read(self._batch.column(name))
        except BadRow as e:
            raise InputError(f"{place(self._path, self.start + e.row, name)}: {e}") from None

    def column(self, name: str) -> Any:
        return plain(self._batch.column(name))


class ArrowTable(ABC):
    """An opened file of one of the formats that pyarrow reads."""

    rows: int | None
    named = typed = True

    def __init__(self, path: Path, schema: Any, rows: int | None) -> None:
        self.path, self.rows = path, rows
        self._schema = schema
        self.index = _index_of_pandas(schema)
        names = list(schema.names)
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise InputError(f"{path}: two columns have the name {twice[0]!r}; rename one in the file")
        self.columns: Mapping[str, ColumnType] = {
            field.name: self.type_of(field) for field in (schema.field(i) for i in range(len(names)))
        }

    def type_of(self, field: Any) -> ColumnType:
        """Returns the type of a column."""
        return column_type(field.type)

    @abstractmethod
    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        """Reads record batches of any size, with some columns. rows: the size that is wanted."""

    def blocks(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int
    ) -> Iterator[ArrowBlock]:
        start = 0
        with readable(self.path):
            for batch in _of_one_size(self.batches(names, dtypes, rows), rows):
                yield ArrowBlock(self.path, start, batch)
                start += batch.num_rows
            if not start:
                yield ArrowBlock(self.path, 0, self.empty(names))

    def empty(self, names: Sequence[str]) -> Any:
        """Returns some columns without rows."""
        pa = arrow()
        schema = pa.schema([self._schema.field(n) for n in names])
        return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)

    def count(self) -> int:
        if self.rows is None:
            first = next(iter(self.columns))
            with readable(self.path):
                self.rows = sum(b.num_rows for b in self.batches([first], {}, 2**16))
        return self.rows

    def position(self, rows: int) -> tuple[int, int]:
        return rows, rows if self.rows is None else self.rows


def _index_of_pandas(schema: Any) -> frozenset[str]:
    """Returns the columns that pandas marks as the index of a table, in the metadata of the file."""
    try:
        content = strict_json.parse((schema.metadata or {}).get(b"pandas", b"{}"), "the metadata of pandas")
        columns = content["index_columns"] if isinstance(content, dict) else ()
        return frozenset(c for c in columns if isinstance(c, str))
    except (KeyError, TypeError, ArtifactError):
        return frozenset()  # metadata of another writer say nothing


def _of_one_size(batches: Iterator[Any], rows: int) -> Iterator[Any]:
    """Splits and joins record batches, so that all but the last have one number of rows."""
    pa = arrow()
    parts: list[Any] = []
    held = 0
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            part = batch.slice(at, rows - held)
            parts.append(part)
            held += part.num_rows
            at += part.num_rows
            if held == rows:
                yield _joined(pa, parts)
                parts, held = [], 0
    if parts:
        yield _joined(pa, parts)


def _joined(pa: Any, parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts).unify_dictionaries().combine_chunks().to_batches()[0]


class ParquetTable(ArrowTable):
    """A Parquet file. Pages are read one after the other, so that large row groups take little memory."""

    def __init__(self, path: Path) -> None:
        with readable(path):
            self._file = arrow().parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
            super().__init__(path, self._file.schema_arrow, int(self._file.metadata.num_rows))

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        threads = torch.get_num_threads() > 1
        yield from self._file.iter_batches(batch_size=rows, columns=list(names), use_threads=threads)


def _rows_of(reader: Any) -> int:
    """Returns the number of rows of an Arrow file. Older versions of pyarrow have to open the batches."""
    if hasattr(reader, "count_rows"):
        return int(reader.count_rows())
    return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


class IpcTable(ArrowTable):
    """An Arrow file (Feather version 2) or an Arrow stream.

    Record batches are read, or mapped if they are large. The length of the file is checked before each block:
    a read of a mapped page that the file no longer has ends the process by a signal, and a stream may end
    anywhere.
    """

    def __init__(self, path: Path) -> None:
        with readable(path):
            self._opened, self._mapped = arrow().memory_map(str(path)), True
            self._size = self._opened.size()
            self._is_file = self._opened.read(6) == b"ARROW1"
            reader = self._reader()
            batches = reader.num_record_batches if self._is_file else 1
            super().__init__(path, reader.schema, _rows_of(reader) if self._is_file else None)
            if self._size <= batches * _MOST_READ:
                self._opened, self._mapped = arrow().OSFile(str(path)), False

    def _reader(self, names: Sequence[str] | None = None) -> Any:
        """Returns a reader of some columns. Default: of all."""
        pa = arrow()
        self._opened.seek(0)
        chosen = None if names is None else [self._schema.get_field_index(n) for n in names]
        options = pa.ipc.IpcReadOptions(included_fields=chosen)
        return (pa.ipc.open_file if self._is_file else pa.ipc.open_stream)(self._opened, options=options)

    def _check(self) -> None:
        """Raises: InputError if the file has become shorter."""
        if os.fstat(self._opened.fileno()).st_size < self._size:
            raise InputError(f"{self.path}: the file became shorter while it was read")

    def blocks(
        self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int
    ) -> Iterator[ArrowBlock]:
        for block in super().blocks(names, dtypes, rows):
            self._check()
            yield block

    def position(self, rows: int) -> tuple[int, int]:
        return (rows, self.rows) if self.rows is not None else (self._opened.tell(), self._opened.size())

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        # A reader that is given some columns of a mapped file copies a whole record batch into memory.
        reader = self._reader(None if self._mapped else names)
        count = reader.num_record_batches if self._is_file else None
        batches = reader if count is None else map(reader.get_batch, range(count))
        self._check()
        for batch in batches:
            yield batch.select(list(names))
            self._check()


class ArrowSink(ABC):
    """A file of one of the formats that pyarrow writes.

    Args:
        path: The file.
        metadata: Texts for the metadata of the schema.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.path, self.metadata = path, metadata
        self._schema: Any = None
        self._writer: Any = None

    def write(self, columns: Mapping[str, Any]) -> None:
        """Writes rows. columns: tensors `[rows, ...]`, and arrays that are passed on."""
        pa = arrow()
        columns = self.prepared(columns)
        with writable(self.path):
            if self._writer is None:
                fields = [field_of(name, value) for name, value in columns.items()]
                self._schema = pa.schema(fields, metadata=dict(self.metadata))
                self._writer = self.opened(self._schema, columns)
            arrays = [array_of(v) if isinstance(v, Tensor) else v for v in columns.values()]
            self.put(self._writer, pa.record_batch(arrays, schema=self._schema))

    def prepared(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the columns in the form that the format has."""
        return columns

    @abstractmethod
    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        """Returns the writer of pyarrow."""

    def put(self, writer: Any, batch: Any) -> None:
        """Writes a record batch."""
        writer.write_batch(batch)

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        if self._writer is not None:
            with writable(self.path):
                self._writer.close()


class ParquetSink(ArrowSink):
    """A Parquet file. Record batches are collected until they make a row group."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        super().__init__(path, metadata)
        self._kept: list[Any] = []
        self._rows = self._bytes = 0

    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        passed_on = [name for name, value in columns.items() if not isinstance(value, Tensor)]
        # answers are hardly ever equal, and a dictionary of them would be built for nothing
        return arrow().parquet.ParquetWriter(str(self.path), schema, use_dictionary=passed_on or False)

    def put(self, writer: Any, batch: Any) -> None:
        self._kept.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        if self._kept:
            self._writer.write_table(
                arrow().Table.from_batches(self._kept), row_group_size=max(1, self._rows)
            )
        self._kept, self._rows, self._bytes = [], 0, 0

    def close(self) -> None:
        if self._writer is not None:
            with writable(self.path):
                self._end_group()
        super().close()


class IpcSink(ArrowSink):
    """An Arrow file (Feather version 2)."""

    def opened(self, schema: Any, columns: Mapping[str, Any]) -> Any:
        return arrow().ipc.new_file(str(self.path), schema)
