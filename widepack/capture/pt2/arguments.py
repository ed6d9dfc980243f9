"""Reads the arguments of a node in a `.pt2` file: values of the program become `Ref`s, others literals."""

from __future__ import annotations

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
from .fields import WAY_OUT, bad_field, float_of, list_of, literal_of, object_of, renamed_value, text_of

_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_STRIDED = 7  # the file's number of the strided layout


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
_LITERAL_LISTS = {
    "as_ints": "as_int",
    "as_bools": "as_bool",
    "as_strings": "as_string",
    "as_floats": "as_float",
}
SYMBOLS = ("as_sym_int", "as_sym_bool", "as_sym_float")


@dataclass(frozen=True)
class _ValueReader:
    """Reads the arguments of one op as torch takes them, with a `Ref` for each value of the program."""

    op: str
    source: str
    renamed: Mapping[str, str]

    def read(self, arg: Any) -> Any:
        """Returns one argument."""
        if not isinstance(arg, dict) or len(arg) != 1:
            raise bad_field(f"an argument of {self.op} has not exactly one kind")
        ((kind, value),) = arg.items()
        if kind in _LITERALS:
            return literal_of(arg)
        if kind == "as_tensor":
            return self._ref(value)
        if kind in SYMBOLS:
            return self._symbol(value)
        if kind == "as_optional_tensor":
            return self._optional(value)
        if kind in ("as_complex", "as_scalar_type", "as_memory_format", "as_layout", "as_device"):
            return self._setting(kind, value)
        return self._list(kind, value)

    def _setting(self, kind: str, value: Any) -> Any:
        """Returns a complex number, dtype, memory format, layout or device."""
        if kind == "as_complex":
            row = object_of(value, kind)
            return complex(float_of(row.get("real")), float_of(row.get("imag")))
        if kind == "as_scalar_type":
            return _one_of(DTYPES, value, "dtype")
        if kind == "as_memory_format":
            return _one_of(_FORMATS, value, "memory format")
        if kind == "as_layout":
            return torch.strided if value == _STRIDED else _one_of({}, value, "layout")
        return torch.device("cpu")  # the program runs on any device

    def _list(self, kind: str, value: Any) -> list[Any]:
        items = list_of(value, kind) if kind.endswith("s") and kind.startswith("as_") else []
        if kind == "as_tensors":
            return [self._ref(v) for v in items]
        if kind == "as_optional_tensors":
            return [self._optional(v) for v in items]
        if kind.removesuffix("s") in SYMBOLS:
            return [self._symbol(v) for v in items]
        if kind in _LITERAL_LISTS:
            return [literal_of({_LITERAL_LISTS[kind]: v}) for v in items]
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
        kind, row = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
        if kind == "as_none":
            return None
        return self._ref(row if kind == "as_tensor" else None)


def _one_of(table: Mapping[int, Any], value: Any, what: str) -> Any:
    if type(value) is not int or value not in table:
        raise RefusedFile(f"names the {what} {str(value)[:20]}, which is unknown")
    return table[value]
