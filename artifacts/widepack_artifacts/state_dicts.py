"""What a manifest says of the members' state dicts, beside their tensors. No torch is imported.

A state dict of `nn.Module.state_dict` also has the versions of the submodules and their extra state. Some
modules convert older state dicts by these versions when they load them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import some
from .fields import MAX_NAME, manifest_error, read_list, read_map, read_name, read_object, read_text
from .file_list import File, read_file_name

STEM = "extra"
MAX_KEYS = 20
_ASSIGN = "assign_to_params_buffers"  # would make `load_state_dict` assign tensors and not copy them


@dataclass(frozen=True, slots=True)
class StateDicts:
    """What the state dicts of all members have beside their tensors.

    `versions`: what `_metadata` of a state dict has of each submodule. `extra`: the file of the members'
    extra state, or "". `verbatim`, `verbatim_bare`: whether the model takes a state dict with these
    versions, or one without versions, as it is. If it does not, only the model's code can load it.
    `copies`: whether the model only copies the tensors when it loads a state dict: it has no code of its own
    that may change them, and its `eval()` sets nothing beside them. `ignored`: patterns of names in
    checkpoints that are not the model's. `left_out`: the names of extra states that are not stored.
    """

    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    extra: str = ""
    verbatim: bool = True
    verbatim_bare: bool = True
    copies: bool = True
    ignored: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def versioned(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state dict as `nn.Module.state_dict` does, with the versions of the submodules."""
        found: dict[str, Any] = OrderedDict(state)
        if self.versions:
            rows = {path: dict(row) for path, row in self.versions.items()}
            vars(found)["_metadata"] = OrderedDict(rows)  # where `load_state_dict` reads it
        return found

    @property
    def needed(self) -> bool:
        """Whether a reader without this record would treat a state dict in another way."""
        converted = any(row != {"version": 1} for row in self.versions.values())
        return bool(converted or self.extra or self.ignored or self.left_out) or not (
            self.verbatim and self.verbatim_bare and self.copies
        )

    @property
    def changed_at_load(self) -> str:
        """Why no state dict of a member can be given that the model loads as this member; "" if one can."""
        if not self.verbatim:
            return (
                "load_state_dict of the model changes state dicts of this form (a hook or"
                " _load_from_state_dict), so the model would load other weights from this member's state;"
                " keep its checkpoint"
            )
        if self.left_out:
            return (
                f"its extra state {some(self.left_out)}, which the model reads, is not in the"
                " artifact (--ignore); keep its checkpoint"
            )
        return ""

    def to_json(self) -> dict[str, Any]:
        return {
            "versions": self.versions,
            "extra": self.extra,
            "verbatim": self.verbatim,
            "verbatim_bare": self.verbatim_bare,
            "copies": self.copies,
            "ignored": self.ignored,
            "left_out": self.left_out,
        }

    @classmethod
    def from_json(cls, data: Any, files: Mapping[str, File]) -> StateDicts:
        """Reads the record. Raises: ArtifactError."""
        where = "state_dicts"
        keys = ("versions", "extra", "verbatim", "verbatim_bare", "copies", "ignored", "left_out")
        d = read_object(data, where, keys)
        extra = d["extra"] if d["extra"] == "" else read_file_name(d["extra"], files, f"{where}: extra")
        if extra and not (extra.startswith(f"{STEM}-") and extra.endswith(".safetensors")):
            raise manifest_error(f"{where}: extra: {extra[:80]!r} is not a file {STEM}-<hash>.safetensors")
        for path in d["versions"] if isinstance(d["versions"], dict) else ():
            read_name(path or "the model", f"{where}: versions")
        return cls(
            read_map(d["versions"], f"{where}: versions", _read_row),
            extra,
            _read_bool(d["verbatim"], f"{where}: verbatim"),
            _read_bool(d["verbatim_bare"], f"{where}: verbatim_bare"),
            _read_bool(d["copies"], f"{where}: copies"),
            read_list(d["ignored"], f"{where}: ignored", read_name),
            read_list(d["left_out"], f"{where}: left_out", read_name),
        )


def is_row(value: Any) -> bool:
    """Returns whether a record may have what a state dict says of a submodule: names of numbers and texts."""
    return isinstance(value, dict) and len(value) <= MAX_KEYS and all(map(_is_item, value.items()))


def _is_item(item: tuple[Any, Any]) -> bool:
    key, value = item
    if not isinstance(key, str) or not 0 < len(key) <= MAX_NAME or key == _ASSIGN:
        return False
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return value is None or type(value) is bool or (type(value) is str and len(value) <= MAX_NAME)


def _read_row(value: Any, where: str) -> dict[str, Any]:
    if not is_row(value):
        raise manifest_error(f"{where}: expected an object of numbers and texts, got {str(value)[:60]}")
    for key, text in value.items():
        read_name(key, where)
        if isinstance(text, str):
            read_text(text, where, MAX_NAME)
    found: dict[str, Any] = value
    return found


def _read_bool(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise manifest_error(f"{where}: expected true or false, got {str(value)[:40]}")
    return value
