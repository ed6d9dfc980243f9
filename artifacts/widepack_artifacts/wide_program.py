"""Defines the row of a wide program in a manifest. No torch is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .fields import (
    manifest_error,
    read_choice,
    read_count,
    read_free_object,
    read_list,
    read_object,
    read_range,
    read_text,
)
from .file_list import File, read_file_name
from .format_version import VERSION

PATTERNS = ("shared", "each")


@dataclass(frozen=True, slots=True)
class WideProgram:
    """A wide program for one kind of device, one pattern and one batch class.

    `batch` is (least, most or None), counted at the example sizes of the other dims. `plan` has the form that
    `widepack.planning.plan.Plan` writes. `members` is (first, count) of adjacent members, if the program is
    for these only; None for all members.
    """

    device: str
    pattern: str
    file: str
    batch: tuple[int, int | None] = (1, None)
    plan: dict[str, Any] = field(default_factory=dict)
    members: tuple[int, int] | None = None

    def check_part(self, count: int, where: str) -> None:
        """Checks that `members` is a part of `count` members. Raises: ArtifactError."""
        if self.members is not None and (sum(self.members) > count or self.members[1] >= count):
            raise manifest_error(
                f"{where}: {self.members[1]} members from number {self.members[0]} are not a part of the "
                f"{count} members"
            )

    @property
    def part(self) -> range | None:
        """The numbers of the members that the program is for; None for all members."""
        return None if self.members is None else range(self.members[0], sum(self.members))

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "pattern": self.pattern,
            "file": self.file,
            "batch": list(self.batch),
            "plan": self.plan,
            **({"members": list(self.members)} if self.members is not None else {}),
        }

    @classmethod
    def from_json(
        cls,
        data: Any,
        files: Mapping[str, File],
        where: str = "a wide program",
        version: tuple[int, int] = VERSION,
    ) -> WideProgram:
        later = ("members",) if version >= (1, 3) and isinstance(data, dict) and "members" in data else ()
        d = read_object(data, where, ("device", "pattern", "file", "batch", "plan", *later))
        device = read_text(d["device"], f"{where}: device", 32)
        if not re.fullmatch(r"[a-z]+", device):
            raise manifest_error(f"{where}: {device[:40]!r} is not a kind of device such as cpu or cuda")
        pattern, file = (
            read_choice(d["pattern"], PATTERNS, f"{where}: pattern"),
            read_file_name(d["file"], files, f"{where}: file"),
        )
        return cls(
            device,
            pattern,
            file,
            read_range(d["batch"], f"{where}: batch"),
            read_free_object(d["plan"], f"{where}: plan"),
            _read_part(d["members"], f"{where}: members") if later else None,
        )


def _read_part(value: Any, where: str) -> tuple[int, int]:
    """Reads the members of a part: `[first, count]`."""
    numbers = read_list(value, where, read_count)
    if len(numbers) != 2 or not numbers[1]:
        raise manifest_error(
            f"{where}: expected [first, count] with a count of at least 1, got {str(value)[:60]}"
        )
    return numbers[0], numbers[1]
