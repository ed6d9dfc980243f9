"""Fixtures of the tests of revisions: members, their checkpoints, and artifacts of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from revisions import SPECS, Net, Scratch, member, save
from torch import nn

from widepack import build


@pytest.fixture(scope="session")
def nets() -> list[nn.Module]:
    """Five members with one trunk, and a sixth with another."""
    return [*(member(Net, i) for i in range(5)), member(Net, 5, trunk=7)]


@pytest.fixture(scope="session")
def paths(nets: list[nn.Module], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save(tmp_path_factory.mktemp("ckpts"), nets)


@pytest.fixture(scope="session")
def scratch(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """`scratch(0, 3, 2)` builds an artifact of these members; `whole=True`: with torch.export and CUDA
    programs.
    """
    folder = tmp_path_factory.mktemp("scratch")

    def made(*order: int, whole: bool = False) -> Path:
        out = folder / f"{'-'.join(map(str, order))}{'-whole' if whole else ''}.wide"
        if not out.exists():
            build(
                [paths[i] for i in order],
                out,
                model=Net,
                **(SPECS | {"pt2": True, "targets": ("cpu", "cuda")} if whole else SPECS),
            )
        return out

    return made


@pytest.fixture
def three(scratch: Scratch) -> Path:
    """The artifact of the first three members."""
    return scratch(0, 1, 2)


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "e.wide"))
