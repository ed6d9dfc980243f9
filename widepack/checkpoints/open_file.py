"""Opens one checkpoint file lazily, by its content, without running code of the file.

It reads state dicts of `torch.save` (zip files are mapped, the older format is read into memory), safetensors
(mapped), the weights of `torch.export` programs (mapped), and archives of NumPy. Objects of other classes
that a training script saved beside the weights are skipped: nothing of them is imported or run. If the
weights themselves are in a pickled module, the file is read only with `trust_pickle`, which runs the code
that it names. For any other file the error names what it is.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from widepack_artifacts.weights import NAMES

from .checkpoint import Checkpoint, Content
from .plain_file import open_plain
from .pt2_archive import Pt2File
from .state_dict import OR_TRUST, SAVE, RefusedFile, as_tensor
from .torch_file import LEGACY, ZIP, read_torch_file
from .zip_records import Records, check_expanded, records_of

# The longest header that safetensors reads.
_MAX_HEADER = 100_000_000
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a single NumPy array; save the arrays by name with numpy.savez"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"BZh", "bzip2-compressed; unpack it first"),
    (b"7z\xbc\xaf", "7z-compressed; unpack it first"),
    (b"GGUF", "a GGUF file"),
    (b"<!DOCTYPE", "a web page; the download went wrong"),
    (b"<html", "a web page; the download went wrong"),
)


def look(path: str) -> tuple[os.stat_result, bytes]:
    """Returns the status of a path, and the first bytes of a plain file. Raises: RefusedFile."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return status, b""
        with open_plain(path) as file:
            status = os.fstat(file.fileno())
            start = file.read(64)
    except FileNotFoundError:
        raise RefusedFile("there is no such file") from None
    except (OSError, ValueError) as error:
        raise RefusedFile(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not start:
        raise RefusedFile("is empty (0 bytes)")
    return status, start


def open_file(path: str, key: str | None = None, trust: bool = False) -> Checkpoint:
    """Opens one file. key: where the state dict is in it. trust: as for `read_file`. Raises: RefusedFile."""
    return read_file(path, trust).checkpoint(path, key)


def read_file(path: str, trust: bool = False, seen: tuple[os.stat_result, bytes] | None = None) -> Content:
    """Returns what one file has. The format is recognized by the content.

    trust: whether to unpickle any object. seen: what `look` returned, if it was called. Raises: RefusedFile.
    """
    status, start = seen or look(path)
    if stat.S_ISDIR(status.st_mode):
        raise RefusedFile("is a folder")
    if start.startswith(ZIP):
        return _zip_reader(records_of(path, status.st_size))(path, status, start, trust)
    header = int.from_bytes(start[:8], "little")
    if not start.startswith(LEGACY) and start[8:9] == b"{" and header <= _MAX_HEADER:
        return _read_safetensors(path, status, header)
    if start.startswith(LEGACY) or (trust and _is_pickle(start)):
        return read_torch_file(path, status, start, trust)
    raise RefusedFile(_foreign(start))


def _is_pickle(start: bytes) -> bool:
    return len(start) > 1 and start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"


def _foreign(start: bytes) -> str:
    for magic, what in _FOREIGN:
        if start[: len(magic)].lower() == magic.lower():
            return f"is {what}"
    if LEGACY.startswith(start):
        return "is truncated: it has only the first bytes of a torch.save file"
    if _is_pickle(start):
        return f"is a plain pickle, which can run code when it is loaded; {SAVE}{OR_TRUST}"
    try:
        shown = start.decode("utf-8", errors="ignore" if len(start) == 64 else "strict")
    except UnicodeDecodeError:
        shown = ""
    words = "".join(c if c.isprintable() else " " for c in shown).strip()
    if words and all(c.isprintable() or c.isspace() for c in shown):
        return f"is a text file (it starts with {words[:24]!r}), not a file of torch.save or safetensors"
    return f"is neither a file of torch.save nor safetensors; it starts with the bytes {start[:8].hex(' ')}"


def _zip_reader(records: Records) -> Callable[[str, os.stat_result, bytes, bool], Content]:
    """Returns the reader of a zip file with these records. Raises: RefusedFile if it is no checkpoint."""
    if records and all(name.endswith(".npy") for name in records):
        return _read_npz
    inner = {name.partition("/")[2] for name in records} | set(records)
    if "constants.pkl" in inner:
        raise RefusedFile(
            "is a TorchScript archive, which contains code; load it with torch.jit.load if you trust it, and"
            f" {SAVE}"
        )
    if "archive_format" in inner or any(n.startswith("models/") and n.endswith(".json") for n in inner):
        return _read_program
    if "serialized_exported_program.json" in inner:
        raise RefusedFile(
            "is a torch.export program in the format of torch before 2.8; load it there, save it with a newer"
            f" torch, or {SAVE}"
        )
    if "data.pkl" not in inner:
        raise RefusedFile("is a zip file, but not one of torch.save: it has no data.pkl")
    return read_torch_file


def _read_program(path: str, status: os.stat_result, start: bytes, trust: bool) -> Content:
    program = Pt2File(path)
    tensors = {name: program.get(name) for name in program.tensors() if name in program.saved}
    return Content(tensors, [(path, status)], "a torch.export program", program=program, mapped=True)


def _read_npz(path: str, status: os.stat_result, start: bytes, trust: bool) -> Content:
    """Reads an archive of `numpy.savez` as data: arrays of numbers by name. No object is unpickled."""
    try:
        import numpy as np
    except ImportError:
        raise RefusedFile(f"is a NumPy archive (.npz), and NumPy is not installed; {SAVE}") from None
    sizes = (entry.file_size for entry in records_of(path, status.st_size).values())
    check_expanded(sizes, status.st_size)
    tensors: dict[str, torch.Tensor] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                tensor = as_tensor(archive[name])
                if tensor is None:
                    raise RefusedFile(
                        f"{name} is an array of {archive[name].dtype}, which torch does not have"
                    )
                tensors[name] = tensor
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        words = " ".join(str(e).split())[:200]
        raise RefusedFile(f"cannot be read as a NumPy archive: {words}") from None
    return Content(tensors, [(path, status)], "a NumPy archive")


def _read_safetensors(path: str, status: os.stat_result, header: int) -> Content:
    if header + 8 > status.st_size:
        raise RefusedFile(
            f"is truncated: the safetensors header needs {header + 8} bytes, the file has {status.st_size}"
        )
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        order = list(file.keys())
        codes = {name: str(file.get_slice(name).get_dtype()) for name in order}
        if unknown := next((name for name, code in codes.items() if code not in NAMES), None):
            raise RefusedFile(f"{unknown} has the dtype {codes[unknown]}; known: {', '.join(NAMES)}")
        tensors = {name: file.get_tensor(name) for name in codes}
    except SafetensorError as error:
        words = " ".join(str(error).split())
        cut = any(part in words.lower() for part in ("incomplete", "not fully covered"))
        raise RefusedFile(
            f"is {'truncated' if cut else 'damaged'}: the safetensors reader says {words[:200]!r}; copy or "
            "download it again"
        ) from None
    except (OSError, ValueError) as error:
        raise RefusedFile(f"cannot be read as safetensors: {error}") from None
    except (MemoryError, RuntimeError) as error:  # safetensors maps the whole file
        raise RefusedFile(
            f"has {status.st_size:,} bytes, which cannot be mapped into memory:"
            f" {str(error)[-200:] or 'no memory'}"
        ) from None
    if not tensors:
        raise RefusedFile("has no tensors")
    return Content(tensors, [(path, status)], "a safetensors file", mapped=True)
