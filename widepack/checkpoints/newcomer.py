"""A checkpoint that is to become a member of an artifact that is there: held to the artifact's table of weights, without the model's code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest, Weight

from .discovery import Checkpoint, open_checkpoint
from ..ir.encoding import dtype_of
from ..errors import MemberMismatch
from .alignment import Alignment, align, mismatch
from ..building.factories import find_dtype

SHARED, RAGGED, CONSTANT = "shared", "ragged", "constant"


@dataclass(frozen=True)
class Newcomer:
    """A checkpoint that fits an artifact.

    checkpoint: as it was opened, in the artifact's dtype. like: the number of a member of the artifact whose shapes it has. aligned: its weights by the table's names.
    dtype: what its floating weights were converted to, or None.
    """

    checkpoint: Checkpoint
    like: int
    aligned: Alignment
    dtype: torch.dtype | None = None

    def value(self, weight: str) -> Tensor:
        """A weight of the table that checkpoints hold, mapped where the file allows. Raises: KeyError for a constant."""
        return self.aligned.tensor(0, weight)


def newcomer(manifest: Manifest, path: str | Path, key: str | None = None, trust_pickle: bool = False) -> Newcomer:
    """Open a checkpoint and hold its names, shapes and dtypes to the artifact's.

    key, trust_pickle: as `widepack.build` takes them. Floating weights are converted where the artifact's were (`--dtype`).
    Raises: CheckpointError; MemberMismatch with all differences, or where members have constants of their own, which no checkpoint holds.
    """
    own = [w.name for w in manifest.weights if w.role == CONSTANT and w.kind != SHARED]
    if own:
        raise MemberMismatch(
            f"checkpoint {path}: the members have constants of their own ({', '.join(own[:5])}), which a checkpoint does not hold: only the model's code makes them; "
            "build the artifact again with all its checkpoints"
        )
    opened = open_checkpoint(path, key, trust_pickle)
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
    which = f" (held to member {manifest.members[firsts[0]].name}; the members have {len(firsts)} different sets of shapes)" if ragged else ""
    raise MemberMismatch(
        f"checkpoint {path} is of another model than the artifact's members{which}: {whys[0]} Newcomers have the names, shapes and dtypes of a member; build the artifact again for others"
    )


def _one_of_each_shape(manifest: Manifest) -> list[int]:
    """The first member of each set of shapes."""
    rows = [tuple(tuple(w.shape[i]) for w in manifest.weights if w.kind == RAGGED) for i in range(len(manifest.members))]
    return [rows.index(row) for row in dict.fromkeys(rows)]


def _expected(manifest: Manifest, member: int) -> dict[str, Tensor]:
    """What stands for the state dict of a member's module: names, shapes, dtypes and ties, without memory."""
    found: dict[str, Tensor] = {}
    for w in manifest.weights:
        if w.role != CONSTANT:
            one = torch.empty(_shape(w, member), dtype=dtype_of(w.dtype), device="meta")
            found.update(dict.fromkeys((w.name, *w.aliases), one))
    return found


def _shape(w: Weight, member: int) -> list[int]:
    return list(w.shape[member] if w.kind == RAGGED else w.shape)
