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
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.differences import under_model_names
from ..checkpoints.discovery import open_checkpoint
from ..checkpoints.literals import check_literals
from ..checkpoints.new_member import NewMember, NewMemberRequest, new_member
from ..checkpoints.state_dict import TensorInfo
from ..errors import MemberMismatch, UsageError
from ..spec.dtypes import dtype_of, find_dtype
from .adapter import LowRankDifference, is_adapter, read_adapter
from .adapter_members import (
    OF_ARTIFACT,
    AdapterMember,
    check_ties,
    transposed_in_programs,
    warn_of_other_base,
)
from .factors import Factors
from .unmerge import unmerge


@dataclass(frozen=True)
class NewFactors:
    """The factors of one weight of a new member.

    left: [O, r]. right: [r, I]. rank: how many of their columns and rows are not padding. correction: with
    which they give the weight bit for bit. scale: [O, 1] or [1, I]; None if the artifact stores none.
    """

    left: Tensor
    right: Tensor
    rank: int
    correction: bytes
    scale: Tensor | None = None

    def parts(self, weight: FactoredWeight) -> dict[str, Tensor]:
        """Returns the factors and the scale by the names of the weight's rows."""
        found = {weight.left: self.left, weight.right: self.right}
        return found if self.scale is None else {**found, weight.scale: self.scale}


@dataclass(frozen=True)
class NewAdapterMember(NewMember):
    """An adapter that fits an artifact. member: the adapter over the artifact's base."""

    member: AdapterMember | None = None


def open_new_member(
    artifact: Reader,
    files: Weights,
    path: str | Path,
    how: NewMemberRequest,
    *,
    base: str | Path | None = None,
) -> NewMember:
    """Opens a checkpoint, or the folder of a LoRA adapter, for an artifact.

    Args:
        artifact: The artifact.
        files: Its weights; an adapter changes the base in them.
        path: The checkpoint or the folder.
        how: How checkpoints are opened.
        base: The checkpoint that an adapter changes; None for the artifact's base. A checkpoint needs none.

    Warns if an adapter names another base model than the adapters of the artifact.

    Raises:
        CheckpointError, MemberMismatch: As `new_member`.
        UsageError: The path is an adapter, and there is no base.
    """
    manifest = artifact.manifest
    if not is_adapter(path):
        found = new_member(artifact, path, how)
        check_literals(manifest, files, found, path)
        return found
    if not manifest.factored.weights and base is None:
        raise UsageError(
            f"{path} is a LoRA adapter, which needs a base, and this artifact stores each member's weights as"
            " they are; merge the adapter into its base, or give the base to `widepack append` and `update`"
            " with --base"
        )
    given = None if base is None else open_base(manifest, base, how.key, how.trust_pickle)
    member = adapter_member(artifact, files, path, given)
    found = new_member(artifact, path, how, opened=member.checkpoint)
    check_literals(manifest, files, found, path)
    return NewAdapterMember(found.checkpoint, found.like, found.aligned, found.dtype, member=member)


def open_base(
    manifest: Manifest, path: str | Path, key: str | None = None, trust_pickle: bool = False
) -> Checkpoint:
    """Opens the base of adapters, under the names of an artifact's members and in its dtype.

    Raises: CheckpointError, MemberMismatch.
    """
    like = {
        name: torch.empty(tuple(w.of(0)), dtype=dtype_of(w.dtype), device="meta")
        for w in manifest.member_weights
        if w.role != "constant"
        for name in (w.name, *w.aliases)
    }
    found = under_model_names(open_checkpoint(path, key, trust_pickle), like)
    dtype = find_dtype(str(manifest.provenance.get("dtype") or "") or None)
    return found if dtype is None else found.as_dtype(dtype)


def adapter_member(
    artifact: Reader, files: Weights, path: str | Path, base: Checkpoint | None = None
) -> AdapterMember:
    """Returns the member of a LoRA adapter over the artifact's base or another one.

    Args:
        artifact: The artifact that has the member, or gets it.
        files: Its weights.
        path: The folder of the adapter.
        base: Of the adapter, under the model's names and in the artifact's dtype; None for the artifact's.

    Warns if the adapter names another base model than the adapters of the artifact.

    Raises:
        CheckpointError: The adapter cannot be read, or changes a weight that the base does not have.
    """
    manifest = artifact.manifest
    adapter = read_adapter(path)
    warn_of_other_base(manifest.provenance, adapter)
    check_ties(adapter, [(w.name, *w.aliases) for w in manifest.member_weights if w.aliases])
    return AdapterMember(base or _base_of(manifest, files, path), adapter, transposed_in_programs(artifact))


def _base_of(manifest: Manifest, files: Weights, path: str | Path) -> Checkpoint:
    """Returns the base of an artifact's members as a checkpoint: what all members share, and the bases."""
    table = {w.name: w for w in manifest.weights}
    stored = {w.name: w.base for w in manifest.factored.weights}
    stored |= {w.name: w.name for w in manifest.member_weights if w.kind == "shared" and w.role != "constant"}
    infos = {n: TensorInfo(table[at].dtype, tuple(table[at].shape)) for n, at in stored.items()}
    return Checkpoint(OF_ARTIFACT, infos, lambda name: files.get(stored[name]), [(str(path), os.stat(path))])


def new_factors(
    weight: FactoredWeight, files: Weights, new: NewMember, path: str | Path, room: int | None = None
) -> NewFactors:
    """Returns the factors of a new member's weight over the artifact's base.

    Args:
        weight: The weight.
        files: The artifact's weights.
        new: The member.
        path: Its checkpoint or adapter, for messages.
        room: The rank to which the factors are padded; None to keep the artifact's, or a larger one.

    Raises:
        MemberMismatch: The weight is no low-rank fine-tune of the base, or its rank is larger than `room`.
    """
    base, left = files.get(weight.base), files.get(weight.left)
    scale = None
    if weight.scale:
        scale = torch.ones_like(files.slice(weight.scale, 0))
    own = _of_adapter(new, weight.name, base, left.dtype)
    if own is not None and own.scale is not None:
        if scale is None or scale.shape != own.scale.shape:
            stored = "no scales" if scale is None else f"scales {list(scale.shape)}"
            raise MemberMismatch(
                f"adapter {path}: it has scales {list(own.scale.shape)} for {weight.name} (DoRA), and the"
                f" artifact stores {stored} for this weight; build it again with all adapters"
            )
        scale = own.scale
    correction = None
    if own is None:
        found = unmerge([new.value(weight.name)], base, left.dtype)
        if not isinstance(found, Factors):
            raise MemberMismatch(
                f"checkpoint {path}: {weight.name} is no low-rank fine-tune of the artifact's base:"
                f" {found.reason}. The artifact stores this weight as a base and factors; build it again with"
                " all checkpoints"
            )
        own = LowRankDifference(found.left[0], found.right[0], None)
    else:
        correction = b""
    rank = own.left.shape[1]
    most = max(int(left.shape[2]), rank) if room is None else room
    if rank > most:
        raise MemberMismatch(
            f"checkpoint {path}: {weight.name} has rank {rank} over the artifact's base, and the loaded"
            f" factors have {most}; `widepack update` stores larger ones in the artifact"
        )
    wide_left = _padded(own.left, (own.left.shape[0], most))
    wide_right = _padded(own.right, (most, own.right.shape[1]))
    if correction is None:
        scales = None if scale is None else scale.unsqueeze(0)
        stacked = StackedFactors(base, wide_left.unsqueeze(0), wide_right.unsqueeze(0), [rank], scales)
        correction = encode_correction(new.value(weight.name), stacked, 0)
    return NewFactors(wide_left, wide_right, rank, correction, scale)


def _of_adapter(new: NewMember, name: str, base: Tensor, dtype: torch.dtype) -> LowRankDifference | None:
    """Returns how an adapter changes a weight; None for a checkpoint, for a weight that the adapter replaces,
    and for factors of another dtype.
    """
    member = new.member if isinstance(new, NewAdapterMember) else None
    if member is None or member.replaces(name):
        return None
    found = member.difference(name, base)
    if found is None:
        nothing = torch.zeros(0, dtype=dtype)
        return LowRankDifference(nothing.reshape(base.shape[0], 0), nothing.reshape(0, base[0].numel()), None)
    return found if found.left.dtype == dtype else None


def _padded(part: Tensor, shape: tuple[int, int]) -> Tensor:
    wide = torch.zeros(shape, dtype=part.dtype)
    wide[: part.shape[0], : part.shape[1]] = part
    return wide
