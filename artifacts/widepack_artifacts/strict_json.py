"""JSON as the format takes it: one meaning for every file, and a bound for everything.

Refused: duplicate keys, NaN and infinities, integers past 64 bits, strings that are no Unicode text, and more than `MAX_DEPTH` levels.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from .errors import ArtifactError

MAX_DEPTH = 200  # a tree of 32 levels has at most four of JSON each
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that may stand for half a character
_INT_DIGITS = 20  # "-9223372036854775808"; longer ones are refused before Python spends quadratic time on them
MAX_VALUES = 8_000_000
"""Values of one document: Python takes some hundred bytes for each, whatever it takes in the file."""


def parse(data: bytes, what: str) -> Any:
    """The JSON document in `data`; `what` names it in errors. Raises: ArtifactError."""

    if data.count(b",") + data.count(b"{") + data.count(b"[") > MAX_VALUES:
        raise ArtifactError(f"{what}: over {MAX_VALUES:,} values")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]  # add() gives None
            raise ArtifactError(f"{what}: the key {twice[:60]!r} stands twice in one object")
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
        raise ArtifactError(f"{what}: {text} is no JSON")

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_int=integer, parse_float=real, parse_constant=constant)
    except RecursionError:
        raise ArtifactError(f"{what}: nested over {MAX_DEPTH} deep") from None
    except ValueError as e:  # UnicodeDecodeError and JSONDecodeError are both
        raise ArtifactError(f"{what}: no JSON: {e}") from None
    _bounded(found, what)
    if _SURROGATE.search(data):
        try:
            canonical(found)
        except ArtifactError as e:
            raise ArtifactError(f"{what}: {e}") from None
    return found


def _bounded(value: Any, what: str) -> None:
    """Refuse depth over the limit, level by level, so that no stack grows with the file."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [v for part in level if isinstance(part, (dict, list)) for v in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return
    raise ArtifactError(f"{what}: nested over {MAX_DEPTH} deep")


def canonical(value: Any) -> bytes:
    """The bytes that digests are taken of: sorted keys, no spaces, UTF-8, floats as Python's `repr` writes them. Raises: ArtifactError."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as e:
        raise ArtifactError(f"a name holds characters that are no Unicode text: {e.object[max(0, e.start - 20) : e.end + 20]!r}") from None
    except (TypeError, ValueError) as e:
        raise ArtifactError(f"a value has no form in JSON: {e}") from None


def digest(value: Any) -> str:
    """`sha256:<hex>` of the canonical bytes."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()
