"""Tests that the available memory is that of the process's control groups, where they allow less."""

from __future__ import annotations

from pathlib import Path

import pytest

from widepack.system import memory
from widepack.system.memory import of_control_groups

GIB = 2**30


def group(folder: Path, limit: object, used: int, cached: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        )
    )
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(f"{value}\n")
    word = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{word} {cached}\n")


def listed(folder: Path, *lines: str) -> Path:
    (folder / "cgroup").write_text("".join(f"{line}\n" for line in lines))
    return folder / "cgroup"


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root / "a" / "b", "max", 5 * GIB, 0)
    group(root / "a", 8 * GIB, 6 * GIB, GIB)
    group(root, 64 * GIB, 20 * GIB, 0)
    assert of_control_groups(root, listed(tmp_path, "0::/a/b")) == 3 * GIB
    group(root / "a" / "b", 2 * GIB, 3 * GIB, 0)  # over its limit for a moment
    assert of_control_groups(root, listed(tmp_path, "0::/a/b")) == 0


def test_a_container_whose_path_is_that_of_the_machine(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root, 4 * GIB, GIB, 0)
    assert of_control_groups(root, listed(tmp_path, "0::/docker/1234")) == 3 * GIB


def test_version_1(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    group(root / "memory" / "job", 4 * GIB, 3 * GIB, GIB, version=1)
    group(root / "memory", 2**63 - 4096, 3 * GIB, 0, version=1)  # no limit
    lines = ("9:name=systemd:/", "4:cpu,memory:/job", "0::/")
    assert of_control_groups(root, listed(tmp_path, *lines)) == 2 * GIB


@pytest.mark.parametrize("lines", [(), ("0::/",), ("nonsense",), ("4:cpu:/job",)])
def test_without_a_limit(lines: tuple[str, ...], tmp_path: Path) -> None:
    assert of_control_groups(tmp_path / "fs", listed(tmp_path, *lines)) is None
    assert of_control_groups(tmp_path, tmp_path / "missing") is None


def test_the_machine_and_the_groups_together(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory.available_bytes()
    assert machine is not None
    monkeypatch.setattr(memory, "of_control_groups", lambda: 12345)
    assert memory.available_bytes() == 12345
    monkeypatch.setattr(memory, "of_control_groups", lambda: 2**60)
    assert (memory.available_bytes() or 0) < 2**50
