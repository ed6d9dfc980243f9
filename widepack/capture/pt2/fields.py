"""Reads typed fields of a `.pt2` file's JSON. Each function refuses a value of another type."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ...checkpoints.state_dict import RefusedFile

WAY_OUT = "save the functional program: torch.export.save(exported.run_decompositions({}), path)"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def bad_field(what: str) -> RefusedFile:
    """Returns the error for a file that is damaged or of an unknown form."""
    return RefusedFile(f"is damaged, or a program that widepack cannot read: {what}")


def object_of(value: Any, what: str) -> dict[str, Any]:
    """Returns a JSON object. what: the field's name, for the message."""
    if not isinstance(value, dict):
        raise bad_field(f"its {what} is not an object")
    return value


def list_of(value: Any, what: str) -> list[Any]:
    """Returns a JSON list. what: the field's name, for the message."""
    if not isinstance(value, list):
        raise bad_field(f"its {what} is not a list")
    return value


def text_of(value: Any) -> str:
    """Returns a name: a printable text of 1 to 1000 characters."""
    if not isinstance(value, str) or not value or len(value) > 1000 or not value.isprintable():
        raise bad_field(f"{str(value)[:40]!r} is not a name")
    return value


def union_of(value: Any, what: str) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the content of a tagged union, `{kind: {...}}`."""
    if not isinstance(value, dict) or len(value) != 1:
        raise bad_field(f"an entry of its {what} has not exactly one kind")
    ((kind, row),) = value.items()
    return kind, object_of(row, what)


def clean_text(name: str) -> str:
    """Returns a name with only letters, digits and underscores."""
    return re.sub(r"\W", "_", text_of(name), flags=re.ASCII)


def renamed_value(name: Any, renamed: Mapping[str, str]) -> str:
    """Returns the program's name of a value. Refuses a name that no earlier node gives."""
    if not isinstance(name, str) or name not in renamed:
        raise bad_field(f"{str(name)[:60]!r} is read before it is computed")
    return renamed[name]


def tensor_name(arg: Any) -> str | None:
    """Returns the name of an argument that is a tensor; None for another argument."""
    if isinstance(arg, dict) and set(arg) == {"as_tensor"}:
        return text_of(object_of(arg["as_tensor"], "as_tensor").get("name"))
    return None


def literal_of(arg: Any) -> Any:
    """Returns a literal argument: None, a number or a string."""
    if isinstance(arg, dict) and len(arg) == 1:
        ((kind, value),) = arg.items()
        if kind == "as_none":
            return None
        if kind == "as_float" and type(value) in (int, float, str):
            return float_of(value)
        if (kind, type(value)) in (("as_int", int), ("as_bool", bool), ("as_string", str)):
            return value
    raise bad_field(f"{str(arg)[:60]!r} is not a number, string or None")


def float_of(value: Any) -> float:
    """Returns a float. JSON has no infinity and no NaN, so the file writes them as texts."""
    if isinstance(value, str) and value in _FLOATS:
        return _FLOATS[value]
    if type(value) not in (int, float):
        raise bad_field(f"{str(value)[:40]!r} is not a number")
    return float(value)
