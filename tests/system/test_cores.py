"""Tests which cores a process may use, and that busy ones are found."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from widepack.system import cores
from widepack.system.cores import core_share, free_threads, usable_cores
from widepack_cli.shared.threads import use_free_cores


@pytest.mark.parametrize(
    ("quotas", "cores_"),
    [({"": "150000 100000"}, 1.5), ({"a": "max 100000"}, math.inf), ({"a": "50000 100000", "": "2 1"}, 0.5)],
)
def test_the_least_quota_of_all_groups_counts(tmp_path: Path, quotas: dict[str, str], cores_: float) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    (tmp_path / "fs" / "a" / "b").mkdir(parents=True)
    for group, text in quotas.items():
        (tmp_path / "fs" / group / "cpu.max").write_text(text)
    assert cores.quota(tmp_path / "fs", own) == cores_
    assert cores.quota(tmp_path / "none", tmp_path / "none") == math.inf


@pytest.mark.parametrize(("quota", "cores_"), [("150000", 1.5), ("-1", math.inf)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, cores_: float) -> None:
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/job\n")
    folder = tmp_path / "fs" / "cpu" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.quota(tmp_path / "fs", tmp_path / "cgroup") == cores_


def test_cores_are_those_of_the_affinity_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "quota", lambda: 0.3)
    assert usable_cores() == 1


def test_one_thread_where_other_processes_use_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    assert 0 < core_share(1) <= 1.1
    for share, threads in ((1.0, 4), (0.95, 4), (0.5, 1)):
        monkeypatch.setattr(cores, "core_share", lambda _, share=share: share)
        assert free_threads(8) == threads
    assert free_threads(1) == 1
    shares = iter((0.5, 0.95, 0.6, 0.95, 1.0))  # what runs beside the first measurements ends soon
    monkeypatch.setattr(cores, "core_share", lambda _: next(shares))
    assert free_threads(8) == 4


def test_a_number_of_threads_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cores, "free_threads", lambda threads: 1)
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        use_free_cores()
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
        use_free_cores()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
