"""Reads typed fields of a `.pt2` file's JSON, and the arguments of its nodes.

Each function refuses a value of another type. In arguments, values of the program become `Ref`s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Ref

from ...checkpoints.pt2_archive import DTYPES
from ...checkpoints.state_dict import RefusedFile
from ...ir import ops
from ...ir.encoding import encode

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


def tagged(value: Any) -> tuple[str, Any]:
    """Returns the kind and the content of a tagged union, `{kind: content}`; "" and None for other values."""
    return next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)


def union_of(value: Any, what: str) -> tuple[str, dict[str, Any]]:
    """Returns the kind and the content of a tagged union whose content is an object."""
    kind, row = tagged(value)
    if not kind:
        raise bad_field(f"an entry of its {what} has not exactly one kind")
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
    kind, row = tagged(arg)
    return text_of(object_of(row, kind).get("name")) if kind == "as_tensor" else None


def literal_of(arg: Any) -> Any:
    """Returns a literal argument: None, a number or a string."""
    kind, value = tagged(arg)
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


_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_SETTINGS: dict[str, tuple[str, Mapping[int, Any]]] = {
    "as_scalar_type": ("dtype", DTYPES),
    "as_memory_format": ("memory format", _FORMATS),
    "as_layout": ("layout", {7: torch.strided}),
}
"""What the file's numbers mean, for arguments that are neither literals nor values."""


def read_arguments(
    name: str, inputs: Sequence[Mapping[str, Any]], renamed: Mapping[str, str], source: str
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of an op by position and by name."""
    values = _ValueReader(name, source, renamed)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for row in inputs:
        value = values.read(row.get("arg"))
        if row.get("kind") == 2:
            key = text_of(row.get("name"))
            if key not in ("pin_memory", "layout") and value is not None:
                kwargs[key] = encode(value)
        elif kwargs:
            raise bad_field(f"{name} has a positional argument after one by name")
        else:
            args.append(encode(value))
    if name in OPS and name.startswith("aten."):
        known = [a for a, _, _ in ops.arguments(name)]
        if len(args) > len(known) or not set(kwargs) <= set(known):
            raise bad_field(f"{name} has arguments that the op does not take")
    return args, kwargs


_LITERALS = ("as_none", "as_int", "as_float", "as_bool", "as_string")
SYMBOLS = ("as_sym_int", "as_sym_bool", "as_sym_float")


@dataclass(frozen=True)
class _ValueReader:
    """Reads the arguments of one op as torch takes them, with a `Ref` for each value of the program."""

    op: str
    source: str
    renamed: Mapping[str, str]

    def read(self, arg: Any) -> Any:
        """Returns one argument."""
        kind, value = tagged(arg)
        if not kind:
            raise bad_field(f"an argument of {self.op} has not exactly one kind")
        if kind in _LITERALS:
            return literal_of(arg)
        if kind == "as_tensor":
            return self._ref(value)
        if kind in SYMBOLS:
            return self._symbol(value)
        if kind == "as_optional_tensor":
            return self._optional(value)
        if kind == "as_complex":
            row = object_of(value, kind)
            return complex(float_of(row.get("real")), float_of(row.get("imag")))
        if kind in _SETTINGS:
            return _one_of(*_SETTINGS[kind], value)
        if kind == "as_device":
            return torch.device("cpu")  # the program runs on any device
        return self._list(kind, value)

    def _list(self, kind: str, value: Any) -> list[Any]:
        items = list_of(value, kind) if kind.endswith("s") and kind.startswith("as_") else []
        if kind == "as_tensors":
            return [self._ref(v) for v in items]
        if kind == "as_optional_tensors":
            return [self._optional(v) for v in items]
        if kind.removesuffix("s") in SYMBOLS:
            return [self._symbol(v) for v in items]
        if kind.removesuffix("s") in _LITERALS[1:]:
            return [literal_of({kind.removesuffix("s"): v}) for v in items]
        if kind == "as_int_lists":
            return [[literal_of({"as_int": v}) for v in list_of(row, kind)] for row in items]
        source = f", from {self.source}," if self.source else ""
        raise RefusedFile(
            f"gives {self.op}{source} an argument of kind {kind[:40]!r}, which a member program cannot have; "
            f"{WAY_OUT}"
        )

    def _ref(self, row: Any) -> Ref:
        return Ref(renamed_value(row.get("name") if isinstance(row, dict) else None, self.renamed))

    def _symbol(self, row: Any) -> Any:
        """Returns a number, or a `Ref` to one."""
        if isinstance(row, dict) and set(row) == {"as_name"}:
            return Ref(renamed_value(row["as_name"], self.renamed))
        return literal_of(row)

    def _optional(self, value: Any) -> Ref | None:
        kind, row = tagged(value)
        if kind == "as_none":
            return None
        return self._ref(row if kind == "as_tensor" else None)


def _one_of(what: str, table: Mapping[int, Any], value: Any) -> Any:
    if type(value) is not int or value not in table:
        raise RefusedFile(f"names the {what} {str(value)[:20]}, which is unknown")
    return table[value]
