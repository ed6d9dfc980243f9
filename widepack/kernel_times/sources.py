"""Finds the kernel times of this machine.

The first of these that exists counts:

1. the profile that the environment variable WIDEPACK_KERNEL_TIMES names: a shipped one, such as
   `amd-epyc-avx512`, or the path of a file
2. what `widepack calibrate` measured here, for this processor, version of torch and number of threads
3. the shipped profile of this processor
4. the shipped profile of a processor with the same instructions, else of any

Measured profiles are files in the user's cache. A file that other users could have written does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from ..errors import UsageError, WidepackError
from ..system.machine import name_of
from ..system.private_files import make_private_folder, private_folder, read_private
from ..system.user_cache import cache_folder
from .profile import Profile

VARIABLE = "WIDEPACK_KERNEL_TIMES"
_MOST_BYTES = 1 << 20


def profile_here() -> Profile:
    """Returns the kernel times of this machine, for torch's current number of threads.

    Raises:
        UsageError: The environment variable names no profile.
    """
    return _found(os.environ.get(VARIABLE, ""), str(_folder()), name_of("cpu"), torch.get_num_threads())


@cache
def _found(named: str, folder: str, machine: str, threads: int) -> Profile:
    if named:
        return _named(named)
    measured = _read(Path(folder) / _file_name(machine, threads))
    if measured is not None:
        return measured

    def distance(profile: Profile) -> tuple[bool, bool, int]:
        same = profile.machine == machine
        return not same, _instructions(profile.machine) != _instructions(machine), profile.threads != threads

    return min(shipped().values(), key=distance)


def forget() -> None:
    """Forgets which profile counts: the files or the environment have changed."""
    _found.cache_clear()


def keep(profile: Profile) -> Path:
    """Stores a profile that was measured on this machine, and returns its file.

    Raises:
        UsageError: Other users may write into the folder.
        OSError: The file cannot be written.
    """
    place = make_private_folder(_folder()) / _file_name(profile.machine, profile.threads)
    temporary = place.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        temporary.write_text(written(profile), encoding="utf-8")
        temporary.chmod(0o600)
        os.replace(temporary, place)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    forget()
    return place


def written(profile: Profile) -> str:
    """Returns a profile as the text of a file: a line for each part."""
    parts = (f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in profile.to_json().items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


@cache
def shipped() -> dict[str, Profile]:
    """Returns the profiles that are part of the package, by name."""
    files = resources.files(__package__).joinpath("profiles").iterdir()
    named = {f.name.removesuffix(".json"): f for f in files if f.name.endswith(".json")}
    return {
        name: Profile.from_json(strict_json.parse(named[name].read_bytes(), name)) for name in sorted(named)
    }


def _folder() -> Path:
    return cache_folder() / "kernel-times"


def _file_name(machine: str, threads: int) -> str:
    """Returns the name of the file of a machine, this version of torch, and a number of threads."""
    key = "\n".join([machine, torch.__version__, str(threads)])
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def measured_here() -> Profile | None:
    """Returns what `widepack calibrate` measured here, for torch's number of threads; None if it did not."""
    return _read(_folder() / _file_name(name_of("cpu"), torch.get_num_threads()))


def _read(place: Path) -> Profile | None:
    """Returns a stored profile; None if there is none that only this user could have written."""
    with contextlib.suppress(OSError, WidepackError):
        data = read_private(private_folder(place.parent) / place.name, _MOST_BYTES)
        return Profile.from_json(strict_json.parse(data, str(place)))
    return None


def _named(name: str) -> Profile:
    if name in shipped():
        return shipped()[name]
    try:
        data = Path(name).read_bytes()
    except OSError as e:
        raise UsageError(
            f"{VARIABLE}={name}: this is no file ({e.strerror or e}) and no profile of the package. "
            f"Known: {', '.join(shipped())}. `widepack calibrate -o FILE` writes a file."
        ) from e
    try:
        return Profile.from_json(strict_json.parse(data, name))
    except ArtifactError as e:
        raise UsageError(f"{VARIABLE}={name}: {e}. `widepack calibrate -o FILE` writes a file.") from e


def _instructions(machine: str) -> str:
    """Returns the instructions of a machine's name: `AVX512` of `AMD EPYC, AVX512`."""
    return machine.rpartition(", ")[2]
