"""Shows values of a client in messages: in few characters, whatever they are."""

from __future__ import annotations

from typing import Any

MOST = 60
"""The most characters of a value."""
_FEW = 16


def shown(value: Any, *, quoted: bool = True) -> str:
    """Returns a value in few characters. Lists and objects that contain others are only counted, since they
    may be nested as deep as JSON allows.

    quoted: whether texts have quotes.
    """
    if isinstance(value, (str, bytes)):
        text = repr(value[: MOST + 1]) if quoted else str(value[: MOST + 1])
    elif isinstance(value, dict):
        text = f"an object of {len(value)}"
    elif isinstance(value, (list, tuple)):
        few = len(value) <= _FEW and not any(isinstance(v, (list, tuple, dict, str)) for v in value)
        text = repr(list(value)) if few else f"a list of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) <= MOST else f"{text[:MOST]}..."
