"""What a benchmark refuses."""

from __future__ import annotations

from widepack.errors import WidepackError


class BenchError(WidepackError):
    """A comparison that would not be one: answers that differ, inputs that cannot be made, modules that are not the members."""


class Unavailable(BenchError):
    """A contestant that this machine does not have: no device for it, or a package that is not installed. Its reason stands in the report."""
