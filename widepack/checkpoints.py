"""Checkpoints: files of trained weights, opened lazily, by their content, without running anything that is in them.

Read are state dicts of `torch.save` (zip files are mapped, the older form is read into memory) and safetensors (mapped). Whatever else a file turns out to be
is said in words. A state dict inside a training checkpoint is found

1. where `key` says: `ema`, or `model.weights` for a dict in a dict;
2. in the file itself, when all that it holds is tensors;
3. under `state_dict` or `model`, when that is the only dict of tensors in the file;

and a prefix `module.` or `_orig_mod.` that all names have (DataParallel and torch.compile leave it) is taken off.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import pickletools
import re
import stat
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, UsageError

PREFIXES = ("module.", "_orig_mod.")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
AUTOMATIC_KEYS = ("state_dict", "model")

# The magic number that opens every file of torch.save's older form, pickled with protocol 2.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# The longest header that safetensors reads.
_MAX_HEADER = 100_000_000
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"BZh", "bzip2-compressed; unpack it first"),
    (b"7z\xbc\xaf", "7z-compressed; unpack it first"),
    (b"GGUF", "a GGUF file"),
    (b"<!DOCTYPE", "a web page; the download went wrong"),
    (b"<html", "a web page; the download went wrong"),
)
_CUT = "is truncated or damaged; copy or download it again"
_SAVE = "save the weights alone: torch.save(model.state_dict(), path)"


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


class Checkpoint:
    """One open checkpoint.

    path: as it was given. bytes: the file's size. prefix: what was taken off every name, or "".
    """

    def __init__(self, path: str, names: Mapping[str, TensorInfo], read: Callable[[str], torch.Tensor], prefix: str, status: os.stat_result) -> None:
        self.path = path
        self.bytes = status.st_size
        self.prefix = prefix
        self._names = dict(names)
        self._read = read
        self._status = status
        self._sha256 = ""

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self._names)} tensors, {self.bytes} bytes)"

    def tensors(self) -> dict[str, TensorInfo]:
        """Name -> dtype and shape, in the file's order; reads no weights."""
        return dict(self._names)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, mapped where the file allows: do not write into it. Raises: KeyError."""
        if name not in self._names:
            raise KeyError(name)
        return self._read(self.prefix + name).detach()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as `get` gives them."""
        return {name: self.get(name) for name in self._names}

    def unstripped(self) -> Checkpoint:
        """The same file with the names that stand in it."""
        whole = Checkpoint(self.path, {self.prefix + name: info for name, info in self._names.items()}, self._read, "", self._status)
        whole._sha256 = self._sha256
        return whole

    def sha256(self) -> str:
        """The file's SHA-256, 64 hex digits; read in pieces on the first call.

        Raises: CheckpointError where the file is not the one that was opened any more.
        """
        if not self._sha256:
            digest = hashlib.sha256()
            try:
                with open(self.path, "rb") as file:
                    now = os.fstat(file.fileno())
                    while piece := file.read(1 << 20):
                        digest.update(piece)
            except OSError as error:
                raise CheckpointError(f"checkpoint {self.path}: cannot be read: {error.strerror or error}") from None
            if _identity(now) != _identity(self._status):
                raise CheckpointError(f"checkpoint {self.path}: was changed or replaced after it was opened; build again when nothing writes to it")
            self._sha256 = digest.hexdigest()
        return self._sha256


def open_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Open one checkpoint.

    path: a file of torch.save or safetensors, told by its content. key: where in the file the state dict is, see the module.
    Raises: CheckpointError that says what the file is instead, and the way out.
    """
    try:
        return _open(str(path), key)
    except _Refused as refused:
        raise CheckpointError(f"checkpoint {path}: {refused}") from None


def open_all(paths: Sequence[str | Path], key: str | None = None) -> list[Checkpoint]:
    """Open all checkpoints, in order. Raises: UsageError if there are none; one CheckpointError that lists all that cannot be read."""
    if isinstance(paths, (str, Path)):
        raise UsageError(f"checkpoints must be a list of paths, not the one path {str(paths)!r}")
    if not paths:
        raise UsageError("no checkpoints: name the files of the members, for example widepack build ckpts/*.pt -o ens.wide")
    opened: list[Checkpoint] = []
    bad: list[str] = []
    for i, path in enumerate(paths):
        try:
            opened.append(_open(str(path), key))
        except _Refused as refused:
            bad.append(f"checkpoint {i} ({path}): {refused}")
    if bad:
        head = "" if len(bad) == 1 else f"{len(bad)} of {len(paths)} checkpoints cannot be used:\n- "
        raise CheckpointError(head + "\n- ".join(bad))
    return opened


def member_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest paths that tell the members apart, without suffix, in order; always unique.

    1. the file's stem, or the one folder, counted from the file, that differs everywhere: `runs/a/best.pt`, `runs/b/best.pt` -> `a`, `b`;
    2. the shortest ends of the paths, less what all end with: `a/fold0/best.pt`, `b/fold0/best.pt`, `a/fold1/best.pt` -> `a/fold0`, `b/fold0`, `a/fold1`;
    3. the same with suffixes: `m.pt`, `m.safetensors`;
    4. for a file that is given twice, a number: `m`, `m-2`.
    """
    texts = [os.path.normpath(path) for path in paths]
    if any(text == os.curdir or os.pardir in PurePath(text).parts for text in texts):
        texts = [os.path.abspath(text) for text in texts]  # dots do not say which folder it is
    stems, files = [_parts(text, strip=True) for text in texts], [_parts(text, strip=False) for text in texts]
    names = _distinct(stems) or _distinct(files) or ["/".join(_differing(parts, stems)) for parts in stems]
    taken = set(names)
    seen: set[str] = set()
    unique = []
    for name in names:
        chosen, number = name, 2
        while chosen in seen or (chosen != name and chosen in taken):
            chosen, number = f"{name}-{number}", number + 1
        seen.add(chosen)
        unique.append(chosen)
    return unique


def _parts(path: str, strip: bool) -> tuple[str, ...]:
    pure = PurePath(path)
    parts = pure.parts[1:] if pure.anchor else pure.parts
    if strip and parts:
        stem, suffix = os.path.splitext(parts[-1])
        parts = (*parts[:-1], stem if suffix.lower() in SUFFIXES else parts[-1])
    return parts or ("checkpoint",)


def _distinct(rows: list[tuple[str, ...]]) -> list[str] | None:
    """Steps 1 and 2 of `member_names`, or None where two rows are equal."""
    if len(set(rows)) < len(rows):
        return None
    for k in range(1, min((len(parts) for parts in rows), default=0) + 1):
        if len({parts[-k] for parts in rows}) == len(rows):
            return [parts[-k] for parts in rows]
    rows = [_differing(parts, rows) for parts in rows]
    for k in range(1, max((len(parts) for parts in rows), default=0) + 1):
        names = ["/".join(parts[-k:]) for parts in rows]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in rows]


def _differing(parts: tuple[str, ...], rows: list[tuple[str, ...]]) -> tuple[str, ...]:
    """One row without the end that all rows share, as long as something is left of every row."""
    shared = 0
    while all(len(row) > shared + 1 and row[-1 - shared] == parts[-1 - shared] for row in rows):
        shared += 1
    # Equal rows share everything: the file's own name is the shortest that still says something.
    return parts[-1:] if len(set(rows)) == 1 else parts[: len(parts) - shared]


class _Refused(Exception):
    """Why one file cannot be used; the callers add which one."""


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open(path: str, key: str | None) -> Checkpoint:
    try:
        # Asked before opening: to open a named pipe would wait for its writer.
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise _Refused("is a folder; name the files in it, for example " + os.path.join(path, "*.pt"))
        if not stat.S_ISREG(status.st_mode):
            raise _Refused("is not a plain file")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            start = file.read(64)
    except FileNotFoundError:
        raise _Refused("there is no such file") from None
    except (OSError, ValueError) as error:
        raise _Refused(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not start:
        raise _Refused("is empty (0 bytes)")
    if start.startswith(b"PK\x03\x04"):
        _check_zip(path)
        return _from_torch(path, key, status, mapped=True)
    if start.startswith(_LEGACY):
        return _from_torch(path, key, status, mapped=False)
    header = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and header <= _MAX_HEADER:
        return _from_safetensors(path, key, status, header)
    raise _Refused(_foreign(start))


def _foreign(start: bytes) -> str:
    for magic, what in _FOREIGN:
        if start[: len(magic)].lower() == magic.lower():
            return f"is {what}"
    if _LEGACY.startswith(start):
        return "is truncated: only the first bytes of a torch.save file are there"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 1:
        return f"is a plain pickle, which can run code when it is loaded; {_SAVE}"
    try:
        shown = start.decode("utf-8", errors="ignore" if len(start) == 64 else "strict")
    except UnicodeDecodeError:
        shown = ""
    words = "".join(c if c.isprintable() else " " for c in shown).strip()
    if words and all(c.isprintable() or c.isspace() for c in shown):
        return f"is a text file (it starts with {words[:24]!r}), not a file of torch.save or safetensors"
    return f"is neither a file of torch.save nor safetensors; it starts with the bytes {start[:8].hex(' ')}"


def _check_zip(path: str) -> None:
    """Refuse the zip files that are no checkpoint, in words that torch.load does not have."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise _Refused("is truncated or damaged: the directory at the end of the zip file is missing; copy or download it again") from None
    inner = {name.partition("/")[2] for name in names} | set(names)
    if "constants.pkl" in inner:
        raise _Refused(f"is a TorchScript archive, which holds code; load it with torch.jit.load where it is trusted, and {_SAVE}")
    if "archive_format" in inner or any(name.startswith("models/") and name.endswith(".json") for name in inner):
        raise _Refused(f"is a program of torch.export, not a state dict; {_SAVE}")
    if any(name.endswith(".npy") for name in names):
        raise _Refused("is a NumPy archive (.npz), not a file of torch.save")
    if "data.pkl" not in inner:
        raise _Refused("is a zip file, but not one of torch.save: it holds no data.pkl")


def _from_torch(path: str, key: str | None, status: os.stat_result, mapped: bool) -> Checkpoint:
    try:
        if mapped and not path.endswith(".safetensors"):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:  # torch.load goes by a name that ends so, not by the content; it maps named files only
            with open(path, "rb") as file:
                found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _Refused(_CUT if not mapped and _is_cut(path) else _unsafe(str(error))) from None
    except Exception as error:  # noqa: BLE001 -- torch.load raises whatever its unpickler, the zip reader and the file make of damage
        raise _Refused(f"{_CUT} (torch says {' '.join(str(error).split())[:200]!r})") from None
    tensors = _pick(found, key)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            kind = "quantized" if tensor.is_quantized else f"on the device {tensor.device}" if tensor.layout == torch.strided else str(tensor.layout)
            raise _Refused(f"{name} is {kind}; widepack reads dense tensors with data only")
    return _stripped(
        path, {name: info_of(tensor) for name, tensor in tensors.items()}, lambda name: tensors[name].resolve_conj().resolve_neg(), status
    )


def info_of(tensor: torch.Tensor) -> TensorInfo:
    """A tensor's dtype and shape."""
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _is_cut(path: str) -> bool:
    """Whether the four pickles that open a file of the older form end too early; one that does so in a class's name reads like a foreign class."""
    with open(path, "rb") as file:
        try:
            for _ in range(4):
                deque(pickletools.genops(file), maxlen=0)
        except ValueError:
            return True
    return False


def _unsafe(message: str) -> str:
    """torch's refusal to unpickle, as one sentence that names the class."""
    if "TorchScript" in message:
        return f"is a TorchScript archive, which holds code; {_SAVE}"
    found = re.search(r"GLOBAL ([\w.]+)", message) or re.search(r"class '?([\w.]+)", message)
    if found:
        return f"holds a pickled {found[1]}, and to load that can run code; {_SAVE}"
    return f"is damaged, or holds more than tensors: {' '.join(message.split())[:200]}"


def _from_safetensors(path: str, key: str | None, status: os.stat_result, header: int) -> Checkpoint:
    if header + 8 > status.st_size:
        raise _Refused(f"is truncated: the safetensors header needs {header + 8} bytes, the file has {status.st_size}")
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        order = list(file.keys())
        infos = {}
        for name in order:
            view = file.get_slice(name)
            infos[name] = (str(view.get_dtype()), tuple(view.get_shape()))
    except SafetensorError as error:
        words = " ".join(str(error).split())
        cut = "truncated" if "incomplete" in words.lower() or "not fully covered" in words.lower() else "damaged"
        raise _Refused(f"is {cut}: the safetensors reader says {words[:200]!r}; copy or download it again") from None
    except (OSError, ValueError) as error:
        raise _Refused(f"cannot be read as safetensors: {error}") from None
    if key:
        raise _Refused(f"is a safetensors file, which has no dicts in it, so the key {key!r} names nothing there; build without it")
    if not infos:
        raise _Refused("holds no tensors")
    names = {}
    for name, (dtype, shape) in infos.items():
        if dtype not in _SAFETENSORS:
            raise _Refused(f"{name} has the dtype {dtype}; known: {', '.join(_SAFETENSORS)}")
        names[name] = TensorInfo(_SAFETENSORS[dtype], shape)
    return _stripped(path, names, file.get_tensor, status)


# As the safetensors format spells them -> as torch does.
_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_SAFETENSORS |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"}
_SAFETENSORS |= {"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64"}


def _stripped(path: str, names: dict[str, TensorInfo], read: Callable[[str], torch.Tensor], status: os.stat_result) -> Checkpoint:
    prefix = ""
    while True:
        found = next((p for p in PREFIXES if all(name.startswith(prefix + p) and name != prefix + p for name in names)), None)
        if found is None:
            return Checkpoint(path, {name[len(prefix) :]: info for name, info in names.items()}, read, prefix, status)
        prefix += found


def _pick(found: object, key: str | None) -> dict[str, torch.Tensor]:
    """The state dict in what the file holds. Raises: _Refused that lists the keys that could be meant."""
    if isinstance(found, torch.Tensor):
        raise _Refused(f"holds a single tensor, {info_of(found)}, not a state dict; {_SAVE}")
    if not isinstance(found, Mapping):
        raise _Refused(f"holds {an(found)}, not a state dict; {_SAVE}")
    candidates = dict(_dicts(found))
    first = next(iter(candidates), "")
    hint = f" Dicts of tensors in it: {', '.join(candidates)}; name one, for example --key {first}." if candidates else ""
    if key:
        inside = _follow(found, key)
        if inside is None:
            raise _Refused(f"has no {key!r}.{hint or ' It holds ' + _listed(found) + '.'}")
        if not isinstance(inside, Mapping) or not _is_state(inside):
            raise _Refused(f"{key!r} is {_described(inside)}, not a dict of tensors.{hint}")
        return dict(inside)
    if _is_state(found):
        return dict(found)
    if len(candidates) == 1:
        ((path, only),) = candidates.items()
        if path in AUTOMATIC_KEYS:
            return dict(only)
    if not found:
        raise _Refused("holds an empty dict, no tensors")
    if candidates:
        raise _Refused(f"is not a dict of tensors: it holds {_listed(found)}.{hint}")
    raise _Refused(f"holds no dict of tensors: it holds {_listed(found)}; {_SAVE}")


def _is_state(value: Mapping[Any, Any]) -> bool:
    return len(value) > 0 and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())


def _dicts(value: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
    """All dicts of tensors inside, by dotted key. An optimizer's state is keyed by numbers and so is none of them."""
    for key, inner in value.items():
        if isinstance(key, str) and isinstance(inner, Mapping) and depth < 4:
            path = f"{prefix}{key}"
            if _is_state(inner):
                yield path, inner
            else:
                yield from _dicts(inner, f"{path}.", depth + 1)


def _follow(value: object, key: str) -> object | None:
    """What a dotted key names; a key that holds dots itself is found too."""
    if not isinstance(value, Mapping):
        return None
    if key in value:
        inner: object = value[key]
        return inner
    for at in (i for i, char in enumerate(key) if char == "."):
        if key[:at] in value and (inner := _follow(value[key[:at]], key[at + 1 :])) is not None:
            return inner
    return None


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor, {info_of(value)}"
    if isinstance(value, Mapping):
        odd = [f"{k!r} is {type(v).__name__}" for k, v in value.items() if not isinstance(v, torch.Tensor)]
        return f"a dict ({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})" if odd else "an empty dict"
    return an(value)


def an(value: object) -> str:
    """A value's type with its article: `an int`, `a list`."""
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _listed(value: Mapping[Any, Any]) -> str:
    shown = [f"{key} ({type(inner).__name__})" for key, inner in list(value.items())[:8]]
    return (", ".join(shown) or "nothing") + (f" and {len(value) - 8} more" if len(value) > 8 else "")
