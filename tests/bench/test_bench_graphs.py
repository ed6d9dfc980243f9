"""Tests `widepack bench --backend auto+graph`: a backend whose calls run by CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_cases import artifact
from graph_stand_in import use_stand_in

from widepack import UsageError
from widepack_bench.measure.loading import load_on


def test_a_backend_with_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact(tmp_path, "one")
    with pytest.raises(UsageError, match="graph=True needs a CUDA device"):
        load_on(path, "cpu", "auto+graph")
    use_stand_in(monkeypatch)
    assert load_on(path, "cpu", "eager+graph").graph_use()[0].sizes == (1, 2, 4, 8, 16, 32, 64)
    assert load_on(path, "cpu", "eager").graph_use()[0].sizes == ()
    with pytest.raises(UsageError, match="backend='eager\\+grap' is unknown"):
        load_on(path, "cpu", "eager+grap")
