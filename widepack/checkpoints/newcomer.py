"""Opens a checkpoint that becomes a member of an existing artifact, and checks it against the artifact's
weights table.

The model's code is needed only for files that the model changes when it loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader
from widepack_artifacts.weight_table import Weight
from widepack_artifacts.weights import Weights

from ..errors import MemberMismatch, UsageError
from ..spec.dtypes import dtype_of, find_dtype
from .alignment import Alignment, align
from .differences import mismatch
from .discovery import Checkpoint, open_checkpoint
from .factory import Factory
from .loading import MemberLoader, in_dtypes_of, patterns_of, without_ignored
from .member_state import extra_file, extra_of_member
from .named_factory import find_factory
from .stored_states import check_extra, check_versions, extra_names, with_counters

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


@dataclass(frozen=True)
class NewcomerRequest:
    """How checkpoints of new members are opened.

    key, trust_pickle, ignore, model, model_args: as `widepack.build` takes them. Without a model, only
    state dicts that the model takes as they are can become members. part: the key of one of several members
    of a file.
    """

    key: str | None = None
    trust_pickle: bool = False
    ignore: tuple[str, ...] = ()
    part: str = ""
    model: str | Callable[..., object] | None = None
    model_args: Mapping[str, Any] | None = None

    def open(self, path: str | Path) -> Checkpoint:
        """Opens a checkpoint. Raises: CheckpointError."""
        found = open_checkpoint(path, self.key, self.trust_pickle)
        found.part = self.part
        return found

    def factory(self, path: str | Path) -> Factory | None:
        """Returns the factory of a checkpoint's member; None if the user names none. Raises: UsageError."""
        if self.model is None:
            if self.model_args:
                raise UsageError("model arguments are given, but no model")
            return None
        return find_factory(self.model, self.model_args, [str(path)])


def opening(
    key: str | None,
    trust_pickle: bool,
    ignore: str | Sequence[str],
    model: str | Callable[..., object] | None,
    model_args: Mapping[str, Any] | None,
) -> NewcomerRequest:
    """Returns how checkpoints are opened. Raises: UsageError for arguments of other types."""
    return NewcomerRequest(key, trust_pickle, patterns_of(ignore), "", model, model_args)


def newcomer(
    artifact: Reader, path: str | Path, how: NewcomerRequest, opened: Checkpoint | None = None
) -> Newcomer:
    """Opens a checkpoint and checks its names, shapes, dtypes, versions and extra state against the
    artifact's.

    opened: the checkpoint, if it is open already. With a model, the checkpoint is loaded as a build does it.
    Without, floating weights are converted to the artifact's dtypes, as a load does it.
    Raises: CheckpointError; MemberMismatch with all differences, or if the members have different constants,
    which no checkpoint stores.
    """
    manifest = artifact.manifest
    if constants := [w.name for w in manifest.member_weights if w.role == CONSTANT and w.kind != SHARED]:
        source = (
            "They are the extra state of the checkpoints"
            if all(_in_extra_state(artifact, name) for name in constants)
            else "The weights of a checkpoint do not give them, only the model's code does"
        )
        raise MemberMismatch(
            f"checkpoint {path}: forward reads constants that differ from member to member"
            f" ({', '.join(constants[:5])}). {source}, and an artifact takes other weights only, also with a"
            " model: build the artifact again with all its checkpoints"
        )
    merged = opened is not None  # an adapter over the artifact's own base
    opened = opened or how.open(path)
    if (dtype := find_dtype(str(manifest.provenance.get("dtype") or "") or None)) is not None:
        opened = opened.as_dtype(dtype)
    factory = None if merged else how.factory(path)
    if factory is not None:
        factory.dtype = dtype
    named = _named(artifact, path, opened, how, factory)
    ragged = any(w.kind == RAGGED for w in manifest.weights)
    firsts = _one_of_each_shape(manifest)
    whys = []
    for like in firsts:
        expected = _expected(manifest, like)
        one = in_dtypes_of(with_counters(named, expected), expected)
        if not (why := mismatch(one, expected, ragged=False, about="--")):
            if factory is None and not merged:
                check_versions(artifact, path, one)
                check_extra(artifact, path, one)
            return Newcomer(one, like, align([one], [str(path)], "none", expected), dtype)
        whys.append(why)
    which = (
        f" (compared with member {manifest.members[firsts[0]].name};"
        f" the members have {len(firsts)} different sets of shapes)"
        if ragged
        else ""
    )
    code = (
        ""
        if factory is not None
        else "; if the model's code renames or changes what it loads, name it: --model"
    )
    raise MemberMismatch(
        f"checkpoint {path} does not fit the artifact's members{which}: {whys[0]} New members must have the"
        f" names, shapes and dtypes of a member; build the artifact again for those of another model{code}"
    )


def _named(
    artifact: Reader, path: str | Path, opened: Checkpoint, how: NewcomerRequest, factory: Factory | None
) -> Checkpoint:
    """Returns a checkpoint under the names of the artifact's members; with a factory, after it was loaded."""
    ignore = (*artifact.manifest.state_dicts.ignored, *how.ignore)
    if factory is not None:
        try:
            return MemberLoader(factory, ignore).load(opened)
        except MemberMismatch as e:
            raise MemberMismatch(f"checkpoint {path}: {e}") from None
    left_out = artifact.manifest.state_dicts.left_out
    names = dict.fromkeys((*_expected(artifact.manifest, 0), *extra_names(artifact), *left_out))
    return without_ignored(opened, names, ignore)


def _in_extra_state(artifact: Reader, constant: str) -> bool:
    """Returns whether a constant of member 0 is a tensor in this member's extra state."""
    manifest = artifact.manifest
    extra = extra_of_member(artifact, extra_file(artifact), 0)
    held = [v for v in tree_leaves(extra) if isinstance(v, Tensor)]
    kind = next(w.kind for w in manifest.member_weights if w.name == constant)
    own = Weights(artifact.weights_files()).of_member(constant, kind, 0)
    return any(t.dtype == own.dtype and torch.equal(t, own) for t in held)


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
