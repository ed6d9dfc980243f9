"""One checkpoint file, opened lazily, by its content, without running anything that is in it.

Read are state dicts of `torch.save` (zip files are mapped, the older form is read into memory), safetensors (mapped) and the weights of `torch.export`
programs (mapped). Objects of other classes that a training script saved beside the weights are passed over: nothing of theirs is imported or run. Where the
weights themselves are in such an object, a pickled module, the file is read only with `trust_pickle`, which runs the code that it names.
Whatever else a file turns out to be is said in words.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import pickletools
import re
import stat
import sys
import warnings
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..spec.dtypes import OutOfRange, converted
from ..errors import CheckpointError
from .pt2_archive import Pt2File
from .state_dict import OR_TRUST, SAVE, Foreign, ForeignDict, ForeignList, Picked, Refused, TensorInfo, info_of, named_under, pick, stands_for, without_wrappers

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
_MOST_CLASSES = 200  # of a file whose objects are passed over
_NEVER = ("torch.jit._pickle.restore_type_tag",)
_CUT = "is truncated or damaged; copy or download it again"


class Checkpoint:
    """One open checkpoint.

    path: as it was given. bytes: the size of its file, or of all its files. prefix: what was taken off every name, or "". module: makes the pickled module that
    it is of, as it was saved, where there is one. program: the torch.export program that it is of, where there is one.
    files: paths, and what stood there when they were opened. versions: of submodules, by the names in the file.
    """

    def __init__(
        self,
        path: str,
        names: Mapping[str, TensorInfo],
        read: Callable[[str], torch.Tensor],
        prefix: str,
        status: os.stat_result,
        *,
        files: Sequence[tuple[str, os.stat_result]] = (),
        module: Callable[[], nn.Module] | None = None,
        program: Pt2File | None = None,
        versions: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self.prefix = prefix
        self.module = module
        self.program = program
        self._versions = versions
        self.files = tuple(files) or ((path, status),)
        self.bytes = sum(found.st_size for _, found in self.files)
        self._infos = {prefix + name: info for name, info in names.items()}  # by the names in the file
        self._names = {name: prefix + name for name in names}
        self._read = read
        self._dtype: torch.dtype | None = None
        self._sha256 = ""

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self._names)} tensors, {self.bytes} bytes)"

    def tensors(self) -> dict[str, TensorInfo]:
        """Name -> dtype and shape, in the file's order; reads no weights."""
        return {name: self._converted(self._infos[stored]) for name, stored in self._names.items()}

    def _converted(self, info: TensorInfo) -> TensorInfo:
        return info if self._dtype is None or not is_floating(info.dtype) else TensorInfo(str(self._dtype).removeprefix("torch."), info.shape)

    def get(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, mapped where the file allows: do not write into it. Raises: KeyError; CheckpointError for a number that `as_dtype` asks too much of."""
        if name not in self._names:
            raise KeyError(name)
        tensor = self._read(self._names[name]).detach()
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        try:
            return converted(tensor, self._dtype)
        except OutOfRange as e:
            raise CheckpointError(f"checkpoint {self.path}: {name} {e}") from e

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as `get` gives them."""
        return self.versioned({name: self.get(name) for name in self._names})

    def versioned(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as `nn.Module.state_dict` gives them, with the versions that stand in the file: some modules load by them."""
        made = OrderedDict(tensors)
        if self._versions:
            plain = {name.removeprefix(self.prefix) if name != self.prefix.removesuffix(".") else "": v for name, v in self._versions.items()}
            made._metadata = OrderedDict(plain)  # type: ignore[attr-defined]  # where torch keeps it
        return made

    def unstripped(self) -> Checkpoint:
        """The same file with the names that stand in it."""
        return self.renamed({name: name for name in self._infos})

    def renamed(self, names: Mapping[str, str], prefix: str = "") -> Checkpoint:
        """The same file under other names: `{name: the name in the file}`; those that are not named are left out."""
        other = copy.copy(self)
        other._names, other.prefix = dict(names), prefix
        return other

    def under(self, prefix: str) -> Checkpoint:
        """The part whose names begin so, without it."""
        return self.renamed({name[len(prefix) :]: stored for name, stored in self._names.items() if name.startswith(prefix)}, self.prefix)

    def as_dtype(self, dtype: torch.dtype) -> Checkpoint:
        """The same file with every floating tensor in one dtype."""
        other = copy.copy(self)
        other._dtype = dtype
        return other

    def sha256(self) -> str:
        """The file's SHA-256, 64 hex digits; read in pieces on the first call. Of several files: that of the lines `<sha256>  <file name>\\n`, in order.

        Raises: CheckpointError where a file is not the one that was opened any more.
        """
        if not self._sha256:
            found = [(_sha256(path, status), os.path.basename(path)) for path, status in self.files]
            lines = "".join(f"{digest}  {name}\n" for digest, name in found)
            self._sha256 = found[0][0] if len(found) == 1 else hashlib.sha256(lines.encode()).hexdigest()
        return self._sha256


def _sha256(path: str, opened: os.stat_result) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            now = os.fstat(file.fileno())
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read: {error.strerror or error}") from None
    if _identity(now) != _identity(opened):
        raise CheckpointError(f"checkpoint {path}: was changed or replaced after it was opened; build again when nothing writes to it")
    return digest.hexdigest()


def is_floating(dtype: str) -> bool:
    """Whether a dtype's name is that of floating numbers."""
    return dtype.startswith(("float", "bfloat"))


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def look(path: str) -> tuple[os.stat_result, bytes]:
    """What stands at a path, and the first bytes of a plain file. Raises: Refused."""
    try:
        # Asked before opening: to open a named pipe would wait for its writer.
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return status, b""
        if not stat.S_ISREG(status.st_mode):
            raise Refused("is not a plain file")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            start = file.read(64)
    except FileNotFoundError:
        raise Refused("there is no such file") from None
    except (OSError, ValueError) as error:
        raise Refused(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not start:
        raise Refused("is empty (0 bytes)")
    return status, start


def open_file(path: str, key: str | None = None, trust: bool = False) -> Checkpoint:
    """Open one file, told by its content. trust: unpickle whatever it holds. Raises: Refused."""
    status, start = look(path)
    if stat.S_ISDIR(status.st_mode):
        raise Refused("is a folder")
    if start.startswith(b"PK\x03\x04"):
        if _is_program(path):
            return _from_program(path, key, status)
        return _from_torch(path, key, status, mapped=True, trust=trust)
    if start.startswith(_LEGACY):
        return _from_torch(path, key, status, mapped=False, trust=trust)
    header = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and header <= _MAX_HEADER:
        return _from_safetensors(path, key, status, header)
    if trust and _is_pickle(start):
        return _from_torch(path, key, status, mapped=False, trust=True)
    raise Refused(_foreign(start))


def _is_pickle(start: bytes) -> bool:
    return len(start) > 1 and start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"


def _foreign(start: bytes) -> str:
    for magic, what in _FOREIGN:
        if start[: len(magic)].lower() == magic.lower():
            return f"is {what}"
    if _LEGACY.startswith(start):
        return "is truncated: only the first bytes of a torch.save file are there"
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


def _is_program(path: str) -> bool:
    """Whether a zip file is a torch.export program. Raises: Refused for one that is no checkpoint either, in words that torch.load does not have."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise Refused("is truncated or damaged: the directory at the end of the zip file is missing; copy or download it again") from None
    inner = {name.partition("/")[2] for name in names} | set(names)
    if "constants.pkl" in inner:
        raise Refused(f"is a TorchScript archive, which holds code; load it with torch.jit.load where it is trusted, and {SAVE}")
    if "archive_format" in inner or any(name.startswith("models/") and name.endswith(".json") for name in inner):
        return True
    if "serialized_exported_program.json" in inner:
        raise Refused("is a torch.export program in the form of torch before 2.8; load it there, save it with a newer torch, or " + SAVE)
    if any(name.endswith(".npy") for name in names):
        raise Refused("is a NumPy archive (.npz), not a file of torch.save")
    if "data.pkl" not in inner:
        raise Refused("is a zip file, but not one of torch.save: it holds no data.pkl")
    return False


def _from_torch(path: str, key: str | None, status: os.stat_result, mapped: bool, trust: bool) -> Checkpoint:
    tensors, module, versions = _picked(path, key, mapped, trust)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            kind = "quantized" if tensor.is_quantized else f"on the device {tensor.device}" if tensor.layout == torch.strided else str(tensor.layout)
            raise Refused(f"{name} is {kind}; widepack reads dense tensors with data only")

    def again() -> nn.Module:
        made = _picked(path, key, mapped, trust).module
        assert made is not None  # it was there a moment ago
        return made

    return _without_wrappers(
        Checkpoint(
            path,
            {name: info_of(tensor) for name, tensor in tensors.items()},
            lambda name: tensors[name].resolve_conj().resolve_neg(),
            "",
            status,
            module=again if module is not None else None,
            versions=versions,
        )
    )


def _picked(path: str, key: str | None, mapped: bool, trust: bool) -> Picked:
    found = _load(path, mapped, trust)
    if isinstance(found, Foreign):
        raise Refused(_pickled(found.name))
    return pick(found, key)


def _load(path: str, mapped: bool, trust: bool) -> object:
    """What a file of torch.save holds, with `Foreign` in place of objects of other classes; trust: with those objects themselves."""
    if trust and not mapped and not _starts_as_torch(path):
        return _unpickle(path, mapped)
    foreign: dict[str, type[Foreign]] = {}
    while True:
        try:
            with torch.serialization.safe_globals([(stands, name) for name, stands in foreign.items()]):
                return _torch_load(path, mapped, True)
        except pickle.UnpicklingError as error:
            said = str(error)
            if not mapped and not foreign and _is_cut(path):
                raise Refused(_CUT) from None
            if trust:
                return _unpickle(path, mapped)
            if not _stand_in(foreign, said):
                raise Refused(_unsafe(next(iter(foreign), ""), said)) from None
        except Exception as error:  # noqa: BLE001 -- torch.load raises whatever its unpickler, the zip reader and the file make of damage
            if foreign:
                raise Refused(_pickled(next(iter(foreign)))) from None
            raise Refused(f"{_CUT} (torch says {' '.join(str(error).split())[:200]!r})") from None


def _stand_in(foreign: dict[str, type[Foreign]], said: str) -> bool:
    """Add what stands for the class at which an unpickler stopped, or let it be a dict or a list; False where that does not help."""
    if unknown := re.search(r"Unsupported global: GLOBAL (\S+)", said):
        name = unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}"
        if name in foreign or len(foreign) >= _MOST_CLASSES or name in _NEVER:
            return False
        foreign[name] = stands_for(name)
        return True
    if filled := re.search(r"Can only (SETITEMS?|append|extend).* got <class '([^']+)'>", said):
        name = filled[2]
        if name not in foreign or not issubclass(foreign[name], Foreign) or issubclass(foreign[name], (ForeignDict, ForeignList)):
            return False
        foreign[name] = stands_for(name, ForeignDict if filled[1].startswith("SETITEM") else ForeignList)
        return True
    return False


def _torch_load(path: str, mapped: bool, weights_only: bool) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols and sparse tensors: what cannot be read is refused in words
        if mapped and not path.endswith(".safetensors"):
            return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        with open(path, "rb") as file:  # torch.load goes by a name that ends so, not by the content; it maps named files only
            return torch.load(file, map_location="cpu", weights_only=weights_only)


def _unpickle(path: str, mapped: bool) -> object:
    """What a trusted file holds; the code that it names is looked for in the working folder too, as `python` does. Raises: Refused."""
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        if mapped or _starts_as_torch(path):
            return _torch_load(path, mapped, False)
        with open(path, "rb") as file:
            found: object = pickle.load(file)
            return found
    except (ImportError, AttributeError) as error:
        raise Refused(f"cannot be unpickled here: {type(error).__name__}: {error}; run where the code that it names can be imported") from None
    except Exception as error:  # noqa: BLE001 -- the file's own code runs, and may raise anything
        raise Refused(f"cannot be unpickled: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _starts_as_torch(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_LEGACY)) == _LEGACY


def _from_program(path: str, key: str | None, status: os.stat_result) -> Checkpoint:
    program = Pt2File(path)
    infos = {name: info for name, info in program.tensors().items() if name in program.saved}
    return _without_wrappers(Checkpoint(path, _keyed(infos, key, "torch.export program"), program.get, "", status, program=program), key)


def _keyed(infos: Mapping[str, TensorInfo], key: str | None, what: str) -> Mapping[str, TensorInfo]:
    """The names that a key leaves, in a file that has no dicts in it. Raises: Refused."""
    if not key:
        return infos
    inside = named_under(infos, key)
    if not inside:
        raise Refused(
            f"is a {what}, which has no dicts in it, and no name begins with '{key}.', so the key {key!r} names nothing there; build without it"
        )
    return {f"{key}.{name}": info for name, info in inside.items()}


def _without_wrappers(checkpoint: Checkpoint, key: str | None = None) -> Checkpoint:
    """The checkpoint under the names that its model had. key: what all names begin with, where it was chosen so."""
    chosen = checkpoint.under(f"{key}.") if key else checkpoint
    names = {name: checkpoint._names[f"{key}.{name}" if key else name] for name in chosen.tensors()}
    plain, prefix = without_wrappers(names)
    return chosen.renamed({name: names[known] for name, known in plain.items()}, prefix)


def _is_cut(path: str) -> bool:
    """Whether the four pickles that open a file of the older form end too early; one that does so in a class's name reads like a foreign class."""
    with open(path, "rb") as file:
        try:
            for _ in range(4):
                deque(pickletools.genops(file), maxlen=0)
        except ValueError:
            return True
    return False


def _unsafe(name: str, message: str) -> str:
    """torch's refusal to unpickle, as one sentence that names the class."""
    if "TorchScript" in message:
        return f"is a TorchScript archive, which holds code; {SAVE}"
    if "Unsupported operand" in message:
        return f"is written with a pickle protocol that is not read as data; save it again with torch.save's own{OR_TRUST}"
    found = re.search(r"GLOBAL ([\w.]+)", message) or re.search(r"class '?([\w.]+)", message)
    if name or found:
        return _pickled(name or found[1])  # type: ignore[index]
    return f"is damaged, or holds more than tensors: {' '.join(message.split())[:200]}"


def _pickled(name: str) -> str:
    return f"holds a pickled {name}, and to load that can run code; {SAVE}{OR_TRUST}"


def _from_safetensors(path: str, key: str | None, status: os.stat_result, header: int) -> Checkpoint:
    if header + 8 > status.st_size:
        raise Refused(f"is truncated: the safetensors header needs {header + 8} bytes, the file has {status.st_size}")
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
        raise Refused(f"is {cut}: the safetensors reader says {words[:200]!r}; copy or download it again") from None
    except (OSError, ValueError) as error:
        raise Refused(f"cannot be read as safetensors: {error}") from None
    if not infos:
        raise Refused("holds no tensors")
    names = {}
    for name, (dtype, shape) in infos.items():
        if dtype not in _SAFETENSORS:
            raise Refused(f"{name} has the dtype {dtype}; known: {', '.join(_SAFETENSORS)}")
        names[name] = TensorInfo(_SAFETENSORS[dtype], shape)
    return _without_wrappers(Checkpoint(path, _keyed(names, key, "safetensors file"), file.get_tensor, "", status), key)


# As the safetensors format spells them -> as torch does.
_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_SAFETENSORS |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"}
_SAFETENSORS |= {"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64"}
