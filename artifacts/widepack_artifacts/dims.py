"""Defines the named dims of an entry and the guards over them. No torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import guards as guard_forms
from .fields import read_count, read_object, read_range, read_text


@dataclass(frozen=True, slots=True)
class Dim:
    """The inclusive bounds of a named dim.

    `source` is the user's line that a bound comes from, or empty. `example` is a size at which all guards
    hold.
    """

    min: int
    max: int | None = None
    source: str = ""
    example: int = 2

    def to_json(self) -> dict[str, Any]:
        return {"min": self.min, "max": self.max, "source": self.source, "example": self.example}

    @classmethod
    def from_json(cls, data: Any, where: str = "a dim") -> Dim:
        d = read_object(data, where, ("min", "max", "source", "example"))
        return cls(
            *read_range([d["min"], d["max"]], where),
            read_text(d["source"], f"{where}: source"),
            read_count(d["example"], f"{where}: example"),
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition over named dims that every call must meet, and the user's line that it comes from."""

    expr: guard_forms.Expr
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"expr": self.expr, "source": self.source}

    @classmethod
    def from_json(cls, data: Any, dims: Mapping[str, Dim], where: str = "a guard") -> Guard:
        d = read_object(data, where, ("expr", "source"))
        guard_forms.check(d["expr"], dims)
        return cls(d["expr"], read_text(d["source"], f"{where}: source"))
