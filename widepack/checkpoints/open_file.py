"""Opens one checkpoint file lazily, by its content, without running code of the file.

It reads state dicts of `torch.save` (zip files are mapped, the older format is read into memory), safetensors
(mapped) and the weights of `torch.export` programs (mapped). Objects of other classes that a training script
saved beside the weights are skipped: nothing of them is imported or run. If the weights themselves are in a
pickled module, the file is read only with `trust_pickle`, which runs the code that it names. For any other
file the error names what it is.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from safetensors import SafetensorError, safe_open

from .checkpoint import Checkpoint, at_key, unwrapped
from .numpy_archive import from_npz, is_npz
from .plain_file import open_plain
from .pt2_archive import Pt2File
from .state_dict import OR_TRUST, SAVE, RefusedFile, TensorInfo
from .torch_file import LEGACY, ZIP, Contents, open_torch_file
from .zip_records import records_of

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


def is_torch_file(path: str, start: bytes, trust: bool) -> bool:
    """Returns whether a plain file is one of torch.save or pickle. Raises: RefusedFile."""
    if start.startswith(ZIP):
        size = os.path.getsize(path)
        return not is_npz(path, size) and not _is_program(path, size)
    return start.startswith(LEGACY) or (trust and _is_pickle(start))


def open_file(
    path: str, key: str | None = None, trust: bool = False, contents: Contents | None = None
) -> Checkpoint:
    """Opens one file, recognized by its content.

    trust: whether to unpickle any object. contents: of files of torch.save that were read already.
    Raises: RefusedFile.
    """
    status, start = look(path)
    if stat.S_ISDIR(status.st_mode):
        raise RefusedFile("is a folder")
    if start.startswith(ZIP):
        if is_npz(path, status.st_size):
            return from_npz(path, key, status)
        if _is_program(path, status.st_size):
            return _from_program(path, key, status)
        return open_torch_file(path, key, status, mapped=True, trust=trust, contents=contents)
    if start.startswith(LEGACY):
        return open_torch_file(path, key, status, mapped=False, trust=trust, contents=contents)
    header = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and header <= _MAX_HEADER:
        return _from_safetensors(path, key, status, header)
    if trust and _is_pickle(start):
        return open_torch_file(path, key, status, mapped=False, trust=True, contents=contents)
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


def _is_program(path: str, size: int) -> bool:
    """Returns whether a zip file is a torch.export program.

    Raises: RefusedFile if it is no checkpoint at all.
    """
    names = list(records_of(path, size))
    inner = {name.partition("/")[2] for name in names} | set(names)
    if "constants.pkl" in inner:
        raise RefusedFile(
            "is a TorchScript archive, which contains code; load it with torch.jit.load if you trust it, and"
            f" {SAVE}"
        )
    if "archive_format" in inner or any(
        name.startswith("models/") and name.endswith(".json") for name in inner
    ):
        return True
    if "serialized_exported_program.json" in inner:
        raise RefusedFile(
            "is a torch.export program in the format of torch before 2.8; load it there, save it with a newer"
            " torch,"
            f" or {SAVE}"
        )
    if "data.pkl" not in inner:
        raise RefusedFile("is a zip file, but not one of torch.save: it has no data.pkl")
    return False


def _from_program(path: str, key: str | None, status: os.stat_result) -> Checkpoint:
    program = Pt2File(path)
    infos = {name: info for name, info in program.tensors().items() if name in program.saved}
    return unwrapped(
        Checkpoint(
            path, at_key(infos, key, "torch.export program"), program.get, "", status, program=program
        ),
        key,
    )


def _from_safetensors(path: str, key: str | None, status: os.stat_result, header: int) -> Checkpoint:
    if header + 8 > status.st_size:
        raise RefusedFile(
            f"is truncated: the safetensors header needs {header + 8} bytes, the file has {status.st_size}"
        )
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        order = list(file.keys())
        infos = {}
        for name in order:
            view = file.get_slice(name)
            infos[name] = (str(view.get_dtype()), tuple(view.get_shape()))
    except SafetensorError as error:
        words = " ".join(str(error).split())
        cut = (
            "truncated"
            if "incomplete" in words.lower() or "not fully covered" in words.lower()
            else "damaged"
        )
        raise RefusedFile(
            f"is {cut}: the safetensors reader says {words[:200]!r}; copy or download it again"
        ) from None
    except (OSError, ValueError) as error:
        raise RefusedFile(f"cannot be read as safetensors: {error}") from None
    except (MemoryError, RuntimeError) as error:  # safetensors maps the whole file
        raise RefusedFile(
            f"has {status.st_size:,} bytes, which cannot be mapped into memory:"
            f" {str(error)[-200:] or 'no memory'}"
        ) from None
    if not infos:
        raise RefusedFile("has no tensors")
    names = {}
    for name, (dtype, shape) in infos.items():
        if dtype not in _SAFETENSORS:
            raise RefusedFile(f"{name} has the dtype {dtype}; known: {', '.join(_SAFETENSORS)}")
        names[name] = TensorInfo(_SAFETENSORS[dtype], shape)
    return unwrapped(
        Checkpoint(path, at_key(names, key, "safetensors file"), file.get_tensor, "", status), key
    )


# The dtypes' names in the safetensors format, and in torch.
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_SAFETENSORS |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"}
_SAFETENSORS |= {
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
}
