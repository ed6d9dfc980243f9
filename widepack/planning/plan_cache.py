"""Stores plans that were measured on this machine, or predicted for it at a load, in the user's cache: one
small file for each entry and pattern.

    <cache>/widepack/plans/<key>.json      [{"program": ..., "plan": ...}, ...]

A file has one row for each batch class and number of threads. The key is a hash of the artifact's digest, the
entry, the pattern, the machine (or the kernel times of a prediction), and the versions of torch and
widepack. A file that cannot be read, or that other users could have written, is ignored. Then the artifact's
own plans run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program

from ..errors import UsageError, WidepackError
from ..system.machine import name_of
from ..system.private_files import make_private_folder, private_folder, read_private
from ..system.user_cache import cache_folder
from ..version import __version__
from .plan import Plan, nearest_threads

_MOST_BYTES = 64 * 2**20


def folder() -> Path:
    """Returns the folder of measured plans. `WIDEPACK_PLANS` names another one."""
    chosen = os.environ.get("WIDEPACK_PLANS")
    return Path(chosen) if chosen else cache_folder() / "plans"


def _file_of(digest: str, entry: str, pattern: str, device: str, predicted: str) -> Path:
    """Returns the file of an entry and a pattern."""
    machine = predicted or name_of(device)
    key = "\n".join([digest, entry, pattern, machine, torch.__version__, __version__])
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def find(
    digest: str, entry: str, pattern: str, device: str, predicted: str = ""
) -> list[tuple[Program, Plan]]:
    """Returns the measured wide programs and plans, smallest batch first; empty if none were measured on this
    machine.

    They are those of the number of threads nearest to torch's current number. predicted: names kernel times;
    then the programs and plans are those that were predicted by them.
    """
    rows = _read(_file_of(digest, entry, pattern, device, predicted))
    return nearest_threads([((program, plan), plan.threads) for program, plan in rows])


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time read and write the files of the folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(place: Path) -> list[tuple[Program, Plan]]:
    """Returns the rows of a file; empty if it does not exist, is damaged, or is not private."""
    try:
        data = read_private(private_folder(folder()) / place.name, _MOST_BYTES)
        rows = strict_json.parse(data, str(place))
        return [(Program.from_json(r["program"]), Plan.from_json(r["plan"])) for r in rows]
    except (OSError, WidepackError, KeyError, TypeError, ValueError):
        return []


def carry(before: str, after: str, entry: str, pattern: str, device: str) -> bool:
    """Copies the measured plans of one artifact to another one with the same programs.

    Returns whether any existed. Raises: as `keep`.
    """
    rows = _read(_file_of(before, entry, pattern, device, ""))
    if rows:
        keep(after, entry, pattern, device, rows)
    return bool(rows)


def keep(
    digest: str,
    entry: str,
    pattern: str,
    device: str,
    rows: Sequence[tuple[Program, Plan]],
    predicted: str = "",
) -> Path:
    """Stores measured plans. They replace plans that were measured with the same number of threads.

    predicted: as `find` takes it. Returns the file.
    Raises: OSError; UsageError if other users may write into the folder.
    """
    place = _file_of(digest, entry, pattern, device, predicted)
    # `find` would ignore a file in a folder where others may write
    place = make_private_folder(place.parent) / place.name
    with _lock(place.parent):
        return _write(place, rows)


def check_writable() -> None:
    """Checks that plans can be stored. Raises: UsageError with the folder and the reason."""
    place = folder()
    try:
        place = make_private_folder(place)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".tmp-"):
            pass
    except OSError as e:
        raise UsageError(
            f"{place}: measured plans cannot be stored here: {e.strerror or e}.\n"
            "Set WIDEPACK_PLANS to a folder that this user can write, or publish the plans in the artifact "
            "with write=True (--write)."
        ) from e


def _write(place: Path, rows: Sequence[tuple[Program, Plan]]) -> Path:
    """Writes rows into a file, in place of its rows with the same number of threads. Returns the file."""
    other = [
        (program, plan) for program, plan in _read(place) if plan.threads not in {p.threads for _, p in rows}
    ]
    data = json.dumps(
        [{"program": program.to_json(), "plan": plan.to_json()} for program, plan in (*other, *rows)]
    )
    temporary = place.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        temporary.write_text(data, encoding="utf-8")
        temporary.chmod(0o600)
        os.replace(temporary, place)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return place
