"""Opens a checkpoint or an adapter that becomes a member of an artifact, and factors its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.correction import StackedFactors, encode_correction
from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.weights import Weights

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.newcomer import Newcomer, newcomer
from ..checkpoints.state_dict import TensorInfo
from ..errors import MemberMismatch, UsageError
from .adapter_files import is_adapter, read_adapter
from .adapter_members import AdapterMember, check_ties
from .base_record import warn_of_other_base
from .factors import Factors
from .unmerge import unmerge


@dataclass(frozen=True)
class NewFactors:
    """The factors of one weight of a new member.

    left: [O, r]. right: [r, I]. rank: how many of their columns and rows are not padding. correction: with
    which they give the weight bit for bit.
    """

    left: Tensor
    right: Tensor
    rank: int
    correction: bytes


def open_newcomer(
    manifest: Manifest,
    files: Weights,
    path: str | Path,
    key: str | None = None,
    trust_pickle: bool = False,
) -> Newcomer:
    """Opens a checkpoint, or the folder of a LoRA adapter, for an artifact.

    Args:
        manifest: Of the artifact.
        files: Its weights; an adapter changes the base in them.
        path, key, trust_pickle: As `widepack.build` takes them.

    Warns if an adapter names another base model than the adapters of the artifact.

    Raises:
        CheckpointError, MemberMismatch: As `newcomer`.
        UsageError: The path is an adapter, and the artifact has no base.
    """
    if not is_adapter(path):
        return newcomer(manifest, path, key, trust_pickle)
    if not manifest.factored.weights:
        raise UsageError(
            f"{path} is a LoRA adapter, which needs a base, and this artifact stores each member's weights as"
            " they are; merge the adapter into its base, or build the artifact with --base and --adapter"
        )
    return newcomer(manifest, path, opened=adapter_checkpoint(manifest, files, path))


def adapter_checkpoint(
    manifest: Manifest, files: Weights, path: str | Path, base: Checkpoint | None = None
) -> Checkpoint:
    """Returns the member of a LoRA adapter as a checkpoint with the merged weights.

    Args:
        manifest: Of the artifact that has the member, or gets it.
        files: Its weights.
        path: The folder of the adapter.
        base: Of the adapter, under the model's names and in the artifact's dtype; None for the artifact's.

    Warns if the adapter names another base model than the adapters of the artifact.

    Raises:
        CheckpointError: The adapter cannot be read, or changes a weight that the base does not have.
    """
    adapter = read_adapter(path)
    warn_of_other_base(manifest.provenance, adapter)
    check_ties(adapter, [(w.name, *w.aliases) for w in manifest.member_weights if w.aliases])
    return AdapterMember(base or _base_of(manifest, files, path), adapter).checkpoint


def _base_of(manifest: Manifest, files: Weights, path: str | Path) -> Checkpoint:
    """Returns the base of an artifact's members as a checkpoint: what all members share, and the bases."""
    table = {w.name: w for w in manifest.weights}
    stored = {w.name: w.base for w in manifest.factored.weights}
    stored |= {w.name: w.name for w in manifest.member_weights if w.kind == "shared" and w.role != "constant"}
    infos = {n: TensorInfo(table[at].dtype, tuple(table[at].shape)) for n, at in stored.items()}
    return Checkpoint("of the artifact", infos, lambda name: files.get(stored[name]), "", os.stat(path))


def new_factors(
    weight: FactoredWeight, files: Weights, value: Tensor, path: str | Path, room: int | None = None
) -> NewFactors:
    """Returns the factors of a new member's weight over the artifact's base.

    Args:
        weight: The weight.
        files: The artifact's weights.
        value: The member's weight.
        path: Its checkpoint, for messages.
        room: The rank to which the factors are padded; None to keep the artifact's, or a larger one.

    Raises:
        MemberMismatch: The weight is no low-rank fine-tune of the base, or its rank is larger than `room`.
    """
    base, left = files.get(weight.base), files.get(weight.left)
    found = unmerge([value], base, left.dtype)
    if not isinstance(found, Factors):
        raise MemberMismatch(
            f"checkpoint {path}: {weight.name} is no low-rank fine-tune of the artifact's base:"
            f" {found.reason}. The artifact stores this weight as a base and factors; build it again with all"
            " checkpoints"
        )
    most = max(int(left.shape[2]), found.rank) if room is None else room
    if found.rank > most:
        raise MemberMismatch(
            f"checkpoint {path}: {weight.name} has rank {found.rank} over the artifact's base, and the loaded"
            f" factors have {most}; `widepack update` stores larger ones in the artifact"
        )
    pairs = (found.left[0], (found.left.shape[1], most)), (found.right[0], (most, found.right.shape[2]))
    wide_left, wide_right = (_padded(part, shape) for part, shape in pairs)
    stacked = StackedFactors(base, wide_left.unsqueeze(0), wide_right.unsqueeze(0), [found.rank])
    return NewFactors(wide_left, wide_right, found.rank, encode_correction(value, stacked, 0))


def _padded(part: Tensor, shape: tuple[int, int]) -> Tensor:
    wide = torch.zeros(shape, dtype=part.dtype)
    wide[: part.shape[0], : part.shape[1]] = part
    return wide
