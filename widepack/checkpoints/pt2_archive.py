"""Reads files of `torch.export.save` as data: a zip of JSON and raw weights, without `torch.export.load` or
pickle.

    <root>/models/<name>.json                            the program, in torch's own schema
    <root>/data/weights/<name>_weights_config.json       name -> record, dtype, sizes, strides, offset
    <root>/data/weights/weight_<i>                       raw bytes, mapped
    <root>/data/constants/...                            the same for unsaved buffers and lifted tensors
    <root>/data/sample_inputs/<name>.pt                  a file of torch.save, read with weights_only

Pickled tensors, records that end past the file, and records that take far more memory than the file
(zip_records.py) are refused.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from ..errors import CheckpointError
from .mapped_memory import ShortenedFile, copied, shortened
from .state_dict import SAVE, RefusedFile, TensorInfo
from .zip_records import check_expanded, record_start, records_of, storages_of, text_record

# torch._export.serde.schema.ScalarType
DTYPES: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    34: torch.uint32,
    35: torch.uint64,
}
STRIDED = 7
SCHEMA = 8  # the supported major version of torch's schema
_MAX_JSON_BYTES = 512 << 20


class Pt2File:
    """One open file. saved: the names of its state dict; `tensors` returns the constants too.

    Raises: RefusedFile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            self._status = os.fstat(file.fileno())
            self._size = self._status.st_size
            self._records = records_of(file, self._size)
        models = [n for n in self._records if "/models/" in f"/{n}" and n.endswith(".json")]
        if len(models) != 1:
            raise RefusedFile(
                f"is an archive of {len(models)} torch.export programs; widepack reads files with one."
                f" Save each alone, or {SAVE}"
            )
        root, _, model = models[0].rpartition("models/")
        self._root, self._model = root, model.removesuffix(".json")
        weights = self._config(f"{root}data/weights/", f"{self._model}_weights_config.json")
        constants = self._config(f"{root}data/constants/", f"{self._model}_constants_config.json")
        self.saved = frozenset(weights)
        if twice := self.saved & set(constants):
            raise RefusedFile(f"is damaged: {min(twice)} is both a weight and a constant")
        self._metas = {**weights, **constants}
        check_expanded((math.prod(m.sizes) * m.dtype.itemsize for m in self._metas.values()), self._size)
        self._file: Any = None
        self._starts: dict[str, int] = {}  # where each record's bytes begin
        with open(path, "rb") as file:
            for record in {meta.record for meta in self._metas.values()}:
                self._starts[record] = record_start(file, self._records[record], self._size)

    def _config(self, folder: str, name: str) -> dict[str, _Meta]:
        content = self._json(folder + name)
        rows = content.get("config") if isinstance(content, dict) else None
        if not isinstance(rows, dict):
            raise RefusedFile(f"is damaged: {name} has no config of tensors")
        return {key: _meta(row, folder, key, self._records) for key, row in rows.items()}

    def _json(self, record: str) -> Any:
        entry = self._records.get(record)
        if entry is None:
            raise RefusedFile(
                "is a torch.export program in an unsupported format:"
                f" it has no {record.rpartition('/')[2]}; save it with torch 2.11 or newer, or {SAVE}"
            )
        text = text_record(self.path, entry, _MAX_JSON_BYTES)
        try:
            return strict_json.parse(text, record.rpartition("/")[2])
        except (ArtifactError, ValueError) as error:
            raise RefusedFile(f"is damaged: {error}") from None

    def tensors(self) -> dict[str, TensorInfo]:
        """Returns the dtype and shape of weights, buffers and constants, by name."""
        return {
            name: TensorInfo(str(m.dtype).removeprefix("torch."), m.sizes) for name, m in self._metas.items()
        }

    def get(self, name: str) -> torch.Tensor:
        """Returns one tensor, mapped. Raises: KeyError."""
        meta = self._metas[name]
        if self._file is None:
            self._file = torch.UntypedStorage.from_file(self.path, False, self._size)
        start = self._starts[meta.record]
        part = self._file[start : start + self._records[meta.record].file_size]
        return torch.empty(0, dtype=meta.dtype).set_(part, meta.offset, meta.sizes, meta.strides)

    def read(self, name: str) -> torch.Tensor:
        """Returns a copy of one tensor. Raises: KeyError; CheckpointError if the file became shorter."""
        try:
            return copied(self.get(name))
        except ShortenedFile:
            raise CheckpointError(
                f"checkpoint {self.path}: {shortened([(self.path, self._status)])}"
            ) from None

    def is_parameter(self, name: str) -> bool:
        """Returns whether a tensor is a parameter of its module; buffers and constants are not.

        Raises: KeyError.
        """
        return self._metas[name].parameter

    def place(self, name: str) -> object:
        """Returns a key for a tensor's bytes; it is equal for names of one tensor."""
        return self._metas[name]._replace(parameter=False)

    def program(self) -> dict[str, Any]:
        """Returns the program's JSON. Raises: RefusedFile for an unsupported schema."""
        content = self._json(f"{self._root}models/{self._model}.json")
        version = content.get("schema_version") if isinstance(content, dict) else None
        major = version.get("major") if isinstance(version, dict) else None
        if major != SCHEMA:
            raise RefusedFile(
                f"is a torch.export program of schema {major}, but widepack reads {SCHEMA};"
                " save it with torch 2.11 to 2.13"
            )
        assert isinstance(content, dict)
        return content

    def samples(self) -> list[Any] | None:
        """Returns the leaves of the example call of the export; None if they cannot be read as data."""
        record = f"{self._root}data/sample_inputs/{self._model}.pt"
        if record not in self._records or not self._records[record].file_size:
            return None
        content = text_record(self.path, self._records[record])
        _check_samples(content)
        try:
            call = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            leaves: list[Any] = pytree.tree_leaves(call)
        except Exception:  # noqa: BLE001  # without the samples, inputs are drawn or requested
            return None
        return leaves


def _check_samples(content: bytes) -> None:
    """Checks the limits on sizes for the file of torch.save that holds the example inputs.

    Raises: RefusedFile.
    """
    if not content.startswith(b"PK"):
        return
    records = records_of(io.BytesIO(content), len(content))
    for name, entry in records.items():
        if name.endswith("/data.pkl"):
            deque(storages_of(text_record(io.BytesIO(content), entry)), maxlen=0)


class _Meta(NamedTuple):
    """A tensor of the file. parameter: whether it is one of its module; buffers and constants are not."""

    record: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    parameter: bool


def _meta(row: Any, folder: str, name: str, records: Mapping[str, zipfile.ZipInfo]) -> _Meta:
    """Reads and checks a tensor's row of a config. Raises: RefusedFile."""

    def bad(what: str) -> RefusedFile:
        return RefusedFile(f"is damaged, or of an unsupported format: {name[:80]} {what}")

    if not isinstance(row, dict):
        raise bad("has no record")
    if row.get("use_pickle") is not False:
        raise RefusedFile(
            f"has a pickled {name[:80]}, and loading it can run code; widepack reads dense tensors only."
            f" {SAVE[0].upper()}{SAVE[1:]}"
        )
    meta = row.get("tensor_meta")
    record = folder + str(row.get("path_name"))
    if not isinstance(meta, dict) or record not in records:
        raise bad("has no bytes")
    dtype = DTYPES.get(meta["dtype"]) if type(meta.get("dtype")) is int else None
    if dtype is None or meta.get("layout") != STRIDED:
        raise bad(
            f"has the dtype {str(meta.get('dtype'))[:20]} and the layout {str(meta.get('layout'))[:20]};"
            " widepack reads dense tensors"
        )
    sizes, strides = (
        tuple(_int(v) for v in meta[k]) if isinstance(meta.get(k), list) else None
        for k in ("sizes", "strides")
    )
    offset = _int(meta.get("storage_offset"))
    if sizes is None or strides is None or len(sizes) != len(strides) or len(sizes) > 64:
        raise bad("has no shape")
    if min((*sizes, *strides, offset)) < 0:
        raise bad("has no shape")
    entry = records[record]
    if entry.compress_type != zipfile.ZIP_STORED:
        raise bad("is compressed; torch stores weights uncompressed")
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if 0 not in sizes else -1
    if (last + 1) * dtype.itemsize > entry.file_size:
        if not entry.file_size:
            raise RefusedFile(
                f"is a torch.export program without its weights: {name[:80]} has no bytes;"
                " give the file that was saved with its weights"
            )
        raise bad(f"needs {(last + 1) * dtype.itemsize} bytes, its record has {entry.file_size}")
    return _Meta(record, dtype, sizes, strides, offset, row.get("is_param") is True)


def _int(value: Any) -> int:
    """Returns the number of `{"as_int": 3}`; -1 for any other value."""
    number = value.get("as_int") if isinstance(value, dict) and len(value) == 1 else None
    return number if type(number) is int else -1
