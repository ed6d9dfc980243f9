"""Reads and checks the fields of a manifest: texts, names, counts, lists and objects. No torch is imported.

Each `read_*` function takes a JSON value and its place in the manifest. It returns the value, or raises
`ArtifactError` with the place, the expected form and the beginning of the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ArtifactError, some

MAX_RANK = 64
MAX_TEXT = 20_000  # characters
MAX_NAME = 1_000
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NO_NAME = re.compile("[\n\t\u202a-\u202e\u2066-\u2069]")  # marks that reverse the order of a text
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)  # could control a terminal; tab and newline are allowed
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

T = TypeVar("T")


def manifest_error(message: str) -> ArtifactError:
    """Returns the error for a manifest that is refused."""
    return ArtifactError(f"manifest: {message}")


def read_object(value: Any, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Reads an object with exactly these keys."""
    if not isinstance(value, dict):
        raise manifest_error(f"{where}: expected an object with {', '.join(keys)}; got {str(value)[:60]}")
    unknown, missing = sorted(set(value) - set(keys)), [k for k in keys if k not in value]
    if unknown:
        names = some(u[:40] for u in unknown)
        raise manifest_error(f"{where}: unknown {names}; known: {', '.join(keys)}")
    if missing:
        raise manifest_error(f"{where}: {', '.join(missing)} missing")
    return value


def read_list(value: Any, where: str, item: Callable[[Any, str], T]) -> list[T]:
    """Reads a list; `item` reads each value from its place."""
    if not isinstance(value, list):
        raise manifest_error(f"{where}: expected a list, got {str(value)[:60]}")
    return [item(v, f"{where}[{i}]") for i, v in enumerate(value)]


def read_map(value: Any, where: str, item: Callable[[Any, str], T]) -> dict[str, T]:
    """Reads an object with any keys; `item` reads each value from its place."""
    if not isinstance(value, dict):
        raise manifest_error(f"{where}: expected an object, got {str(value)[:60]}")
    return {k: item(v, f"{where}: {k[:80]}") for k, v in value.items()}


def read_free_object(value: Any, where: str) -> dict[str, Any]:
    """Reads an object whose content is not checked."""
    if not isinstance(value, dict):
        raise manifest_error(f"{where}: expected an object, got {str(value)[:60]}")
    return value


def read_text(value: Any, where: str, limit: int = MAX_TEXT) -> str:
    """Reads a text of at most `limit` characters without control characters."""
    if not isinstance(value, str) or len(value) > limit or _CONTROL.search(value):
        raise manifest_error(
            f"{where}: expected text of at most {limit} characters without control characters, "
            f"got {str(value)[:60]!r}"
        )
    return value


def read_name(value: Any, where: str) -> str:
    """Reads a text of one line that is not empty, and that shows its characters in their order."""
    if not read_text(value, where, MAX_NAME) or _NO_NAME.search(value):
        raise manifest_error(f"{where}: expected a name, got {value[:60]!r}")
    return str(value)


def read_choice(value: Any, known: tuple[str, ...], where: str) -> str:
    """Reads one of the known texts."""
    if not isinstance(value, str) or value not in known:
        raise manifest_error(f"{where}: {str(value)[:40]!r} is unknown; known: {', '.join(known)}")
    return value


def read_optional_integer(value: Any, where: str) -> int | None:
    """Reads an integer of 64 bits, or null."""
    if value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
        raise manifest_error(f"{where}: expected an integer of 64 bits or null, got {str(value)[:40]}")
    return value


def read_count(value: Any, where: str) -> int:
    """Reads an integer of [0, 2^63)."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise manifest_error(f"{where}: expected a count of at most 63 bits, got {str(value)[:40]}")
    return value


def read_sha256(value: Any, where: str) -> str:
    """Reads a SHA-256 in hexadecimal digits."""
    if not isinstance(value, str) or not _SHA256.match(value):
        raise manifest_error(f"{where}: sha256: expected 64 hex digits, got {str(value)[:80]!r}")
    return value


def read_range(value: Any, where: str) -> tuple[int, int | None]:
    """Reads `[least, most or null]`."""
    if not isinstance(value, list) or len(value) != 2:
        raise manifest_error(f"{where}: expected [least, most or null], got {str(value)[:40]}")
    least, most = read_count(value[0], where), None if value[1] is None else read_count(value[1], where)
    if most is not None and most < least:
        raise manifest_error(f"{where}: the range from {least} to {most} is empty")
    return least, most


def read_shape(value: Any, where: str) -> list[int]:
    """Reads a list of at most `MAX_RANK` counts."""
    shape = read_list(value, where, read_count)
    if len(shape) > MAX_RANK:
        raise manifest_error(f"{where}: {len(shape)} dims, the limit is {MAX_RANK}")
    return shape


def check_unique(names: list[str], where: str) -> None:
    """Refuses a name that occurs twice."""
    if len(set(names)) != len(names):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise manifest_error(f"{where}: the name {name[:80]!r} occurs twice")
            seen.add(name)
