"""Defines `Checkpoint`, an open checkpoint: its names, tensors, dtype and hash."""

from __future__ import annotations

import copy
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..spec.dtypes import OutOfRange, converted
from .plain_file import open_plain
from .pt2_archive import Pt2File
from .state_dict import RefusedFile, TensorInfo, named_under, without_wrappers


class Checkpoint:
    """One open checkpoint.

    path: as the user gave it. bytes: the size of all its files. prefix: the text that was removed from every
    name, or "". module: makes the pickled module of the file, or None. program: the torch.export program of
    the file, or None. files: the paths, with their status when they were opened. versions: of submodules, by
    the names in the file. settings: the hyperparameters that Lightning stored in the file.
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
    ) -> None:
        self.path = path
        self.prefix = prefix
        self.module = module
        self.program = program
        self.settings = settings
        self._versions = versions
        self.files = tuple(files) or ((path, status),)
        self.bytes = sum(found.st_size for _, found in self.files)
        self._infos = {prefix + name: info for name, info in names.items()}  # by the names in the file
        self._names = {name: prefix + name for name in names}
        self._read = read
        self._dtype: torch.dtype | None = None
        self._values: Mapping[str, Callable[[], torch.Tensor]] = {}  # by the names in the file
        self._sha256 = ""

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self._names)} tensors, {self.bytes} bytes)"

    def tensors(self) -> dict[str, TensorInfo]:
        """Returns the dtype and shape of each tensor by name, in the file's order. It reads no weights."""
        return {name: self._converted(self._infos[stored]) for name, stored in self._names.items()}

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
        if name not in self._names:
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
        """Returns all tensors by name, as `get` returns them."""
        return self.versioned({name: self.get(name) for name in self._names})

    def versioned(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors as `nn.Module.state_dict` does, with the versions of the submodules in the
        file.

        Some modules load older weights by these versions.
        """
        state = OrderedDict(tensors)
        if self._versions:
            plain = {
                name.removeprefix(self.prefix) if name != self.prefix.removesuffix(".") else "": v
                for name, v in self._versions.items()
            }
            vars(state)["_metadata"] = OrderedDict(plain)  # where `load_state_dict` reads it
        return state

    def stored_name(self, name: str) -> str:
        """Returns the name in the file. Raises: KeyError."""
        return self._names[name]

    def unstripped(self) -> Checkpoint:
        """Returns the same checkpoint with the names of the file."""
        return self.renamed({name: name for name in self._infos})

    def renamed(self, names: Mapping[str, str], prefix: str = "") -> Checkpoint:
        """Returns the same checkpoint under other names.

        names: `{name: the name in the file}`; other tensors are left out.
        """
        return self._with(_names=dict(names), prefix=prefix)

    def under(self, prefix: str) -> Checkpoint:
        """Returns the tensors whose names begin with a prefix, under names without it."""
        return self.renamed(
            {name[len(prefix) :]: stored for name, stored in self._names.items() if name.startswith(prefix)},
            self.prefix,
        )

    def with_values(self, values: Mapping[str, Callable[[], torch.Tensor]]) -> Checkpoint:
        """Returns the same checkpoint with other values of some tensors.

        values: makes each value, of the tensor's shape and dtype, by its name.
        """
        return self._with(_values={self._names[name]: value for name, value in values.items()})

    def as_dtype(self, dtype: torch.dtype) -> Checkpoint:
        """Returns the same checkpoint with all floating tensors in one dtype."""
        return self._with(_dtype=dtype)

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
    names = {name: checkpoint.stored_name(f"{key}.{name}" if key else name) for name in chosen.tensors()}
    plain, prefix = without_wrappers(names)
    return chosen.renamed({name: names[known] for name, known in plain.items()}, prefix)
