"""Plans that were measured on this machine and not written into their artifact: one small file each in the user's cache.

    <cache>/widepack/plans/<key>.json      [{"program": ..., "plan": ...}, ...], one a batch class and number of threads

The key is of the artifact's digest, the entry, the pattern, the machine, and the versions of torch and widepack. A file that cannot be read, or that others could have written, counts
as absent: the artifact's own plans run then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program

from ..system.compiled_cache import private
from ..errors import WidepackError
from ..system.machine import name_of
from .plan import Plan, nearest_threads
from ..version import __version__

_MOST_BYTES = 64 * 2**20


def folder() -> Path:
    """Where measured plans are kept; `WIDEPACK_PLANS` names another place."""
    named = os.environ.get("WIDEPACK_PLANS")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widepack" / "plans"


def _place(digest: str, entry: str, pattern: str, device: str) -> Path:
    key = "\n".join([digest, entry, pattern, name_of(device), torch.__version__, __version__])
    return folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def find(digest: str, entry: str, pattern: str, device: str) -> list[tuple[Program, Plan]]:
    """The wide programs and plans of the number of threads nearest to torch's, least batch first; empty where none were measured here."""
    return nearest_threads([((program, plan), plan.threads) for program, plan in _read(_place(digest, entry, pattern, device))])


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time reads what is there and writes it with its own."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(place: Path) -> list[tuple[Program, Plan]]:
    try:
        private(folder(), folder=True)
        private(place)
        with open(place, "rb") as file:
            rows = strict_json.parse(file.read(_MOST_BYTES), str(place))
        return [(Program.from_json(r["program"]), Plan.from_json(r["plan"])) for r in rows]
    except (OSError, WidepackError, KeyError, TypeError, ValueError):
        return []


def carry(before: str, after: str, entry: str, pattern: str, device: str) -> bool:
    """Keep what was measured for one artifact for another one too, whose programs are the same. Returns: whether there was anything. Raises: as `keep`."""
    rows = _read(_place(before, entry, pattern, device))
    if rows:
        keep(after, entry, pattern, device, rows)
    return bool(rows)


def keep(digest: str, entry: str, pattern: str, device: str, rows: Sequence[tuple[Program, Plan]]) -> Path:
    """Keep what was measured, in the place of what was measured with as many threads. Returns: the file. Raises: OSError; UsageError where others may write into the folder."""
    place = _place(digest, entry, pattern, device)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    private(place.parent, folder=True)  # what is kept where others may write would not be taken from there
    with _lock(place.parent):
        return _write(place, rows)


def _write(place: Path, rows: Sequence[tuple[Program, Plan]]) -> Path:
    other = [(program, plan) for program, plan in _read(place) if plan.threads not in {p.threads for _, p in rows}]
    data = json.dumps([{"program": program.to_json(), "plan": plan.to_json()} for program, plan in (*other, *rows)])
    temporary = place.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        temporary.write_text(data, encoding="utf-8")
        temporary.chmod(0o600)
        os.replace(temporary, place)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return place
