"""Records which Triton kernels run in a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from widepack.kernels.triton_kernels import available


def recorded_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of each op whose kernel runs, in order.

    Failures of kernels in earlier tests do not count.
    """
    names: list[str] = []
    run: Callable[..., bool] = available.run

    def recorded(op: str, *args: Any) -> bool:
        started = run(op, *args)
        names.extend([op] if started else [])
        return started

    monkeypatch.setattr(available, "run", recorded)
    monkeypatch.setattr(available, "_failed", set())
    return names
