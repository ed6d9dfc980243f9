"""What a benchmark refuses."""

from __future__ import annotations

from widepack.errors import WidepackError


class BenchError(WidepackError):
    """A comparison that would not be one: answers that differ, inputs that cannot be made, modules that are not the members."""
