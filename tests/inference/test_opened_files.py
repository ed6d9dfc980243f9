"""Tests what a load and its calls open: the artifact's files and the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from loaded import saved
from torch import nn

import widepack

FORBIDDEN = {
    "socket.connect",
    "subprocess.Popen",
    "os.system",
    "pickle.find_class",
    "os.exec",
    "ctypes.dlopen",
}
SEEN: list[tuple[str, str]] = []
WATCHED = [False]


def watch(event: str, args: Any) -> None:
    if WATCHED[0] and (event == "open" or event in FORBIDDEN):
        SEEN.append((event, str(args[0])))


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_a_load_opens_the_artifact_and_the_users_cache_only(tmp_path: Path, cache: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        saved(make, tmp_path / name, "input=float32[B,4]", members=2)
    first, second = tmp_path / "first" / "e.wide", tmp_path / "second" / "e.wide"
    x = torch.randn(3, 4)
    widepack.load(first)(x)  # imports all modules that a load needs
    (second / "extra.py").write_text("raise SystemExit")
    sys.addaudithook(watch)
    WATCHED[0] = True
    try:
        ens = widepack.load(second)
        ens(x), ens.each(x.expand(2, 3, 4)), ens[0](x)
    finally:
        WATCHED[0] = False
    assert {event for event, _ in SEEN} == {"open"}
    roots = [str(second), str(cache)]
    opened = [os.path.abspath(name) for _, name in SEEN if not name.isdigit()]
    assert any(n.startswith(roots[0]) for n in opened)
    assert [n for n in opened if not n.startswith((*roots, "/proc/", "/sys/"))] == []
    assert not [n for n in opened if n.endswith((".pt2", ".py"))]
