"""Tests the script that compares FLOP formulas with torch's counter for a registry of networks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from flops import outcome, summary, wide_holds, work_on

ZOO = """
import types, torch
from torch import nn

def seed_all(seed): torch.manual_seed(seed)

class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("trunk", torch.zeros(6, 8), persistent=False)
        self.head, self.v = nn.Linear(8, 2), nn.Parameter(torch.zeros(2))
    def forward(self, batch, scale):
        unread = batch["x"] @ batch["x"].T
        return torch.mv(self.head(batch["x"] @ self.trunk), self.v) * scale

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.lstm = nn.Embedding(9, 5), nn.LSTM(5, 3, batch_first=True)
    def forward(self, ids):
        return self.lstm(self.rows(ids))[0]

ENTRIES = {
    "nested": types.SimpleNamespace(package="torch", make=Nested),
    "plain": types.SimpleNamespace(package="torch", make=Plain),
}
def inputs(name, batch, seed):
    if name == "nested":
        return ({"x": torch.ones(batch, 6)}, 2.0), {}
    return (torch.arange(batch * 4).reshape(batch, 4) % 9,), {}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "zoo.py").write_text(ZOO, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "zoo", None)
    monkeypatch.delitem(sys.modules, "zoo")
    return tmp_path


def row_of(folder: Path, name: str) -> dict[str, Any]:
    out = io.StringIO()
    work_on(folder, name, out)
    row: dict[str, Any] = {"name": name}
    for line in out.getvalue().splitlines():
        row |= json.loads(line)
    return row


def test_a_nested_call_with_a_shared_part(folder: Path) -> None:
    """torch's counter does not see the product with a vector, and counts one that no output reads."""
    row = row_of(folder, "nested")
    assert row["inputs"] == ["x0=float32[B,6]"] and row["flattened"]
    assert row["formula"] == ["96*B", "36*B"]
    assert [at["batch"] for at in row["at"]] == [1, 3, 7]
    assert row["at"][1]["cpu"] == {
        "torch": 3 * (96 + 32) + 108, "unseen": 12, "unread": 108, "by_hand": 3 * 132, "shared": 3 * 96,
    }  # fmt: skip
    assert outcome(row) == "hand" and wide_holds(row)
    found = summary([row, {"name": "other", "error": "a reason"}])
    assert found["equal_by_hand"] == {
        "nested": "ops that the counter does not see and ops that no output reads"
    }
    assert found["not_compared"] == {"other": "a reason"}
    assert found["members_equal"] == found["wide_equal"] == 1


@pytest.mark.extended
def test_a_recurrent_layer_is_seen_on_meta_tensors(folder: Path) -> None:
    row = row_of(folder, "plain")
    assert row["inputs"] == ["ids=int64[B,4]:0..8"] and not row["flattened"]
    assert outcome(row) == "torch" and wide_holds(row)
    assert [at["ours"] for at in row["at"]] == [at["batch"] * 4 * 2 * 12 * (5 + 3) for at in row["at"]]
    assert row["at"][0]["cpu"]["torch"] == 0
