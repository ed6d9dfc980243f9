"""Tests the peak memory that `scripts/measure/device_memory.py` reads: of an allocator, and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from device_memory import CALLS, Peak, measured, of_calls
from loaded import saved
from peer_claims import network

from widepack_bench.models.factory import factory_of

MIB = 2**20


class MadeUp(Peak):
    """An allocator: memory that is freed stays reserved until a new peak starts."""

    def __init__(self) -> None:
        self.now = self.held = self.top = self.top_held = 7 * MIB
        self.graphs = 0

    def take(self, mib: int, graph: bool = False) -> None:
        """Allocates memory and frees it. graph: its memory stays reserved for good."""
        self.top = max(self.top, self.now + mib * MIB)
        self.held += mib * MIB
        self.top_held = max(self.top_held, self.held)
        self.graphs += mib * MIB if graph else 0

    def keep(self, mib: int) -> None:
        self.now += mib * MIB
        self.held += mib * MIB
        self.top, self.top_held = max(self.top, self.now), max(self.top_held, self.held)

    def start(self) -> int:
        self.held = self.now + self.graphs
        self.top, self.top_held = self.now, self.held
        return self.now

    def most(self) -> int:
        return self.top

    def reserved(self) -> int:
        return self.held

    def most_reserved(self) -> int:
        return self.top_held


def loaded(peak: MadeUp, graph: bool) -> Callable[[], Callable[[], object]]:
    """Returns a load that keeps 10 MiB and needs 50 more, and whose calls need 30 MiB."""
    calls = []

    def call() -> None:
        calls.append(0)
        if not graph:
            peak.take(30)
        elif len(calls) == 1:
            peak.take(30, graph=True)

    def load() -> Callable[[], object]:
        peak.take(50)
        peak.keep(10)
        return call

    return load


def test_the_memory_of_a_graph_is_measured() -> None:
    """The graph is captured in the first call, and later calls allocate nothing."""
    for graph in (False, True):
        peak = MadeUp()
        assert of_calls(peak, loaded(peak, graph), graph) == (10 * MIB, 40 * MIB), graph


def test_no_call_is_made_before_the_weights_are_read() -> None:
    peak = MadeUp()
    assert of_calls(peak, lambda: lambda: peak.keep(5), graph=False) == (0, 5 * (1 + CALLS) * MIB)


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the counters of Linux")
def test_the_script_measures_an_artifact(tmp_path: Path) -> None:
    row = network("mlp-20")
    options = dict(row.form("cpu").options)
    saved(partial(factory_of(row.model), **options), tmp_path, *row.form("cpu").inputs, members=3)
    found = measured(str(tmp_path / "e.wide"), row.model, options, 2, "cpu")
    assert (found["members"], found["form"], found["pieces_bytes"]) == (3, "auto", 0)
    assert found["inputs_bytes"] > 0
    allowed = found["weights_bytes"] + found["inputs_bytes"] + 3 * found["member_bytes"]
    assert found["allowed_bytes"] == allowed
