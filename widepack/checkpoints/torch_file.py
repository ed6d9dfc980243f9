"""Reads files of torch.save: as data, with placeholders for objects of other classes, or by trusted
unpickling.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import sys
import warnings
from collections import deque
from functools import partial

import torch

from .checkpoint import Content
from .plain_file import opened_once
from .state_dict import OR_TRUST, SAVE, Foreign, ForeignDict, ForeignList, RefusedFile, stands_for
from .zip_records import is_compressed, record_start, records_of, storages_of, text_record

# The first bytes of every file in torch.save's older format, pickled with protocol 2.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
ZIP = b"PK\x03\x04"
_MOST_CLASSES = 200  # of a file whose other objects are skipped
_NEVER = ("torch.jit._pickle.restore_type_tag",)
_CUT = "is truncated or damaged; copy or download it again"


def read_torch_file(path: str, status: os.stat_result, start: bytes, trust: bool) -> Content:
    """Reads a file of torch.save or pickle. The weights of a zip file are mapped unless they are compressed.

    The file is opened by its name once: its records are checked in the file that torch then reads.

    status: of the file that was looked at. start: its first bytes. trust: whether to run the code that it
    names. Raises: RefusedFile.
    """
    try:
        with opened_once(path, status) as same:
            mapped = start.startswith(ZIP) and can_be_mapped(same, status.st_size)
            value = _load(same, start, mapped, trust)
    except OSError as error:
        raise RefusedFile(f"cannot be read: {error.strerror or error}") from None
    if isinstance(value, Foreign):
        raise RefusedFile(_pickled(value.name))
    # A module is read into memory: its code would read mapped numbers of a file that may become shorter.
    again = partial(_load, path, start, False, trust)
    return Content(value, [(path, status)], again=again, mapped=mapped)


def can_be_mapped(path: str, size: int) -> bool:
    """Checks the records of a zip file of torch.save against its pickle.

    Returns: whether all weights are stored uncompressed. Otherwise torch must decompress them.
    Raises: RefusedFile.
    """
    records = records_of(path, size)
    root = next(iter(records), "").partition("/")[0]
    pickled = records.get(f"{root}/data.pkl")
    if pickled is None:
        return True  # torch.load then says what the file is
    needed = dict.fromkeys(storages_of(text_record(path, pickled)))
    mapped = True
    with open(path, "rb") as file:
        for record, length in needed:
            entry = records.get(f"{root}/data/{record}")
            if entry is None:
                raise RefusedFile(
                    f"is truncated or damaged: it has no record data/{record[:40]}; copy or download it again"
                )
            if entry.file_size < length:
                raise RefusedFile(
                    f"is truncated or damaged: a tensor needs {length} bytes, its record data/{record[:40]}"
                    f" has {entry.file_size}; copy or download it again"
                )
            if is_compressed(entry):
                mapped = False
            else:
                record_start(file, entry, size)
    return mapped


def _load(path: str, start: bytes, mapped: bool, trust: bool) -> object:
    """Returns the content of a file, with `Foreign` in place of objects of other classes; trust: with these
    objects.
    """
    if trust and not start.startswith((LEGACY, ZIP)):
        return _unpickle(path, start, mapped)
    foreign: dict[str, type[Foreign]] = {}
    while True:
        try:
            with torch.serialization.safe_globals([(stands, name) for name, stands in foreign.items()]):
                return _torch_load(path, mapped, True)
        except pickle.UnpicklingError as error:
            message = str(error)
            if start.startswith(LEGACY) and not foreign and _is_cut(path):
                raise RefusedFile(_CUT) from None
            if trust:
                return _unpickle(path, start, mapped)
            if not _add_placeholder(foreign, message):
                raise RefusedFile(_unsafe(next(iter(foreign), ""), message)) from None
        except Exception as error:  # noqa: BLE001  # torch.load raises any error for a damaged file
            if foreign:
                raise RefusedFile(_pickled(next(iter(foreign)))) from None
            raise RefusedFile(f"{_CUT} (torch says {' '.join(str(error).split())[:200]!r})") from None


def _add_placeholder(foreign: dict[str, type[Foreign]], message: str) -> bool:
    """Adds a placeholder for the class at which the unpickler stopped, or makes it a dict or a list.

    Returns: whether a placeholder was added or changed.
    """
    if unknown := re.search(r"Unsupported global: GLOBAL (\S+)", message):
        name = unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}"
        if name in foreign or len(foreign) >= _MOST_CLASSES or name in _NEVER:
            return False
        foreign[name] = stands_for(name)
        return True
    if filled := re.search(r"Can only (SETITEMS?|append|extend).* got <class '([^']+)'>", message):
        name = filled[2]
        if name in foreign and not issubclass(foreign[name], (ForeignDict, ForeignList)):
            foreign[name] = stands_for(name, ForeignDict if filled[1].startswith("SETITEM") else ForeignList)
            return True
    return False


def _torch_load(path: str, mapped: bool, weights_only: bool) -> object:
    with warnings.catch_warnings():
        # Warnings of pickle protocols and sparse tensors: a file that cannot be read raises RefusedFile.
        warnings.simplefilter("ignore")
        if mapped and not path.endswith(".safetensors"):
            return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        # torch.load chooses by the suffix and not by the content, so it gets an open file; only named files
        # are mapped.
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=weights_only)


def _unpickle(path: str, start: bytes, mapped: bool) -> object:
    """Returns the content of a trusted file.

    Its code is imported from the working folder too. Raises: RefusedFile.
    """
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        if start.startswith((LEGACY, ZIP)):
            return _torch_load(path, mapped, False)
        with open(path, "rb") as file:
            content: object = pickle.load(file)
            return content
    except (ImportError, AttributeError) as error:
        raise RefusedFile(
            f"cannot be unpickled here: {type(error).__name__}: {error};"
            " run widepack where the code that the file names can be imported"
        ) from None
    except Exception as error:  # noqa: BLE001  # the file's code may raise anything
        raise RefusedFile(
            f"cannot be unpickled: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from None
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _is_cut(path: str) -> bool:
    """Returns whether the four pickles at the start of a file in the older format end too early.

    A pickle that ends inside the name of a class looks like an object of another class.
    """
    with open(path, "rb") as file:
        try:
            for _ in range(4):
                deque(pickletools.genops(file), maxlen=0)
        except ValueError:
            return True
    return False


def _unsafe(name: str, message: str) -> str:
    """Returns torch's refusal to unpickle as one sentence that names the class."""
    if "TorchScript" in message:
        return f"is a TorchScript archive, which contains code; {SAVE}"
    if "Unsupported operand" in message:
        return (
            "is written with a pickle protocol that cannot be read as data; save it again with torch.save's "
            f"default protocol{OR_TRUST}"
        )
    named = re.search(r"GLOBAL ([\w.]+)", message) or re.search(r"class '?([\w.]+)", message)
    if name or named:
        return _pickled(name or named[1])  # type: ignore[index]
    return f"is damaged, or has more than tensors: {' '.join(message.split())[:200]}"


def _pickled(name: str) -> str:
    return f"has a pickled {name}, and loading it can run code; {SAVE}{OR_TRUST}"
