"""Defines the errors of the benchmarks."""

from __future__ import annotations

from widepack.errors import WidepackError


class BenchError(WidepackError):
    """A comparison is not valid: answers differ, inputs cannot be made, or modules are not the members."""


class Unavailable(BenchError):
    """This machine cannot run a contestant: a device or a package is missing. The report shows the reason."""
