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
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from widepack_artifacts.errors import some
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

from ..errors import MemberMismatch, UsageError
from ..spec.dtypes import dtype_of, find_dtype
from .alignment import Alignment, align, signatures_of
from .checkpoint import Checkpoint
from .differences import mismatch
from .discovery import checkpoint_in_memory, open_checkpoint
from .eval_mode import in_eval_mode
from .extra_state import NotData, differing_names, equal, extra_file, extra_of_member
from .factory import Factory
from .loading import COUNTER, MemberLoader, in_dtypes_of, load, patterns_of, with_counters, without_ignored
from .named_factory import find_factory

SHARED, RAGGED, CONSTANT = "shared", "ragged", "constant"
_NORM_VERSION = 2  # of the norms of torch, which have the counter since then
_CODE = "name the model, whose code does it: --model in a command, model= in Python"
_COMPARE = "With the model's code its answers are compared: model= in Python, --model in a command"


@dataclass(frozen=True)
class NewMember:
    """A checkpoint that fits an artifact.

    checkpoint: in the artifact's dtype. like: the number of an artifact's member with its shapes. aligned:
    its weights by the table's names. dtype: what its floating weights were converted to, or None.
    set_by_eval: what `eval()` of its module sets beside the weights.
    """

    checkpoint: Checkpoint
    like: int
    aligned: Alignment
    dtype: torch.dtype | None = None
    set_by_eval: tuple[str, ...] = ()

    def value(self, weight: str) -> Tensor:
        """Returns a weight of the table, mapped if the file allows. Raises: KeyError for a constant."""
        return self.aligned.tensor(0, weight)


@dataclass(frozen=True)
class NewMemberRequest:
    """How checkpoints of new members are opened.

    key, trust_pickle, ignore, model, model_args: as `widepack.build` takes them. Without a model, only
    state dicts that the model takes as they are can become members. part: the key of one of several members
    of a file. state: a state dict in memory, which is opened in the place of a file; else None.
    """

    key: str | None = None
    trust_pickle: bool = False
    ignore: tuple[str, ...] = ()
    part: str = ""
    model: str | Callable[..., object] | None = None
    model_args: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None

    def open(self, path: str | Path) -> Checkpoint:
        """Opens a checkpoint. Raises: CheckpointError."""
        if self.state is not None:
            return checkpoint_in_memory(self.state, str(path), self.key)
        checkpoint = open_checkpoint(path, self.key, self.trust_pickle)
        checkpoint.part = self.part
        return checkpoint

    def factory(self, path: str | Path) -> Factory | None:
        """Returns the factory of a checkpoint's member; None if the user names none. Raises: UsageError."""
        if self.model is None:
            if self.model_args:
                raise UsageError("model arguments are given, but no model")
            return None
        return find_factory(self.model, self.model_args, [str(path)])


def opening(
    key: str | None = None,
    trust_pickle: bool = False,
    ignore: str | Sequence[str] = (),
    model: str | Callable[..., object] | None = None,
    model_args: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> NewMemberRequest:
    """Returns how checkpoints are opened. Raises: UsageError for arguments of other types."""
    return NewMemberRequest(key, trust_pickle, patterns_of(ignore), "", model, model_args, state)


def new_member(
    artifact: Reader, path: str | Path, how: NewMemberRequest, opened: Checkpoint | None = None
) -> NewMember:
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
            f" ({some(constants)}). {source}, and an artifact takes other weights only, also with a"
            " model: build the artifact again with all its checkpoints"
        )
    merged = opened is not None  # an adapter over the artifact's own base
    opened = opened or how.open(path)
    if (dtype := find_dtype(str(manifest.provenance.get("dtype") or "") or None)) is not None:
        opened = opened.as_dtype(dtype)
    factory = None if merged else how.factory(path)
    if factory is not None:
        factory.dtype = dtype
    named, set_by_eval = _named(artifact, path, opened, how, factory)
    signatures = signatures_of(manifest.weights, len(manifest.members))
    firsts = [signatures.index(i) for i in dict.fromkeys(signatures)]  # a member with each set of shapes
    whys = []
    for like in firsts:
        expected = _expected(manifest, like)
        one = in_dtypes_of(with_counters(named, expected), expected)
        if not (why := mismatch(one, expected, ragged=False, about="--")):
            if factory is None and not merged:
                check_versions(artifact, path, one)
                check_extra(artifact, path, one)
            aligned = align([one], [str(path)], "none", expected)
            return NewMember(one, like, aligned, dtype, set_by_eval)
        whys.append(why)
    which = code = ""
    if any(w.kind == RAGGED for w in manifest.weights):
        name = manifest.members[firsts[0]].name
        which = f" (compared with member {name}; the members have {len(firsts)} different sets of shapes)"
    if factory is None:
        way = "model=, or --model of widepack update"
        code = f"; if the model's code renames or changes what it loads, name it: {way}"
    raise MemberMismatch(
        f"checkpoint {path} does not fit the artifact's members{which}: {whys[0]} New members must have the"
        f" names, shapes and dtypes of a member; build the artifact again for those of another model{code}"
    )


def _named(
    artifact: Reader, path: str | Path, opened: Checkpoint, how: NewMemberRequest, factory: Factory | None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Returns a checkpoint under the names of the artifact's members; with a factory, after it was loaded.

    Also returns what `eval()` of its module sets beside the weights.
    """
    ignore = (*artifact.manifest.state_dicts.ignored, *how.ignore)
    if factory is not None:
        try:
            loader = MemberLoader(factory, ignore)
            loaded = loader.load(opened)
            # of a member of the artifact, though not of this one
            also = loader.own_mode and loader.plain and not artifact.manifest.state_dicts.copies
            return loaded, tuple(loader.set_by_eval) or (("values",) if also else ())
        except MemberMismatch as e:
            raise MemberMismatch(f"checkpoint {path}: {e}") from None
    extra = extra_of_member(artifact, extra_file(artifact), 0)
    left_out = artifact.manifest.state_dicts.left_out
    names = dict.fromkeys((*_expected(artifact.manifest, 0), *extra, *left_out))
    return without_ignored(opened, names, ignore), ()


def _in_extra_state(artifact: Reader, constant: str) -> bool:
    """Returns whether a constant of member 0 is a tensor in this member's extra state."""
    manifest = artifact.manifest
    extra = extra_of_member(artifact, extra_file(artifact), 0)
    held = [v for v in tree_leaves(extra) if isinstance(v, Tensor)]
    kind = next(w.kind for w in manifest.member_weights if w.name == constant)
    own = Weights(artifact.weights_files()).of_member(constant, kind, 0)
    return any(t.dtype == own.dtype and torch.equal(t, own) for t in held)


def _expected(manifest: Manifest, member: int) -> dict[str, Tensor]:
    """Returns the state dict of a member on the meta device: names, shapes, dtypes and tied weights."""
    state: dict[str, Tensor] = {}
    for w in manifest.member_weights:
        if w.role != CONSTANT:
            one = torch.empty(w.of(member), dtype=dtype_of(w.dtype), device="meta")
            state.update(dict.fromkeys((w.name, *w.aliases), one))
    return state


def check_versions(artifact: Reader, path: str | Path, checkpoint: Checkpoint) -> None:
    """Refuses a state dict that the model may change when it loads it. Raises: MemberMismatch."""
    record, versions, names = artifact.manifest.state_dicts, checkpoint.versions(), checkpoint.tensors()
    if not record.needed:
        return
    for module, row in record.versions.items():
        have = versions.get(module, {}).get("version", 1) if versions else None
        norm = f"{module}.{COUNTER}" if module else COUNTER
        of_torch = norm in names and row.get("version") == _NORM_VERSION
        if have is None or have == row.get("version", 1) or of_torch:
            continue  # of torch's norms, an older version has no counter, and is the same otherwise
        raise MemberMismatch(
            f"checkpoint {path} has version {have} of {module or 'the model'}, and the artifact's members "
            f"have version {row.get('version', 1)}: the model may convert it when it loads it; {_CODE}"
        )
    if not (record.verbatim if versions else record.verbatim_bare):
        form = "with versions" if versions else "without versions (_metadata)"
        raise MemberMismatch(
            f"checkpoint {path} is a state dict {form}, which the model changes when it loads it; {_CODE}"
        )
    if not record.copies:
        raise MemberMismatch(
            f"checkpoint {path}: the model has code of its own that runs when it loads a state dict (a hook"
            " or _load_from_state_dict) or computes values in eval(), and what it makes of these weights is"
            f" not known; {_CODE}"
        )


def check_extra(artifact: Reader, path: str | Path, checkpoint: Checkpoint) -> None:
    """Refuses extra state that no member of the artifact has: the programs may depend on it.

    Raises: MemberMismatch.
    """
    own, file = checkpoint.extra_state(), extra_file(artifact)
    if left_out := artifact.manifest.state_dicts.left_out:
        raise MemberMismatch(
            f"checkpoint {path}: the artifact does not store the extra state {some(left_out)} "
            f"(--ignore), so it cannot be compared, and the model may use it in forward. {_COMPARE}"
        )
    members = artifact.manifest.members
    states = [extra_of_member(artifact, file, i) for i in range(len(members) if file is not None else 1)]
    try:
        if any(equal(own, state) for state in states):
            return
    except NotData as e:
        raise MemberMismatch(f"checkpoint {path}: its extra state contains {e}, which is no data") from None
    names = differing_names(own, states[0]) or sorted({*own, *states[0]})
    raise MemberMismatch(
        f"checkpoint {path} has other extra state than the members ({some(names)}), and the"
        f" model may use it in forward. {_COMPARE}"
    )


def with_extra(factory: Factory, new: NewMember, extra: Mapping[str, Any]) -> nn.Module:
    """Returns a new member's module in eval mode, with its own weights and other extra state."""
    checkpoint = new.aligned.checkpoints[0]
    given = checkpoint.given or checkpoint
    module, state = factory.fresh(checkpoint), given.state_dict()
    state.update(extra)
    load(module, given, state)
    return in_eval_mode(module)
