"""Fixtures of the tests of revisions: members, their checkpoints, and their artifacts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from revisions import SPECS, Net, Scratch, member, save
from torch import nn

from widepack import build


@pytest.fixture(scope="session")
def nets() -> list[nn.Module]:
    """Returns five members with one trunk, and a sixth member with another trunk."""
    return [*(member(Net, i) for i in range(5)), member(Net, 5, trunk=7)]


@pytest.fixture(scope="session")
def paths(nets: list[nn.Module], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save(tmp_path_factory.mktemp("ckpts"), nets)


@pytest.fixture(scope="session")
def scratch(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """`scratch(0, 3, 2)` builds an artifact of these members. `all_programs=True` adds torch.export programs
    and programs for CUDA.
    """
    folder = tmp_path_factory.mktemp("scratch")

    def build_members(*order: int, all_programs: bool = False) -> Path:
        out = folder / f"{'-'.join(map(str, order))}{'-all_programs' if all_programs else ''}.wide"
        if not out.exists():
            build(
                [paths[i] for i in order],
                out,
                model=Net,
                **(SPECS | {"pt2": True, "targets": ("cpu", "cuda")} if all_programs else SPECS),
            )
        return out

    return build_members


@pytest.fixture
def three(scratch: Scratch) -> Path:
    """Returns the artifact of the first three members."""
    return scratch(0, 1, 2)


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "e.wide"))
