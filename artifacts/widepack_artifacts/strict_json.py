"""Reads and writes the JSON of the format: every file has one meaning, and its size, depth and numbers are
limited.

It refuses duplicate keys, NaN and infinities, integers of more than 64 bits, strings that are not valid
Unicode, and more than `MAX_DEPTH` levels.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from .errors import ArtifactError

MAX_DEPTH = 200  # a tree has at most 32 levels, each of at most four levels of JSON
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that may be half of a surrogate pair
_INT_DIGITS = (
    20  # "-9223372036854775808"; longer ones are refused before Python spends quadratic time on them
)
MAX_VALUES = 8_000_000
"""The limit of values in one document.

Python needs about a hundred bytes for each, however short it is in the file.
"""


def parse(data: bytes, what: str, constants: bool = False) -> Any:
    """Returns the JSON document in `data`; `what` names it in errors.

    constants: whether NaN and infinities are read, which Python's writer makes; for files of other programs.

    Raises: ArtifactError.
    """

    if data.count(b",") + data.count(b"{") + data.count(b"[") > MAX_VALUES:
        raise ArtifactError(f"{what}: over {MAX_VALUES:,} values")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]  # add() gives None
            raise ArtifactError(f"{what}: the key {twice[:60]!r} occurs twice in one object")
        return found

    def integer(text: str) -> int:
        value = int(text) if len(text) <= _INT_DIGITS else 2**63
        if not -(2**63) <= value < 2**63:
            raise ArtifactError(f"{what}: the integer {text[:24]} is outside 64 bits")
        return value

    def real(text: str) -> float:
        value = float(text) if len(text) <= 400 else math.inf
        if not math.isfinite(value):
            raise ArtifactError(f"{what}: the number {text[:24]} is outside float64")
        return value

    def constant(text: str) -> Any:
        raise ArtifactError(f"{what}: {text} is not JSON")

    try:
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=real,
            parse_constant=float if constants else constant,
        )
    except RecursionError:
        raise ArtifactError(f"{what}: nested over {MAX_DEPTH} deep") from None
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError are subclasses
        raise ArtifactError(f"{what}: not JSON: {e}") from None
    _bounded(found, what)
    if _SURROGATE.search(data):
        try:
            canonical(found)
        except ArtifactError as e:
            raise ArtifactError(f"{what}: {e}") from None
    return found


def _bounded(value: Any, what: str) -> None:
    """Refuses a document of more than `MAX_DEPTH` levels.

    It uses no recursion, because the file decides the depth.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            v
            for part in level
            if isinstance(part, (dict, list))
            for v in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return
    raise ArtifactError(f"{what}: nested over {MAX_DEPTH} deep")


def canonical(value: Any) -> bytes:
    """Returns the canonical bytes of a value, from which digests are computed.

    Keys are sorted, there are no spaces, the encoding is UTF-8, and floats have the form of Python's `repr`.
    Raises: ArtifactError.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode("utf-8")
    except UnicodeEncodeError as e:
        raise ArtifactError(
            "a name contains characters that are not valid Unicode: "
            f"{e.object[max(0, e.start - 20) : e.end + 20]!r}"
        ) from None
    except (TypeError, ValueError) as e:
        raise ArtifactError(f"a value cannot be written as JSON: {e}") from None


def digest(value: Any) -> str:
    """Returns `sha256:<hex>` of the canonical bytes."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()
