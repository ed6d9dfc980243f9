"""Defines what a loaded model says of its graphs: `ens.graph_use()`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GraphUse:
    """Which calls of one wide program run by a CUDA graph, and why others do not.

    Attributes:
        pattern: `shared`, `each`, or `mixed:` and a letter for each input.
        batch: The batch class of the program: the least and the most rows.
        sizes: The batches for which a graph may be captured; empty if none is.
        captured: Those for which one was captured so far.
        why_not: The reason why no graph is captured any more; "" if graphs may be.
        why_not_padded: Why smaller batches are not padded to the next size; "" if they are.
        why_not_sizes: For batches without a graph the reason.
        why_not_calls: Why calls ran without a graph: the first few reasons.

    Example:
        >>> for use in ens.graph_use():
        ...     print(use)
    """

    pattern: str
    batch: tuple[int, int | None]
    sizes: tuple[int, ...] = ()
    captured: tuple[int, ...] = ()
    why_not: str = ""
    why_not_padded: str = ""
    why_not_sizes: tuple[tuple[int, str], ...] = ()
    why_not_calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        most = "any" if self.batch[1] is None else self.batch[1]
        start = f"{self.pattern}, batch {self.batch[0]} to {most}: "
        if not self.sizes:
            return f"{start}no graph: {self.why_not}"
        sizes = ", ".join(map(str, self.sizes)) if self.sizes != (0,) else "fixed"
        captured = ", ".join(map(str, self.captured)) or "none"
        lines = [f"{start}graphs for batch {sizes}; captured: {captured}"]
        if self.why_not:
            lines.append(f"no other graph is captured: {self.why_not}")
        if self.why_not_padded and self.sizes != (0,):
            lines.append(f"other batches run without a graph: {self.why_not_padded}")
        lines += [f"batch {size} runs without a graph: {why}" for size, why in self.why_not_sizes]
        lines += [f"a call ran without a graph: {why}" for why in self.why_not_calls]
        return "\n  ".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns the values as JSON."""
        found = asdict(self)
        return {**found, "why_not_sizes": {str(size): why for size, why in self.why_not_sizes}}
