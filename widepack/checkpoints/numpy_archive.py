"""Reads archives of `numpy.savez` as data: arrays of numbers by name. No object is unpickled."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import torch

from .checkpoint import Checkpoint, at_key, unwrapped
from .state_dict import SAVE, RefusedFile, as_tensor, info_of
from .zip_records import check_expanded, records_of

_END = ".npy"


def is_npz(path: str, size: int) -> bool:
    """Returns whether a zip file is an archive of NumPy. Raises: RefusedFile for a damaged file."""
    names = list(records_of(path, size))
    return bool(names) and all(name.endswith(_END) for name in names)


def from_npz(path: str, key: str | None, status: os.stat_result) -> Checkpoint:
    """Opens an archive of NumPy. key: the prefix of names to select. Raises: RefusedFile."""
    try:
        import numpy as np
    except ImportError:
        raise RefusedFile(f"is a NumPy archive (.npz), and NumPy is not installed; {SAVE}") from None
    records = records_of(path, status.st_size)
    check_expanded((entry.file_size for entry in records.values()), status.st_size)
    tensors: dict[str, torch.Tensor] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                array: Any = archive[name]
                tensor = as_tensor(array)
                if tensor is None:
                    raise RefusedFile(f"{name} is an array of {array.dtype}, which torch does not have")
                tensors[name] = tensor
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
        words = " ".join(str(e).split())[:200]
        raise RefusedFile(f"cannot be read as a NumPy archive: {words}") from None
    if not tensors:
        raise RefusedFile("has no arrays")
    infos = {name: info_of(tensor) for name, tensor in tensors.items()}
    found = Checkpoint(path, at_key(infos, key, "NumPy archive"), tensors.__getitem__, "", status)
    return unwrapped(found, key)
