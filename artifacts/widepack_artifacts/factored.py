"""Defines the weights that an artifact stores as a base and low-rank factors. No torch is imported.

The weight of member i is `base + left[i] @ right[i]`, where the product has the shape of the base. With a
scale, each row or each column of this sum is multiplied by a number of the member. The tensors are rows of
the weights table with the role `factor`. `correction.py` computes the weight bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .fields import (
    check_unique,
    manifest_error,
    read_choice,
    read_count,
    read_list,
    read_name,
    read_object,
)
from .file_list import File, read_file_name
from .manifest_weights import FACTOR, Weight, check_ragged_names

FLOATS = ("float16", "bfloat16", "float32", "float64")
ROLES = ("parameter", "buffer")
_CORRECTIONS = re.compile(r"corrections-[0-9a-f]{16}\.safetensors\Z")
_KEYS = ("name", "role", "aliases", "base", "left", "right", "ranks")


@dataclass(frozen=True, slots=True)
class FactoredWeight:
    """A weight of the members that is stored as factors.

    Attributes:
        name: The name in the members' state dicts.
        role: `parameter` or `buffer`.
        base: The row of the table that has the base, Shared.
        left: The row of the left factors, Stacked, `[O, r]` in one member.
        right: The row of the right factors, Stacked, `[r, I]` in one member.
        ranks: The rank of each member; further columns of its left factor are not read.
        aliases: Other names of the same value.
        scale: The row of the scales, Stacked, `[O, 1]` or `[1, I]` in one member; "" if there are none.
    """

    name: str
    role: str
    base: str
    left: str
    right: str
    ranks: list[int]
    aliases: list[str] = field(default_factory=list)
    scale: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The rows of the table that have the base, the factors, and the scales if there are any."""
        return (self.base, self.left, self.right, *([self.scale] if self.scale else []))

    def to_json(self) -> dict[str, Any]:
        found = {
            "name": self.name,
            "role": self.role,
            "aliases": self.aliases,
            "base": self.base,
            "left": self.left,
            "right": self.right,
            "ranks": self.ranks,
        }
        return found | ({"scale": self.scale} if self.scale else {})

    @classmethod
    def from_json(cls, data: Any, where: str = "a factored weight") -> FactoredWeight:
        scaled = isinstance(data, Mapping) and "scale" in data
        d = read_object(data, where, (*_KEYS, "scale") if scaled else _KEYS)
        name = read_name(d["name"], f"{where}: name")
        where = f"factored weight {name[:200]}"
        return cls(
            name,
            read_choice(d["role"], ROLES, f"{where}: role"),
            read_name(d["base"], f"{where}: base"),
            read_name(d["left"], f"{where}: left"),
            read_name(d["right"], f"{where}: right"),
            read_list(d["ranks"], f"{where}: ranks", read_count),
            read_list(d["aliases"], f"{where}: aliases", read_name),
            read_name(d["scale"], f"{where}: scale") if scaled else "",
        )

    def weight(self, table: Mapping[str, Weight]) -> Weight:
        """Returns the row that the weight would have if it were stored for each member. table: by name."""
        base = table[self.base]
        return Weight(self.name, "stacked", base.dtype, list(base.shape), self.role, list(self.aliases))


@dataclass(frozen=True, slots=True)
class Factored:
    """All factored weights of an artifact.

    Attributes:
        weights: The weights.
        corrections: The file of the corrections, which give the members' weights bit for bit; "" if the
            factors alone do.
    """

    weights: tuple[FactoredWeight, ...] = ()
    corrections: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"weights": [w.to_json() for w in self.weights], "corrections": self.corrections}

    @classmethod
    def from_json(
        cls, data: Any, table: Iterable[Weight], members: int, files: Mapping[str, File]
    ) -> Factored:
        """Reads the factored weights, and checks them against the table of stored weights.

        Raises: ArtifactError.
        """
        d = read_object(data, "factored", ("weights", "corrections"))
        found = cls(
            tuple(read_list(d["weights"], "factored: weights", FactoredWeight.from_json)),
            ""
            if d["corrections"] == ""
            else read_file_name(d["corrections"], files, "factored: corrections"),
        )
        if not found.weights:
            raise manifest_error("factored: weights: an artifact without factored weights has no such key")
        if found.corrections and not _CORRECTIONS.match(found.corrections):
            raise manifest_error(f"factored: corrections: {found.corrections[:80]!r} is another kind of file")
        rows = {w.name: w for w in table}
        factors = [name for w in found.weights for name in w.parts]
        check_unique(factors, "factored: base, left, right and scale")
        check_unique(
            [*rows, *(a for w in rows.values() for a in w.aliases)]
            + [name for w in found.weights for name in (w.name, *w.aliases)],
            "weights and factored weights",
        )
        for weight in found.weights:
            _check(weight, rows, members)
        check_ragged_names([*rows.values(), *(w.weight(rows) for w in found.weights)], members)
        if unread := {n for n, row in rows.items() if row.role == FACTOR}.difference(factors):
            raise manifest_error(f"factored: no weight has the factor {min(unread)[:80]!r}")
        return found


def _check(weight: FactoredWeight, rows: Mapping[str, Weight], members: int) -> None:
    """Refuses a weight whose factors are missing or do not fit together."""
    where = f"factored weight {weight.name[:200]}"
    kinds = (("base", "shared"), ("left", "stacked"), ("right", "stacked"), ("scale", "stacked"))
    for part, kind in kinds[: len(weight.parts)]:
        row = rows.get(getattr(weight, part))
        if row is None or row.role != FACTOR or row.kind != kind or row.aliases:
            raise manifest_error(
                f"{where}: {part}: {getattr(weight, part)[:80]!r} is no {kind} weight of role {FACTOR}"
            )
    base, left, right = rows[weight.base], rows[weight.left], rows[weight.right]
    if len(base.shape) < 2 or 0 in base.shape or base.dtype not in FLOATS:
        raise manifest_error(
            f"{where}: the base is {base.dtype}{base.shape}; expected two dims or more, none of them 0, of "
            + ", ".join(FLOATS)
        )
    outputs, inputs = base.shape[0], math.prod(base.shape[1:])
    rank = left.shape[1] if len(left.shape) == 2 else 0
    if not 1 <= rank <= min(outputs, inputs) or left.shape[0] != outputs or right.shape != [rank, inputs]:
        raise manifest_error(
            f"{where}: the factors are {left.shape} and {right.shape}; the base is {base.shape}, so they"
            f" would be [{outputs}, r] and [r, {inputs}] with r from 1 to {min(outputs, inputs)}"
        )
    if left.dtype != right.dtype or left.dtype not in FLOATS:
        raise manifest_error(f"{where}: the factors are {left.dtype} and {right.dtype}; expected one float")
    if weight.scale:
        scale = rows[weight.scale]
        if scale.shape not in ([outputs, 1], [1, inputs]) or scale.dtype != left.dtype:
            raise manifest_error(
                f"{where}: the scale is {scale.dtype}{scale.shape}; expected {left.dtype}[{outputs}, 1] or"
                f" {left.dtype}[1, {inputs}]"
            )
    if len(weight.ranks) != members or max(weight.ranks) > rank:
        raise manifest_error(
            f"{where}: ranks: expected {members} numbers from 0 to {rank}, got {str(weight.ranks)[:80]}"
        )
