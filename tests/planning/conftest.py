"""Kernel times that a test chooses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from widepack.kernel_times.profile import Profile
from widepack.planning import cpu_plans


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[[Profile], None]:
    """Sets the kernel times of this machine."""
    return lambda profile: monkeypatch.setattr(cpu_plans, "profile_here", lambda: profile)
