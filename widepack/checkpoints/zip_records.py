"""Reads a zip file's directory; refuses records far larger than the file.

A compressed record of a few kB can become gigabytes (a zip bomb). Before anything is decompressed, the sizes
in the directory are compared with these limits:

| what | at most |
|---|---|
| all compressed records together, decompressed | 256 MiB, and 20 bytes for each byte of the file |
| all tensors together, by their shapes | the same |
| a pickle or JSON text, decompressed | 16 MiB, and 20 bytes for each of its compressed bytes |
| opcodes of a pickle | 5 million |
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from .state_dict import SAVE, RefusedFile

_FREE_BYTES = 256 << 20
_FREE_TEXT_BYTES = 16 << 20
_RATIO = 20
_MOST_OPCODES = 5_000_000
_ENCRYPTED = 1  # a bit of a record's flags
_HEADER_BYTES = 30
_AGAIN = "if you trust it, save it again: torch.save(torch.load(path, mmap=False), path)"
DAMAGED_DIRECTORY = (
    "is truncated or damaged: the directory at the end of the zip file is missing; copy or download it again"
)

Records = Mapping[str, zipfile.ZipInfo]


def records_of(file: str | BinaryIO, size: int) -> Records:
    """Returns the records of a zip file by name, within the limits on sizes.

    file: its path, or an open file. size: its number of bytes. Raises: RefusedFile.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise RefusedFile(DAMAGED_DIRECTORY) from None
    records: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        if entry.filename in records:
            raise RefusedFile(f"is damaged: it has the record {entry.filename[:80]!r} twice")
        records[entry.filename] = entry
        _check_entry(entry)
    expanded = sum(entry.file_size for entry in entries if is_compressed(entry))
    limit = _FREE_BYTES + _RATIO * size
    if expanded > limit:
        raise RefusedFile(
            f"has compressed records of {expanded} bytes when decompressed; for a file of {size} bytes at"
            f" most {limit} are read; {_AGAIN}"
        )
    return records


def check_expanded(lengths: Iterable[int], size: int) -> None:
    """Checks that tensors do not show far more than their file contains, as a number that is expanded to a
    shape of gigabytes does.

    lengths: the bytes of each tensor by its shape. size: of the file. Raises: RefusedFile.
    """
    limit = _FREE_BYTES + _RATIO * size
    if (shown := sum(lengths)) > limit:
        raise RefusedFile(
            f"has tensors of {shown} bytes by their shapes; for a file of {size} bytes at most {limit} are"
            " read; save them with contiguous()"
        )


def is_compressed(entry: zipfile.ZipInfo) -> bool:
    """Returns whether a record's bytes must be decompressed."""
    return entry.compress_type != zipfile.ZIP_STORED


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.filename[:80]
    if entry.flag_bits & _ENCRYPTED:
        raise RefusedFile(f"has the encrypted record {name!r}; decrypt the file first")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise RefusedFile(
            f"has the record {name!r} in the compression {entry.compress_type}, which torch.load does not"
            " read; compress with deflate, or store the records uncompressed"
        )
    if not is_compressed(entry) and entry.compress_size != entry.file_size:
        raise RefusedFile(
            f"is damaged: the record {name!r} is stored in {entry.compress_size} bytes,"
            f" but has {entry.file_size}; copy or download it again"
        )


def text_record(file: str | BinaryIO, entry: zipfile.ZipInfo, most: int = 512 << 20) -> bytes:
    """Returns the bytes of a record that is a pickle or a JSON text. most: the largest size.

    Raises: RefusedFile if the record is larger, takes far more memory than its compressed bytes, or is
    damaged.
    """
    limit = min(most, _FREE_TEXT_BYTES + _RATIO * entry.compress_size) if is_compressed(entry) else most
    if entry.file_size > limit:
        raise RefusedFile(
            f"has a record that is too large: {entry.filename[:80]} has {entry.file_size} bytes, of which at"
            f" most {limit} are read; {SAVE}"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(entry)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise RefusedFile(f"is damaged: {error}") from None
    except zlib.error as error:
        raise RefusedFile(f"is damaged: {entry.filename[:80]} cannot be decompressed ({error})") from None


def record_start(file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> int:
    """Returns the offset of a stored record's bytes. size: of the file. Raises: RefusedFile."""
    file.seek(entry.header_offset)
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise RefusedFile(
            f"is damaged: the record {entry.filename[:80]!r} is not where its directory says;"
            " copy or download it again"
        )
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = entry.header_offset + _HEADER_BYTES + names
    if start + entry.file_size > size:
        raise RefusedFile(
            f"is truncated or damaged: the record {entry.filename[:80]!r} ends past the file;"
            " copy or download it again"
        )
    return start


class Storage(NamedTuple):
    """A storage that a pickle of torch.save names. record: below `data/`. bytes: what the pickle reads."""

    record: str
    bytes: int


_ITEM_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16, "Untyped": 1, "QInt8": 1, "QUInt8": 1, "QInt32": 4,
    "QUInt4x2": 1, "QUInt2x4": 1,
}  # fmt: skip
_MARK = object()
_PUT = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GET = ("GET", "BINGET", "LONG_BINGET")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def storages_of(pickled: bytes) -> Iterator[Storage]:
    """Yields the storages that a pickle of torch.save names. Nothing is unpickled.

    The opcodes are followed with texts and integers alone; other values are None.
    Raises: RefusedFile for a pickle that is damaged, or has too many opcodes.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for number, (op, arg, _) in enumerate(pickletools.genops(pickled)):
            if number >= _MOST_OPCODES:
                raise RefusedFile(
                    f"has a pickle of more than {_MOST_OPCODES} opcodes beside the weights; {SAVE}"
                )
            if op.name == "BINPERSID":
                storage = _storage(stack.pop())
                stack.append(None)
                if storage is not None:
                    yield storage
            elif op.name in _PUT:
                memo[len(memo) if arg is None else arg] = stack[-1]
            elif op.name in _GET:
                stack.append(memo.get(arg))
            else:
                _follow(op, arg, stack)
    except (ValueError, IndexError, TypeError):
        raise RefusedFile(
            "is truncated or damaged: its pickle ends early; copy or download it again"
        ) from None


def _follow(op: pickletools.OpcodeInfo, arg: Any, stack: list[Any]) -> None:
    """Applies an opcode to the stack."""
    if op.name == "MARK":
        stack.append(_MARK)
    elif op.name == "DUP":
        stack.append(stack[-1])
    elif op.name == "GLOBAL":
        stack.append(arg)
    elif op.name == "STACK_GLOBAL":
        name, module = stack.pop(), stack.pop()
        stack.append(f"{module} {name}")
    elif op.name == "TUPLE":
        stack.append(_popped_to_mark(stack))
    elif op.name in _TUPLES:
        count = _TUPLES[op.name]
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        stack.append(items)
    else:
        before = op.stack_before
        if pickletools.markobject in before:
            _popped_to_mark(stack)
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            stack.pop()
        stack.extend(arg if type(arg) in (int, str) else None for _ in op.stack_after)


def _popped_to_mark(stack: list[Any]) -> tuple[Any, ...]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise IndexError("no mark")
    items = tuple(stack[at + 1 :])
    del stack[at:]
    return items


def _storage(saved: Any) -> Storage | None:
    """Returns the storage of a persistent id, `("storage", class, record, device, number of items)`."""
    if not isinstance(saved, tuple) or len(saved) != 5 or type(saved[4]) is not int:
        return None
    _, kind, record, _, items = saved
    name = str(kind).rpartition(" ")[2].removesuffix("Storage")
    if name not in _ITEM_BYTES:
        raise RefusedFile(f"has weights in a storage of the unknown class {str(kind)[:80]!r}; {SAVE}")
    return Storage(str(record), items * _ITEM_BYTES[name])
