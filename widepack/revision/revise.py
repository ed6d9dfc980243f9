"""Defines `widepack.update`, `append` and `drop`, which change the members of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from widepack_artifacts import manifest as form

from ..checkpoints.discovery import MemberPlace, listed, member_names, places_of
from ..checkpoints.new_member import NewMember, opening
from ..errors import UsageError
from ..spec.names import checkpoint_of, numbers_of, read_names
from ..system.progress import Report
from .request import MemberSlot, Model, PathText, ReviseReport, ReviseRequest
from .transaction import revise


def update(
    path: PathText,
    members: Mapping[int | str, str | Path],
    *,
    out: PathText | None = None,
    force: bool = False,
    key: str | None = None,
    trust_pickle: bool = False,
    ignore: str | Sequence[str] = (),
    base: PathText | None = None,
    model: Model = None,
    model_args: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
    progress: Report | None = None,
) -> ReviseReport:
    """Replaces members of an artifact with other checkpoints.

    The names and the order of the members stay. Every wide program is verified again for all members before
    the result is published.

    Args:
        path: The artifact's folder.
        members: The new checkpoints, `{number or name: checkpoint}`.
        out: The folder to write the result to. Default: `path`; with `out`, the artifact at `path` is
            unchanged.
        force: Whether to replace an artifact at `out`.
        key: Where the state dict is in each file, as in `widepack.build`.
        trust_pickle: Whether to run the code that pickled files name.
        ignore: As in `widepack.build`. What the build ignored is ignored too.
        base: The checkpoint that adapters among the new members change. Default: the artifact's base.
        model: The factory of one member, as in `widepack.build`. If it is given, it loads the checkpoints as
            in a build, and each new member's own module is compared with the captured program.
        model_args: Keyword arguments of the factory.
        max_shard_size: The largest size of a weights file, in bytes or as `"5GB"`. If it is given, all
            weights files are written again. Default: the size that the artifact was built with.
        progress: A function that is called with `(stage, done, total)`.

    Returns:
        A `ReviseReport`.

    Raises:
        UsageError: Arguments are wrong, or a member does not exist.
        CheckpointError: A checkpoint cannot be read.
        MemberMismatch: A checkpoint is of another model. The error lists all differences.
        LoweringError: An op cannot run for all members.
        VerificationError: A program does not give the members' answers. Nothing is published.
        ArtifactError: The artifact is damaged or cannot be written.

    Example:
        >>> report = widepack.update("ens.wide", {3: "new.pt", "worst": "better.pt"})
    """
    if not isinstance(members, Mapping):
        raise UsageError(
            f"members is a {type(members).__name__}; give a dict of members and checkpoints,"
            " for example {3: 'new.pt'}"
        )
    paths = [
        Path(checkpoint_of(value, f"the checkpoint of member {who!r}")) for who, value in members.items()
    ]

    def slots(manifest: form.Manifest, open_new: Callable[[MemberPlace], NewMember]) -> list[MemberSlot]:
        numbers = numbers_of([m.name for m in manifest.members], list(members))
        replaced = dict(zip(numbers, paths))
        return [
            MemberSlot(m.name, i, open_new(MemberPlace(str(replaced[i]), key)) if i in replaced else None)
            for i, m in enumerate(manifest.members)
        ]

    how = opening(key, trust_pickle, ignore, model, model_args)
    changed_base = None if base is None else Path(checkpoint_of(base, "base"))
    return revise(
        ReviseRequest("update", path, slots, out, force, max_shard_size, progress, how, changed_base)
    )


def append(
    path: PathText,
    checkpoints: Sequence[str | Path],
    *,
    names: str | Path | Sequence[str] | None = None,
    out: PathText | None = None,
    force: bool = False,
    key: str | None = None,
    trust_pickle: bool = False,
    ignore: str | Sequence[str] = (),
    base: PathText | None = None,
    model: Model = None,
    model_args: Mapping[str, Any] | None = None,
    max_shard_size: int | str | None = None,
    progress: Report | None = None,
) -> ReviseReport:
    """Adds members at the end of an artifact.

    Every wide program is lowered again for the new number of members, and verified for all members before the
    result is published. Measured plans are left out.

    Args:
        path: The artifact's folder.
        checkpoints: The new members, as in `widepack.build`.
        names: The names of the new members, as in `widepack.build`. No name may be that of a member.
        out: The folder to write the result to. Default: `path`; with `out`, the artifact at `path` is
            unchanged.
        force: Whether to replace an artifact at `out`.
        key: Where the state dict is in each file, as in `widepack.build`.
        trust_pickle: Whether to run the code that pickled files name.
        ignore: As in `widepack.build`. What the build ignored is ignored too.
        base: The checkpoint that adapters among the new members change. Default: the artifact's base.
        model: The factory of one member, as in `widepack.build`. If it is given, it loads the checkpoints as
            in a build, and each new member's own module is compared with the captured program.
        model_args: Keyword arguments of the factory.
        max_shard_size: The largest size of a weights file, in bytes or as `"5GB"`. Default: the size that the
            artifact was built with.
        progress: A function that is called with `(stage, done, total)`.

    Returns:
        A `ReviseReport`.

    Raises:
        UsageError: Arguments are wrong, or a member has one of the names.
        CheckpointError: A checkpoint cannot be read.
        MemberMismatch: A checkpoint is of another model. The error lists all differences.
        LoweringError: An op cannot run for all members.
        VerificationError: A program does not give the members' answers. Nothing is published.
        ArtifactError: The artifact is damaged or cannot be written.

    Example:
        >>> report = widepack.append("ens.wide", ["d.pt", "e.pt"], names=["d", "e"])
    """
    paths = listed(checkpoints, "widepack append ens.wide new.pt")
    places = places_of(paths, key, trust_pickle)
    new_names = (
        read_names(names, len(places)) if names is not None else member_names([p.name for p in places])
    )

    def slots(manifest: form.Manifest, open_new: Callable[[MemberPlace], NewMember]) -> list[MemberSlot]:
        old_names = [m.name for m in manifest.members]
        if taken := [name for name in new_names if name in old_names]:
            raise UsageError(
                f"{', '.join(taken)}: a member of {path} has this name already; give the new members other"
                " names (names=[...], --names), or replace the member with widepack update"
            )
        kept = [MemberSlot(name, i) for i, name in enumerate(old_names)]
        return kept + [
            MemberSlot(name, k % len(old_names), open_new(place))
            for k, (name, place) in enumerate(zip(new_names, places))
        ]

    how = opening(key, trust_pickle, ignore, model, model_args)
    changed_base = None if base is None else Path(checkpoint_of(base, "base"))
    return revise(
        ReviseRequest("append", path, slots, out, force, max_shard_size, progress, how, changed_base)
    )


def drop(
    path: PathText,
    members: Sequence[int | str],
    *,
    out: PathText | None = None,
    force: bool = False,
    max_shard_size: int | str | None = None,
    progress: Report | None = None,
) -> ReviseReport:
    """Removes members from an artifact.

    Every wide program is lowered again for the new number of members, and verified for all members before the
    result is published. Measured plans are left out.

    Args:
        path: The artifact's folder.
        members: The numbers or names of the members to remove. At least one member must remain.
        out: The folder to write the result to. Default: `path`; with `out`, the artifact at `path` is
            unchanged.
        force: Whether to replace an artifact at `out`.
        max_shard_size: The largest size of a weights file, in bytes or as `"5GB"`. Default: the size that the
            artifact was built with.
        progress: A function that is called with `(stage, done, total)`.

    Returns:
        A `ReviseReport`.

    Raises:
        UsageError: Arguments are wrong, a member does not exist, or no member would remain.
        LoweringError: An op cannot run for all members.
        VerificationError: A program does not give the members' answers. Nothing is published.
        ArtifactError: The artifact is damaged or cannot be written.

    Example:
        >>> report = widepack.drop("ens.wide", [0, "worst"])
    """

    def slots(manifest: form.Manifest, open_new: Callable[[MemberPlace], NewMember]) -> list[MemberSlot]:
        removed = set(numbers_of([m.name for m in manifest.members], members))
        if len(removed) == len(manifest.members):
            raise UsageError(
                f"drop names all {len(removed)} members of {path}, but an artifact has at least one;"
                " remove the folder instead"
            )
        return [MemberSlot(m.name, i) for i, m in enumerate(manifest.members) if i not in removed]

    return revise(ReviseRequest("drop", path, slots, out, force, max_shard_size, progress))
