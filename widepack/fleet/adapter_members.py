"""Makes members of LoRA adapters and the checkpoint of their base.

The weight of a member that an adapter changes is `base + left @ right`, computed in float64 and rounded once.
The left factor has the adapter's scale in it, in float32. With DoRA, each output is multiplied by a number.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.correction import StackedFactors, rounded

from ..checkpoints.checkpoint import Checkpoint, is_floating
from ..checkpoints.differences import bit_equal
from ..checkpoints.discovery import LeftOut
from ..checkpoints.state_dict import TensorInfo
from ..errors import CheckpointError
from ..spec.dtypes import dtype_of
from .adapter import Adapter, LoraDelta, LowRankDifference, difference_of
from .adapter_config import FILE
from .adapter_files import WEIGHTS, read_adapter
from .factors import Factors, Residual, stack_factors
from .orientation import Turned

_MOST_NAMED = 5
OF_ARTIFACT = "of the artifact"
"""The path of a base that is read from an artifact."""


class AdapterMember:
    """A LoRA adapter over a base.

    Args:
        base: The checkpoint of the base model, under the names of the model.
        adapter: The adapter.
        turned: Which weights the model stores transposed, as far as it is known.

    Attributes:
        checkpoint: The member, as a checkpoint with the merged weights. They are computed when they are read.

    Raises:
        CheckpointError: The adapter changes a weight that the base does not have.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter, turned: Turned | None = None) -> None:
        self._base, self.adapter, self._turned = base, adapter, turned or {}
        known = base.tensors()
        if unknown := [name for name in adapter.deltas if name not in known]:
            more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
            names = f"{', '.join(unknown[:_MOST_NAMED])}{more}"
            if base.path == OF_ARTIFACT:
                raise CheckpointError(
                    f"adapter {adapter.path}: the artifact does not have the base's {names}, since its"
                    " members have weights of their own there; give the base to `widepack append` or `update`"
                    " with --base, or build again"
                )
            raise CheckpointError(
                f"adapter {adapter.path}: the base {base.path} has no {names}; give the base model that the"
                " adapter was trained on"
            )
        infos = dict(known)
        for name, value in adapter.replaced.items():
            dtype = str(value.dtype).removeprefix("torch.")
            if name in known and is_floating(known[name].dtype) and is_floating(dtype):
                dtype = known[name].dtype
            infos[name] = TensorInfo(dtype, tuple(value.shape))
        self._infos = infos
        files = [Path(adapter.path, FILE), *(Path(adapter.path, name) for name in WEIGHTS)]
        found = [(str(file), os.stat(file)) for file in files if file.is_file()]
        self.checkpoint = Checkpoint(
            adapter.path,
            infos,
            self._read,
            found,
            versions=base.versions(),
            extra=base.extra_state(),
        )

    def replaces(self, name: str) -> bool:
        """Returns whether the adapter has a whole tensor in place of the base's."""
        return name in self.adapter.replaced

    def difference(self, name: str, base: Tensor) -> LowRankDifference | None:
        """Returns how the adapter changes a weight of the base; None if it does not, or replaces it.

        base: the weight. Raises: CheckpointError for another shape.
        """
        delta = self.adapter.deltas.get(name)
        return None if delta is None or self.replaces(name) else self._changed(name, base, delta)

    def _changed(self, name: str, weight: Tensor, delta: LoraDelta) -> LowRankDifference:
        """Returns how a delta changes a weight. Raises: CheckpointError for another shape."""
        try:
            return difference_of(weight, delta, self._turned.get(name))
        except CheckpointError as error:
            raise CheckpointError(f"adapter {self.adapter.path}: {name[:200]}: {error}") from None

    def _read(self, name: str) -> Tensor:
        delta, replaced = self.adapter.deltas.get(name), self.adapter.replaced.get(name)
        value = self._base.get(name) if replaced is None else replaced.to(dtype_of(self._infos[name].dtype))
        if delta is None:
            return value
        left, right, scale = self._changed(name, value, delta)
        scales = None if scale is None else scale.unsqueeze(0)
        return rounded(
            StackedFactors(value, left.unsqueeze(0), right.unsqueeze(0), [left.shape[1]], scales), 0
        )


def check_ties(adapter: Adapter, tied: Iterable[Collection[str]]) -> None:
    """Refuses an adapter that changes one name of a tied weight and not the others.

    PEFT computes a tied layer without the difference, and merges it into both.

    Args:
        adapter: The adapter.
        tied: The names of each tied weight.

    Raises:
        CheckpointError: The adapter has a difference of a tied weight, or replaces it under some names only.
    """
    for names in tied:
        changed = [name for name in names if name in adapter.deltas]
        replaced = [adapter.replaced[name] for name in names if name in adapter.replaced]
        whole = len(replaced) == len(names) and all(bit_equal(replaced[0], v) for v in replaced[1:])
        if changed or (replaced and not whole):
            raise CheckpointError(
                f"adapter {adapter.path}: it changes {changed[0] if changed else min(names)}, and the model"
                f" ties {', '.join(sorted(names)[:4])} to one weight; merge the adapter into its base with"
                " PEFT, and build from the merged checkpoints"
            )


def fleet_factors(name: str, base: Tensor, members: Sequence[AdapterMember]) -> Factors | None:
    """Returns the factors of one weight of all members; None if it is no matrix or filter, if a member
    replaces it, or if the members' scales are of different dims.
    """
    if base.ndim < 2 or any(m.replaces(name) for m in members):
        return None
    found = [m.difference(name, base) for m in members]
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    pairs = [None if d is None else (d.left, d.right) for d in found]
    left, right, ranks = stack_factors(pairs, base, dtype)
    shapes = {d.scale.shape for d in found if d is not None and d.scale is not None}
    if len(shapes) > 1:
        return None
    scale = torch.ones(len(members), *shapes.pop(), dtype=dtype) if shapes else None
    for i, d in enumerate(found):
        if scale is not None and d is not None and d.scale is not None:
            scale[i] = d.scale
    return Factors(base, left, right, ranks, Residual(0.0, 0.0), "given", scale)


def read_adapters(paths: Sequence[str]) -> tuple[list[Adapter], list[LeftOut]]:
    """Reads the folders of adapters, in order, and returns why the others are left out."""
    found: list[Adapter] = []
    bad: list[LeftOut] = []
    for i, path in enumerate(paths):
        try:
            found.append(read_adapter(path))
        except CheckpointError as error:
            bad.append(LeftOut(i, path, str(error).removeprefix(f"adapter {path}: ")))
    return found, bad
