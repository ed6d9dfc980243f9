"""Makes members of LoRA adapters and the checkpoint of their base.

The weight of a member that an adapter changes is `base + scale * left @ right`, computed in float64 and
rounded once. That of DoRA is computed as PEFT does.
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
from .adapter import Adapter, LoraDelta, is_transposed, merged
from .adapter_config import FILE
from .adapter_files import WEIGHTS, read_adapter
from .factors import Factors, Residual

_MOST_NAMED = 5


class AdapterMember:
    """A LoRA adapter over a base.

    Args:
        base: The checkpoint of the base model, under the names of the model.
        adapter: The adapter.

    Attributes:
        checkpoint: The member, as a checkpoint with the merged weights. They are computed when they are read.

    Raises:
        CheckpointError: The adapter changes a weight that the base does not have.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base, self.adapter = base, adapter
        known = base.tensors()
        if unknown := [name for name in adapter.deltas if name not in known]:
            more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
            raise CheckpointError(
                f"adapter {adapter.path}: the base {base.path} has no"
                f" {', '.join(unknown[:_MOST_NAMED])}{more}; give the base model that the adapter was"
                " trained on"
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
        self.checkpoint = Checkpoint(adapter.path, infos, self._read, "", found[0][1], files=found)

    def delta(self, name: str) -> LoraDelta | None:
        """Returns the low-rank difference of a weight from the base; None if there is none."""
        return self.adapter.deltas.get(name)

    def factors_over_base(self, name: str) -> bool:
        """Returns whether a weight of this member is the base's weight with a low-rank difference, or without
        one.
        """
        delta = self.delta(name)
        return name not in self.adapter.replaced and (delta is None or delta.magnitude is None)

    def _read(self, name: str) -> Tensor:
        delta, replaced = self.adapter.deltas.get(name), self.adapter.replaced.get(name)
        value = self._base.get(name) if replaced is None else replaced.to(dtype_of(self._infos[name].dtype))
        if delta is None:
            return value
        if delta.magnitude is not None:
            return merged(value, delta)
        left, right = factors_of(value, delta)
        return rounded(StackedFactors(value, left.unsqueeze(0), right.unsqueeze(0), [left.shape[1]]), 0)


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


def factors_of(weight: Tensor, delta: LoraDelta) -> tuple[Tensor, Tensor]:
    """Returns the factors of a difference, [O, r] and [r, I], with the scale in the left one.

    weight: the base's, seen as the matrix `weight.flatten(1)`. Raises: CheckpointError for another shape.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    left, right = delta.left.to(dtype) * delta.scale, delta.right.to(dtype)
    if is_transposed(weight, delta):
        left, right = right.t(), left.t()
    return left.contiguous(), right.contiguous()


def fleet_factors(name: str, base: Tensor, members: Sequence[AdapterMember]) -> Factors | None:
    """Returns the factors of one weight of all members; None if a member has no low-rank difference of it."""
    if not all(m.factors_over_base(name) for m in members):
        return None
    pairs = [None if (delta := m.delta(name)) is None else factors_of(base, delta) for m in members]
    ranks = [0 if pair is None else pair[0].shape[1] for pair in pairs]
    rows = base.flatten(1)
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    left = torch.zeros(len(members), rows.shape[0], max(ranks), dtype=dtype)
    right = torch.zeros(len(members), max(ranks), rows.shape[1], dtype=dtype)
    for i, pair in enumerate(pairs):
        if pair is not None:
            left[i, :, : ranks[i]], right[i, : ranks[i]] = pair
    return Factors(base, left, right, ranks, Residual(0.0, 0.0), "given")


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
