"""A plugin of pytest: writes the outcome of each test at once, and leaves out tests that passed before.

    WIDEPACK_TESTS_FILE=tests.json pytest -p device.record_tests tests/gpu

The document has for each test its outcome, seconds, the end of its message, and the properties that it
recorded. A test that was running when the process ended has the outcome `running`. With pytest-xdist the
process that distributes the tests writes the document, and its workers leave out tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FORMAT = "widepack.device-tests/1"
VARIABLE = "WIDEPACK_TESTS_FILE"
TEXT_CHARS = 3000  # of a message that are kept
PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"


class TestRecord:
    """The document of the tests. path: its file, which may exist."""

    __test__ = False  # it is no class of tests

    def __init__(self, path: Path) -> None:
        self._path = path
        self.document: dict[str, Any] = {"format": FORMAT, "selected": 0, "tests": {}}
        if path.exists():
            self.document = json.loads(path.read_text(encoding="utf-8"))
        self.tests: dict[str, Any] = self.document["tests"]

    def passed(self, name: str) -> bool:
        """Returns whether a test passed before."""
        return bool(self.tests.get(name, {}).get("outcome") == PASSED)

    def select(self, names: Sequence[str]) -> None:
        """Notes how many tests were found."""
        self.document["selected"] = len(names)
        self._write()

    def begin(self, name: str) -> None:
        """Notes that a test begins."""
        self.tests[name] = {"outcome": RUNNING}
        self._write()

    def add(self, name: str, outcome: str, seconds: float, text: str, properties: Sequence[Any]) -> None:
        """Adds the outcome of a part of a test. A later part does not hide a failure."""
        row = self.tests.setdefault(name, {"outcome": RUNNING})
        if row["outcome"] not in (FAILED, SKIPPED):
            row["outcome"] = outcome
        row["seconds"] = round(row.get("seconds", 0.0) + seconds, 2)
        if outcome != PASSED:
            row["text"] = text[-TEXT_CHARS:]
        if properties:
            row["properties"] = [list(p) for p in properties]
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


class Selection:
    """The hook that selects tests. record: the outcomes of earlier calls. writes: whether it notes them."""

    def __init__(self, record: TestRecord, writes: bool) -> None:
        self._record, self._writes = record, writes

    @pytest.hookimpl(trylast=True)  # after the selection by names and marks
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out the tests that passed before."""
        if self._writes:
            self._record.select([item.nodeid for item in items])
        passed = [item for item in items if self._record.passed(item.nodeid)]
        items[:] = [item for item in items if not self._record.passed(item.nodeid)]
        if passed:
            config.hook.pytest_deselected(items=passed)


class Recorder:
    """The hooks that write outcomes. record: where they go."""

    def __init__(self, record: TestRecord) -> None:
        self._record = record

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        """Notes the tests that a worker found, without those that passed before."""
        passed = [name for name in self._record.tests if self._record.passed(name) and name not in ids]
        self._record.select([*ids, *passed])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes the test that runs now."""
        self._record.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the outcome of each part of a test."""
        if report.when == "call" or report.outcome != PASSED:
            self._record.add(
                report.nodeid, report.outcome, report.duration, report.longreprtext, report.user_properties
            )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the hooks, if the environment names a file."""
    if path := os.environ.get(VARIABLE):
        record = TestRecord(Path(path))
        worker = hasattr(config, "workerinput")
        alone = not worker and not config.getoption("numprocesses", None)
        config.pluginmanager.register(Selection(record, writes=alone), "widepack-device-selection")
        if not worker:
            config.pluginmanager.register(Recorder(record), "widepack-device-tests")
