"""Defines `Content`, what a file has, and `Checkpoint`: its state dict, with names, dtype and hash."""

from __future__ import annotations

import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from widepack_artifacts.errors import some
from widepack_artifacts.weights import views

from ..errors import CheckpointError
from ..spec.dtypes import OutOfRange, converted, dense_instead, dtype_name
from .mapped_memory import ShortenedFile, copied, copy_into, plain_copies, shortened
from .member_keys import is_pattern, keys_in, slice_of, stacked, stacked_state
from .plain_file import open_plain
from .pt2_archive import Pt2File
from .state_dict import (
    UNQUANTIZED,
    PickedStateDict,
    RefusedFile,
    TensorInfo,
    info_of,
    is_extra_state,
    named_under,
    pick,
    settings_of,
    without_wrappers,
)
from .zip_records import check_expanded


class Content(NamedTuple):
    """What a file or folder has: each reader of a format returns it.

    value: what torch.save stored, or the tensors by name. files: the paths, with their status when they were
    opened; none for a state dict in memory. kind: what messages call a file that has names of tensors and
    no dicts, such as `a safetensors file`; "" for one with dicts. again: reads the value once more, for
    modules in it. program: the torch.export program of the file, or None. mapped: whether the tensors are
    mapped from the files.
    """

    value: Any
    files: Sequence[tuple[str, os.stat_result]]
    kind: str = ""
    again: Callable[[], object] | None = None
    program: Pt2File | None = None
    mapped: bool = False

    def checkpoint(self, path: str, key: str | None = None) -> Checkpoint:
        """Returns the state dict as a checkpoint.

        path: as the user gave it. key: where the state dict is, see state_dict.py. Raises: RefusedFile.
        """
        tensors, module, versions, settings, extra = self.picked(key)
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided:
                raise RefusedFile(f"{dense_instead(name, tensor.layout)}; then save the checkpoint again")
            if tensor.is_quantized or tensor.device.type != "cpu":
                where = f"on the device {tensor.device}"
                way_out = f". {UNQUANTIZED}" if tensor.is_quantized else ""
                raise RefusedFile(
                    f"{name} is {'quantized' if tensor.is_quantized else where}; widepack reads only dense "
                    f"tensors with data{way_out}"
                )
        lengths = [t.numel() * t.element_size() for t in tensors.values()]
        if self.files:
            check_expanded(lengths, sum(status.st_size for _, status in self.files))
        try:
            extra = plain_copies(dict(extra)) if self.mapped else extra
        except ShortenedFile:
            raise RefusedFile(shortened(self.files)) from None

        def make_module() -> nn.Module:
            assert self.again is not None  # only torch.save stores modules
            try:
                fresh = self._replace(value=self.again()).picked(key).module
            except RefusedFile as refused:
                raise CheckpointError(f"checkpoint {path}: {refused}") from None
            assert fresh is not None  # the first read found it
            return fresh

        found = Checkpoint(
            path,
            {name: info_of(tensor) for name, tensor in tensors.items()},
            tensors.__getitem__,
            self.files,
            mapped=self.mapped,
            module=None if module is None else make_module,
            program=self.program,
            versions=versions,
            settings=settings,
            extra=extra,
        )
        if not self.files:
            found.bytes = sum(lengths)
        return unwrapped(found)

    def picked(self, key: str | None) -> PickedStateDict:
        """Returns the state dict at a key. Raises: RefusedFile."""
        if key is not None and (place := stacked(key)) is not None and place[1] != "*":
            return slice_of(stacked_state(self.value, place[0]), int(place[1]), key)
        if key is not None and is_pattern(key):
            keys = keys_in(self.value, key)
            raise RefusedFile(
                f"has {len(keys)} members at the key {key!r}, and one is needed: give one of {some(keys, 6)}"
            )
        if not self.kind:
            return pick(self.value, key)._replace(settings=settings_of(self.value))
        inside = named_under(self.value, key) if key else self.value
        if key and not inside:
            raise RefusedFile(
                f"is {self.kind}, which has no dicts, and no name in it begins with '{key}.', so the key "
                f"{key!r} names nothing; build without it"
            )
        extra = {name: inside[name] for name in inside if is_extra_state(name)}
        return PickedStateDict({name: inside[name] for name in inside if name not in extra}, extra=extra)


class Checkpoint:
    """One open checkpoint.

    path: as the user gave it. part: its key among several members of one file, or "". bytes: the size of all
    its files; for a state dict in memory that of its tensors. module: makes the pickled module of the file,
    or None. program: the torch.export program of the file, or None. files: the paths, with their status when
    they were opened. versions: of submodules, by the names in the file. settings: the
    hyperparameters that Lightning stored in the file.
    """

    def __init__(
        self,
        path: str,
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], torch.Tensor],
        files: Sequence[tuple[str, os.stat_result]],
        *,
        mapped: bool = False,
        module: Callable[[], nn.Module] | None = None,
        program: Pt2File | None = None,
        versions: Mapping[str, Any] = MappingProxyType({}),
        settings: Mapping[str, Any] = MappingProxyType({}),
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path, self.part = path, ""
        self.module, self.program, self.settings = module, program, settings
        self.files = tuple(files)
        self.bytes = sum(status.st_size for _, status in self.files)
        self.given: Checkpoint | None = None
        # By the names in the file:
        self._infos, self._extra, self._versions = dict(infos), dict(extra), versions
        self._names = {name: name for name in (*infos, *extra)}
        self._read, self._mapped = read, mapped
        self._dtype: torch.dtype | None = None
        self._values: Mapping[str, Callable[[], torch.Tensor]] = {}  # by the names in the file
        self._sha256 = ""

    @property
    def label(self) -> str:
        """The path, with the key among several members of the file: `ens.pt:models.3`."""
        return f"{self.path}:{self.part}" if self.part else self.path

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self._names)} tensors, {self.bytes} bytes)"

    def tensors(self) -> dict[str, TensorInfo]:
        """Returns the dtype and shape of each tensor by name, in the file's order. It reads no weights."""
        stored = {name: s for name, s in self._names.items() if s in self._infos}
        return {name: self._converted(self._infos[s]) for name, s in stored.items()}

    def extra_state(self) -> dict[str, Any]:
        """Returns what `get_extra_state` of the modules returned, by name, as the file has it.

        Numbers and texts beside the weights are in it until a model leaves them out.
        """
        return {name: self._extra[stored] for name, stored in self._names.items() if stored in self._extra}

    @property
    def names(self) -> dict[str, str]:
        """The names of all tensors and extra states, each with its name in the file."""
        return dict(self._names)

    def stored_names(self) -> tuple[list[str], list[str]]:
        """Returns the names in the file that are in use, and those that were left out."""
        if self.given is not None:
            return self.given.stored_names()
        used = set(self._names.values())
        return list(used), [name for name in (*self._infos, *self._extra) if name not in used]

    def _converted(self, info: TensorInfo) -> TensorInfo:
        if self._dtype is None or not is_floating(info.dtype):
            return info
        return TensorInfo(dtype_name(self._dtype), info.shape)

    def get(self, name: str) -> torch.Tensor:
        """Returns one tensor on the CPU; do not write into it.

        A tensor of a mapped file is copied, so that a file that becomes shorter is an error.
        Raises: KeyError; CheckpointError for such a file, or for a number that the dtype of `as_dtype` cannot
        represent.
        """
        if (value := self._values.get(self._names.get(name, ""))) is not None:
            return value()
        return self._in_dtype(name, self._in_memory(self._stored(name)))

    def first_numbers(self, name: str, most: int = 1024) -> torch.Tensor:
        """Returns the first numbers of one tensor. Of a contiguous one in a mapped file, only these are read.

        Raises: as for `get`.
        """
        if self._names.get(name, "") in self._values or not (stored := self._stored(name)).is_contiguous():
            return self.get(name).reshape(-1)[:most]
        return self._in_dtype(name, self._in_memory(stored.view(-1)[:most]))

    def copy_into(self, target: torch.Tensor, name: str) -> None:
        """Copies one tensor into another one. Raises: as for `get`."""
        made = self._dtype is not None or self._names.get(name, "") in self._values
        if made or not self._mapped:
            target.copy_(self.get(name))
            return
        with self._naming():
            copy_into(target, self._stored(name))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Names the file that became shorter. Raises: CheckpointError."""
        try:
            yield
        except ShortenedFile:
            raise CheckpointError(f"checkpoint {self.path}: {shortened(self.files)}") from None

    def _stored(self, name: str) -> torch.Tensor:
        """Returns one tensor as the file has it, mapped if the file allows. Raises: KeyError."""
        if name not in self._names or self._names[name] not in self._infos:
            raise KeyError(name)
        return self._read(self._names[name]).detach()

    def _in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._naming():
            return copied(tensor) if self._mapped else tensor

    def _in_dtype(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.resolve_conj().resolve_neg()
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        try:
            return converted(tensor, self._dtype)
        except OutOfRange as e:
            raise CheckpointError(f"checkpoint {self.path}: {name} {e}") from e

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, as `get` returns them, and the extra state."""
        return self.versioned({name: self.get(name) for name in self.tensors()})

    def mapped_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns what `state_dict` does, with tensors that stay mapped. It is for code that reads sizes."""
        tensors = {name: self._stored(name) for name in self.tensors()}
        return self.versioned({name: self._in_dtype(name, t) for name, t in tensors.items()})

    def versioned(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Returns tensors as `nn.Module.state_dict` does, with the extra state and the submodules' versions.

        Some modules load older weights by these versions.
        """
        state: dict[str, Any] = OrderedDict({**tensors, **self.extra_state()})
        if versions := self.versions():
            # `load_state_dict` reads it there, and writes into it.
            metadata = OrderedDict((path, dict(row)) for path, row in versions.items())
            vars(state)["_metadata"] = metadata
        return state

    def versions(self) -> dict[str, Any]:
        """Returns what `nn.Module.state_dict` stored of the submodules, by their names in the model."""
        if not self._versions:
            return {}
        if all(name == stored for name, stored in self._names.items()):
            return dict(self._versions)
        places: dict[str, str] = {}
        for name, stored in self._names.items():
            ours, theirs = name.split("."), stored.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                ours, theirs = ours[:-1], theirs[:-1]
                places.setdefault(".".join(ours), ".".join(theirs))
        self._add_places_without_tensors(places)
        return {path: self._versions[stored] for path, stored in places.items() if stored in self._versions}

    def _add_places_without_tensors(self, places: dict[str, str]) -> None:
        """Adds the submodules that have no tensor, below the nearest module that has one.

        places: the stored name of each module, by its name in the model.
        """
        used, inside = set(places.values()), {stored: name for name, stored in reversed(places.items())}
        for stored in self._versions:
            above = stored
            while above and above not in inside:
                above = above.rpartition(".")[0]
            if stored not in used and above in inside:
                name = f"{inside[above]}.{stored[len(above) :].lstrip('.')}".strip(".")
                if not any(v.startswith(f"{stored}.") for v in used):
                    places.setdefault(name, stored)

    def unstripped(self) -> Checkpoint:
        """Returns the same checkpoint with the names of the file."""
        return self.renamed({name: name for name in (*self._infos, *self._extra)})

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Returns the same checkpoint under other names.

        names: `{name: the name in the file}`; other tensors and extra states are left out.
        """
        return self._with(_names=dict(names))

    def under(self, prefix: str) -> Checkpoint:
        """Returns the tensors whose names begin with a prefix, under names without it."""
        inside = {name: stored for name, stored in self._names.items() if name.startswith(prefix)}
        return self.renamed({name[len(prefix) :]: stored for name, stored in inside.items()})

    def with_values(self, values: Mapping[str, Callable[[], torch.Tensor]]) -> Checkpoint:
        """Returns the same checkpoint with other values of some tensors.

        values: makes each value, of the tensor's shape and dtype, by its name.
        """
        return self._with(_values={self._names[name]: value for name, value in values.items()})

    def as_dtype(self, dtype: torch.dtype) -> Checkpoint:
        """Returns the same checkpoint with all floating tensors in one dtype."""
        return self._with(_dtype=dtype)

    def as_loaded(
        self,
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], torch.Tensor],
        extra: Mapping[str, Any],
        versions: Mapping[str, Any],
    ) -> Checkpoint:
        """Returns the state of a module that has loaded this checkpoint.

        infos, read: of its weights, by name. extra, versions: of its submodules.
        """
        return self._with(
            given=self.given or self,
            _infos=dict(infos),
            _names={name: name for name in (*infos, *extra)},
            _read=read,
            _mapped=False,
            _extra=dict(extra),
            _versions=dict(versions),
            _dtype=None,
            _values={},
        )

    def converted(self, infos: Mapping[str, TensorInfo], read: Callable[[str], torch.Tensor]) -> Checkpoint:
        """Returns other weights that were made of this checkpoint's, before a module loads them.

        infos, read: of these weights, by name.
        """
        names = {name: name for name in (*infos, *self.extra_state())}
        return self._with(
            _infos=dict(infos),
            _names=names,
            _read=read,
            _mapped=False,
            _extra=self.extra_state(),
            _versions={},
            _dtype=None,
            _values={},
        )

    @property
    def replaced(self) -> dict[str, torch.Tensor]:
        """The values that `with_values` has replaced, by name."""
        return {name: self._values[s]() for name, s in self._names.items() if s in self._values}

    def _with(self, **attributes: Any) -> Checkpoint:
        """Returns a copy with other attributes."""
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def sha256(self) -> str:
        """Returns the file's SHA-256 as 64 hex digits. The file is read on the first call.

        For several files it is the SHA-256 of the lines `<sha256>  <file name>\\n`, in order. For a state
        dict in memory it is that of its names, dtypes, shapes and bytes.
        Raises: CheckpointError if a file changed after it was opened.
        """
        if not self._sha256 and not self.files:
            digest = hashlib.sha256()
            for name, info in self._infos.items():
                digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
                for piece in views(self._read(name)):
                    digest.update(piece)
            self._sha256 = digest.hexdigest()
        if not self._sha256:
            digests = [(_sha256(path, status), os.path.basename(path)) for path, status in self.files]
            lines = "".join(f"{digest}  {name}\n" for digest, name in digests)
            self._sha256 = digests[0][0] if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest()
        return self._sha256


def _sha256(path: str, opened: os.stat_result) -> str:
    digest = hashlib.sha256()
    try:
        with open_plain(path) as file:
            now = os.fstat(file.fileno())
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: cannot be read: {error.strerror or error}") from None
    except RefusedFile as refused:
        raise CheckpointError(f"checkpoint {path}: {refused}") from None
    if _identity(now) != _identity(opened):
        raise CheckpointError(
            f"checkpoint {path}: was changed or replaced after it was opened;"
            " build again when no process writes to it"
        )
    return digest.hexdigest()


def is_floating(dtype: str) -> bool:
    """Returns whether a dtype's name is that of floating numbers."""
    return dtype.startswith(("float", "bfloat"))


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint under the names of its model, without those of wrappers."""
    names = checkpoint.names
    return checkpoint.renamed({name: names[known] for name, known in without_wrappers(names).items()})
