"""`fused.save`: the members of a fused module, as they are now, as an artifact: an ordinary build of N state dicts (of one, for N passes of it), verified as every one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..building.build import BuildReport, build
from ..checkpoints.discovery import Checkpoint
from ..checkpoints.alignment import Factory


class LiveMembers(Factory):
    """The factory of members that are there already. paths: their checkpoints. make: a copy of member i in eval mode."""

    def __init__(self, name: str, paths: Sequence[str], make: Callable[[int], nn.Module]) -> None:
        super().__init__(name, lambda: make(0), {})
        self._numbers = {path: i for i, path in enumerate(paths)}
        self._member = make

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """The very member of a checkpoint: what is no weight is its own too."""
        module = self._member(self._numbers[checkpoint.path]).eval()
        return module if self.dtype is None else module.to(self.dtype)


def save(
    path: str | Path, name: str, members: Sequence[nn.Module], make: Callable[[int], nn.Module], names: Sequence[str], **options: Any
) -> BuildReport:
    """Build an artifact of live members. name: of their class. make: a fresh copy of member i, on the CPU. names: of all, more than members for passes of one. options: of `build`."""
    with tempfile.TemporaryDirectory(prefix="widepack-") as folder:
        paths = [str(Path(folder) / f"{i}.pt") for i in range(len(members))]
        for place, member in zip(paths, members):
            torch.save(member.state_dict(), place)
        return build(paths, path, model=LiveMembers(name, paths, make), names=list(names), **options)
