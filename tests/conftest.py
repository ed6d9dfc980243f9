"""Settings for every test: one thread, so that parallel tests do not compete for cores; a temporary user's
cache; the artifacts of the cases, built once.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from support import Artifacts

settings.register_profile(
    "widepack", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("widepack")
gc.set_threshold(50_000, 50, 50)  # an export makes millions of objects, beside those of ten thousand tests


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leaves out what torch logs of each step of an export.

    The option log_level sets the level of the root logger six times a test, and each time the caches of all
    loggers are cleared, of which torch has hundreds.
    """
    plugin: Any = session.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler) if plugin else ():
        handler.setLevel(logging.WARNING)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves `keep` cases of each test with the mark `extended(keep=...)` in the default run."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("extended"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        mark = alike[0].get_closest_marker("extended")
        keep = min(mark.kwargs.get("keep", 0), len(alike)) if mark else 0
        for kept in (alike[k * len(alike) // keep] for k in range(keep)):
            kept.own_markers = [m for m in kept.own_markers if m.name != "extended"]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Replaces the user's cache by a temporary folder, also for the processes that tests start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("WIDEPACK_KERNEL_TIMES", "amd-epyc-avx512")  # plans do not depend on this machine
        patch.setenv("WIDEPACK_BUDGET", "0")  # builds take a second less, and their plans do not vary
        yield folder


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Returns the artifacts and build reports of the cases. Each is built at its first use."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "artifacts").mkdir(exist_ok=True)
    return Artifacts(folder / "artifacts")
