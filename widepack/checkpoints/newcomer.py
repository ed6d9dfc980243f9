"""Opens a checkpoint that becomes a member of an existing artifact, and checks it against the artifact's
weights table.

The model's code is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.weight_table import Weight

from ..errors import MemberMismatch
from ..spec.dtypes import dtype_of, find_dtype
from .alignment import Alignment, align
from .differences import mismatch
from .discovery import Checkpoint, open_checkpoint

SHARED, RAGGED, CONSTANT = "shared", "ragged", "constant"


@dataclass(frozen=True)
class Newcomer:
    """A checkpoint that fits an artifact.

    checkpoint: in the artifact's dtype. like: the number of an artifact's member with its shapes. aligned:
    its weights by the table's names. dtype: what its floating weights were converted to, or None.
    """

    checkpoint: Checkpoint
    like: int
    aligned: Alignment
    dtype: torch.dtype | None = None

    def value(self, weight: str) -> Tensor:
        """Returns a weight of the table, mapped if the file allows. Raises: KeyError for a constant."""
        return self.aligned.tensor(0, weight)


def newcomer(
    manifest: Manifest,
    path: str | Path,
    key: str | None = None,
    trust_pickle: bool = False,
    opened: Checkpoint | None = None,
) -> Newcomer:
    """Opens a checkpoint and checks its names, shapes and dtypes against the artifact's.

    key, trust_pickle: as `widepack.build` takes them. opened: the checkpoint, if it is open already.
    Floating weights are converted if the artifact's were
    (`--dtype`).
    Raises: CheckpointError; MemberMismatch with all differences, or if the members have different constants,
    which no checkpoint stores.
    """
    constants = [w.name for w in manifest.member_weights if w.role == CONSTANT and w.kind != SHARED]
    if constants:
        raise MemberMismatch(
            f"checkpoint {path}: the members have different constants ({', '.join(constants[:5])}), which a"
            " checkpoint"
            " does not store: only the model's code makes them; build the artifact again with all its"
            " checkpoints"
        )
    opened = opened or open_checkpoint(path, key, trust_pickle)
    if (dtype := find_dtype(str(manifest.provenance.get("dtype") or "") or None)) is not None:
        opened = opened.as_dtype(dtype)
    ragged = any(w.kind == RAGGED for w in manifest.weights)
    firsts = _one_of_each_shape(manifest)
    whys = []
    for like in firsts:
        expected = _expected(manifest, like)
        if not (why := mismatch(opened, expected, ragged=False, about="--key")):
            return Newcomer(opened, like, align([opened], [str(path)], "none", expected), dtype)
        whys.append(why)
    which = (
        f" (compared with member {manifest.members[firsts[0]].name};"
        f" the members have {len(firsts)} different sets of shapes)"
        if ragged
        else ""
    )
    raise MemberMismatch(
        f"checkpoint {path} is of another model than the artifact's members{which}: {whys[0]} New members"
        " must have the"
        " names, shapes and dtypes of a member; build the artifact again for other checkpoints"
    )


def _one_of_each_shape(manifest: Manifest) -> list[int]:
    """Returns the first member of each set of shapes."""
    rows = [
        tuple(tuple(w.shape[i]) for w in manifest.weights if w.kind == RAGGED)
        for i in range(len(manifest.members))
    ]
    return [rows.index(row) for row in dict.fromkeys(rows)]


def _expected(manifest: Manifest, member: int) -> dict[str, Tensor]:
    """Returns the state dict of a member on the meta device: names, shapes, dtypes and tied weights."""
    found: dict[str, Tensor] = {}
    for w in manifest.member_weights:
        if w.role != CONSTANT:
            one = torch.empty(_shape(w, member), dtype=dtype_of(w.dtype), device="meta")
            found.update(dict.fromkeys((w.name, *w.aliases), one))
    return found


def _shape(w: Weight, member: int) -> list[int]:
    return list(w.shape[member] if w.kind == RAGGED else w.shape)
