"""Reads files with one JSON object in each line, block by block, with pyarrow.

The first rows say which columns there are, and their types. A column of an input of floats is read as floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError, Unavailable
from .arrow_files import ArrowTable, arrow, readable, unpacked

_BLOCK = 2**24  # bytes that pyarrow reads at a time; no row may be longer


class JsonTable(ArrowTable):
    """A file with one JSON object in each line."""

    def __init__(self, path: Path) -> None:
        pa = arrow()
        if not hasattr(pa.json, "open_json"):
            raise Unavailable(f"{path}: .jsonl files need pyarrow 20: pip install --upgrade pyarrow")
        self._file: Any = None
        with readable(path), unpacked(path) as (file, stream):
            self._size = int(file.size())
            with _one_line(path):
                found = self._reader(stream, None).schema
        # a text that looks like a time stays a text
        types = [pa.string() if pa.types.is_timestamp(f.type) else f.type for f in found]
        super().__init__(path, pa.schema([f.with_type(t) for f, t in zip(found, types)]), None)

    def batches(self, names: Sequence[str], dtypes: Mapping[str, torch.dtype], rows: int) -> Iterator[Any]:
        pa = arrow()
        read_as = [
            f.with_type(_floats(f.type)) if f.name in dtypes and dtypes[f.name].is_floating_point else f
            for f in self._schema
        ]
        with unpacked(self.path) as (self._file, stream), _one_line(self.path):
            for batch in self._reader(stream, pa.schema(read_as)):
                yield batch.select(list(names))

    def position(self, rows: int) -> tuple[int, int]:
        if self.rows is not None or self._file is None or self._file.closed:
            return super().position(rows)
        return int(self._file.tell()), self._size

    def _reader(self, stream: Any, schema: Any) -> Any:
        """Opens the file. schema: the types of all columns; None for those that the first rows have."""
        json = arrow().json
        more = {} if schema is None else {"unexpected_field_behavior": "error", "explicit_schema": schema}
        return json.open_json(
            stream,
            read_options=json.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=json.ParseOptions(**more),
        )


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises about the content of a file into InputError with the way out."""
    try:
        yield
    except arrow().lib.ArrowInvalid as e:
        text = (str(e).splitlines() or [""])[0][:200].removeprefix("JSON parse error: ")
        raise InputError(
            f"{path}: {text}. Each line is one JSON object of up to {_BLOCK >> 20} MB; each column is in the "
            "first of them and has one type"
        ) from e


def _floats(type_: Any) -> Any:
    """Returns a type with floats in the place of integers, also inside lists."""
    pa = arrow()
    if pa.types.is_list(type_):
        return pa.list_(_floats(type_.value_type))
    return pa.float64() if pa.types.is_integer(type_) or pa.types.is_null(type_) else type_
