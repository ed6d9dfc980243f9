"""Builds an artifact of live members: an ordinary build of their state dicts, verified as every build.

For N passes of one model it builds from one state dict.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from ..building.build import build
from ..building.report import BuildReport
from ..building.write import refuse_code
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.factory import Factory
from ..checkpoints.loading import module_state
from ..checkpoints.state_dict import is_extra_state
from .members import FusedMembers
from .recipe import FusedRecipe


class LiveMemberFactory(Factory):
    """The factory of members that exist already.

    Args:
        name: The name of their class.
        paths: The checkpoint of each member.
        make: Returns a copy of a member by its number.
    """

    brings_weights = True

    def __init__(self, name: str, paths: Sequence[str], make: Callable[[int], nn.Module]) -> None:
        super().__init__(name, lambda: make(0), {})
        self._numbers = {path: i for i, path in enumerate(paths)}
        self._copy_of = make

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """Returns the member of a checkpoint in the fused module's mode, with its own plain attributes."""
        module = self._copy_of(self._numbers[checkpoint.path])
        return module if self.dtype is None else module.to(self.dtype)


def save(
    fused: FusedMembers,
    recipe: FusedRecipe,
    path: str | PathLike[str],
    names: Sequence[str] | None,
    force: bool,
    pt2: bool,
) -> BuildReport:
    """Builds an artifact of live members. See `Fused.save`."""
    count, call = len(fused), fused.sample()
    members = [fused.member(i, "cpu") for i in range(1 if recipe.one_model else count)]
    names = list(names or map(str, range(count)))
    with tempfile.TemporaryDirectory(prefix="widepack-") as folder:
        paths = [str(Path(folder) / f"{i}.pt") for i in range(len(members))]
        for file, member, own in zip(paths, members, names):
            state = module_state(member)
            refuse_code({k: v for k, v in state.items() if is_extra_state(k)}, f"member {own}")
            torch.save(state, file)
        name = type(members[0]).__qualname__
        return build(
            paths,
            Path(path),
            model=LiveMemberFactory(name, paths, lambda i: fused.member(i, "cpu")),
            names=names,
            sample=call.args,
            sample_kwargs=call.kwargs,
            dynamic=recipe.dynamic,
            strategy=recipe.strategies,
            force=force,
            pt2=pt2,
            dropout="on" if recipe.dropout else "off",
            n=count if recipe.one_model else None,
        )
