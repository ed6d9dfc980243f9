"""Checks the versions and the extra state of a new member against those of an artifact's members.

Without the model's code, a state dict can become a member only if the model takes it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.reader import Reader

from ..errors import MemberMismatch
from .checkpoint import Checkpoint
from .extra_state import NotData, equal
from .member_state import extra_file, extra_of_member
from .state_dict import TensorInfo

_COUNTER = "num_batches_tracked"
_NORM_VERSION = 2  # of the norms of torch, which have the counter since then
_CODE = "name the model, whose code does it: --model in a command, model= in Python"

_COMPARE = "With the model's code its answers are compared: model= in Python, --model in a command"


def with_counters(checkpoint: Checkpoint, expected: Iterable[str]) -> Checkpoint:
    """Returns a checkpoint with the counters of batch norms that files of torch before 1.0 do not have.

    torch's norms add a counter of 0 when they load an older file.
    """
    infos = checkpoint.tensors()
    versions = checkpoint.versions()
    added = {}
    for name in expected:
        path, _, last = name.rpartition(".")
        version = versions.get(path, {}).get("version") or 1
        old = type(version) is int and version < 2  # a file may have anything there
        if (
            name not in infos
            and last == _COUNTER
            and old
            and name[: -len(_COUNTER)] + "running_mean" in infos
        ):
            added[name] = TensorInfo("int64", ())
    if not added:
        return checkpoint

    def read(name: str) -> Tensor:
        return torch.tensor(0) if name in added else checkpoint.get(name)

    return checkpoint.as_loaded({**infos, **added}, read, checkpoint.extra_state(), versions)


def check_versions(artifact: Reader, path: str | Path, checkpoint: Checkpoint) -> None:
    """Refuses a state dict that the model may change when it loads it. Raises: MemberMismatch."""
    record, versions, names = artifact.manifest.state_dicts, checkpoint.versions(), checkpoint.tensors()
    if not record.needed:
        return
    for module, row in record.versions.items():
        have = versions.get(module, {}).get("version", 1) if versions else None
        norm = f"{module}.{_COUNTER}" if module else _COUNTER
        of_torch = norm in names and row.get("version") == _NORM_VERSION
        if have is None or have == row.get("version", 1) or of_torch:
            continue  # of torch's norms, an older version has no counter, and is the same otherwise
        raise MemberMismatch(
            f"checkpoint {path} has version {have} of {module or 'the model'}, and the artifact's members"
            " have"
            f" version {row.get('version', 1)}: the model may convert it when it loads it; {_CODE}"
        )
    if not (record.verbatim if versions else record.verbatim_bare):
        form = "with versions" if versions else "without versions (_metadata)"
        raise MemberMismatch(
            f"checkpoint {path} is a state dict {form}, which the model changes when it loads it; {_CODE}"
        )
    if not record.copies:
        raise MemberMismatch(
            f"checkpoint {path}: the model has code of its own that runs when it loads a state dict (a hook"
            f" or _load_from_state_dict), and may change these weights; {_CODE}"
        )


def extra_names(artifact: Reader) -> list[str]:
    """Returns the names of the extra states of the artifact's members. Raises: ArtifactError."""
    return list(extra_of_member(artifact, extra_file(artifact), 0))


def check_extra(artifact: Reader, path: str | Path, checkpoint: Checkpoint) -> None:
    """Refuses extra state that no member of the artifact has: the programs may depend on it.

    Raises: MemberMismatch.
    """
    own, file = checkpoint.extra_state(), extra_file(artifact)
    if left_out := artifact.manifest.state_dicts.left_out:
        raise MemberMismatch(
            f"checkpoint {path}: the artifact does not store the extra state {', '.join(left_out[:5])}"
            " (--ignore),"
            f" so it cannot be compared, and the model may use it in forward. {_COMPARE}"
        )
    members = artifact.manifest.members
    states = [extra_of_member(artifact, file, i) for i in range(len(members) if file is not None else 1)]
    try:
        if any(equal(own, state) for state in states):
            return
    except NotData as e:
        raise MemberMismatch(f"checkpoint {path}: its extra state contains {e}, which is no data") from None
    names = sorted({*own, *states[0]})
    differing = [n for n in names if not equal({n: own.get(n)}, {n: states[0].get(n)})] or names
    raise MemberMismatch(
        f"checkpoint {path} has other extra state than the members ({', '.join(differing[:5])}), and the"
        f" model may use it in forward. {_COMPARE}"
    )
