"""Defines `Checkpoint`, an open checkpoint: its names, tensors, dtype and hash."""

from __future__ import annotations

import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..spec.dtypes import OutOfRange, converted
from .plain_file import open_plain
from .pt2_archive import Pt2File
from .state_dict import RefusedFile, TensorInfo, is_extra_state, named_under, without_wrappers


class Checkpoint:
    """One open checkpoint.

    path: as the user gave it. part: its key among several members of one file, or "". bytes: the size of all
    its files. prefix: the text that was removed from every name, or "". module: makes the pickled module of
    the file, or None. program: the torch.export program of the file, or None. files: the paths, with their
    status when they were opened. versions: of submodules, by the names in the file. settings: the
    hyperparameters that Lightning stored in the file.
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
        settings: Mapping[str, Any] = MappingProxyType({}),
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.path = path
        self.part = ""
        self.prefix = prefix
        self.module = module
        self.program = program
        self.settings = settings
        self._versions = versions
        self.files = tuple(files) or ((path, status),)
        self.bytes = sum(found.st_size for _, found in self.files)
        self.given: Checkpoint | None = None
        # By the names in the file:
        self._infos = {prefix + name: info for name, info in names.items() if not is_extra_state(name)}
        self._extra: dict[str, Callable[[], Any]] = {
            prefix + name: partial(read, prefix + name) for name in names if is_extra_state(name)
        }
        self._extra |= {prefix + name: partial(_itself, value) for name, value in extra.items()}
        self._names = {name: prefix + name for name in (*names, *extra)}
        self._read = read
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
        return {
            name: self._converted(self._infos[stored])
            for name, stored in self._names.items()
            if stored in self._infos
        }

    def extra_state(self) -> dict[str, Any]:
        """Returns what `get_extra_state` of the modules returned, by name, as the file has it."""
        return {name: self._extra[stored]() for name, stored in self._names.items() if stored in self._extra}

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
        return (
            info
            if self._dtype is None or not is_floating(info.dtype)
            else TensorInfo(str(self._dtype).removeprefix("torch."), info.shape)
        )

    def get(self, name: str) -> torch.Tensor:
        """Returns one tensor on the CPU, mapped if the file allows; do not write into it.

        Raises: KeyError; CheckpointError for a number that the dtype of `as_dtype` cannot represent.
        """
        if name not in self._names or self._names[name] not in self._infos:
            raise KeyError(name)
        if (value := self._values.get(self._names[name])) is not None:
            return value()
        tensor = self._read(self._names[name]).detach()
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        try:
            return converted(tensor, self._dtype)
        except OutOfRange as e:
            raise CheckpointError(f"checkpoint {self.path}: {name} {e}") from e

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, as `get` returns them, and the extra state."""
        return self.versioned({name: self.get(name) for name in self.tensors()})

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

    def stored_name(self, name: str) -> str:
        """Returns the name in the file. Raises: KeyError."""
        return self._names[name]

    def unstripped(self) -> Checkpoint:
        """Returns the same checkpoint with the names of the file."""
        return self.renamed({name: name for name in (*self._infos, *self._extra)})

    def renamed(self, names: Mapping[str, str], prefix: str = "") -> Checkpoint:
        """Returns the same checkpoint under other names.

        names: `{name: the name in the file}`; other tensors and extra states are left out.
        """
        return self._with(_names=dict(names), prefix=prefix)

    def under(self, prefix: str) -> Checkpoint:
        """Returns the tensors whose names begin with a prefix, under names without it."""
        return self.renamed(
            {name[len(prefix) :]: stored for name, stored in self._names.items() if name.startswith(prefix)},
            self.prefix,
        )

    def sliced(self, number: int) -> Checkpoint:
        """Returns one member of a stack: `[number]` of every tensor."""
        infos = {name: info._replace(shape=info.shape[1:]) for name, info in self._infos.items()}
        return self._with(_infos=infos, _read=lambda name: self._read(name)[number])

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
            prefix="",
            _infos=dict(infos),
            _names={name: name for name in (*infos, *extra)},
            _read=read,
            _extra={name: partial(_itself, value) for name, value in extra.items()},
            _versions=dict(versions),
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

        For several files it is the SHA-256 of the lines `<sha256>  <file name>\\n`, in order.
        Raises: CheckpointError if a file changed after it was opened.
        """
        if not self._sha256:
            found = [(_sha256(path, status), os.path.basename(path)) for path, status in self.files]
            lines = "".join(f"{digest}  {name}\n" for digest, name in found)
            self._sha256 = found[0][0] if len(found) == 1 else hashlib.sha256(lines.encode()).hexdigest()
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


def _itself(value: Any) -> Any:
    return value


def at_key(infos: Mapping[str, TensorInfo], key: str | None, what: str) -> Mapping[str, TensorInfo]:
    """Returns the tensors under a key, in a file without dicts. what: the kind of file.

    Raises: RefusedFile.
    """
    if not key:
        return infos
    inside = named_under(infos, key)
    if not inside:
        raise RefusedFile(
            f"is a {what}, which has no dicts, and no name in it begins with '{key}.',"
            f" so the key {key!r} names nothing; build without it"
        )
    return {f"{key}.{name}": info for name, info in inside.items()}


def unwrapped(checkpoint: Checkpoint, key: str | None = None) -> Checkpoint:
    """Returns the checkpoint under the names of its model, without those of wrappers. key: the prefix to
    select.
    """
    chosen = checkpoint.under(f"{key}.") if key else checkpoint
    names = chosen.names
    plain, prefix = without_wrappers(names)
    return chosen.renamed({name: names[known] for name, known in plain.items()}, prefix)
