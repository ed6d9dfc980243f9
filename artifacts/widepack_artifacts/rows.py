"""Defines what an entry says about the rows of its batch.

No torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .fields import MAX_NAME, manifest_error, read_object, read_text


@dataclass(frozen=True, slots=True)
class Rows:
    """Whether the rows of a batch are independent: no row changes the answer to another one.

    Attributes:
        dim: The dim of the rows; "" if no dim is dynamic.
        independent: Whether they are.
        proved: Whether this holds for all values of inputs and weights. False: trials found no dependence, or
            found one.
        reason: The op that mixes the rows, or that is not proved to keep them apart, with the user's line;
            "" if all ops are proved to.
    """

    dim: str
    independent: bool
    proved: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "independent": self.independent,
            "proved": self.proved,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "rows") -> Rows:
        d = read_object(data, where, ("dim", "independent", "proved", "reason"))
        for key in ("independent", "proved"):
            if type(d[key]) is not bool:
                raise manifest_error(f"{where}: {key}: expected true or false, got {str(d[key])[:40]}")
        return cls(
            read_text(d["dim"], f"{where}: dim", MAX_NAME),
            d["independent"],
            d["proved"],
            " ".join(read_text(d["reason"], f"{where}: reason").split()),  # one line in messages
        )

    def __str__(self) -> str:
        if not self.independent:
            return f"not independent: {self.reason}"
        along = f"independent along {self.dim}"
        return along if self.proved else f"{along} in trials; not proved: {self.reason}"
