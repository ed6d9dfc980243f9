"""Compares the weights of an artifact with checkpoints and adapters that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widepack_artifacts.errors import some
from widepack_bench.text import plural

if TYPE_CHECKING:
    from torch import Tensor

    from widepack.checkpoints.checkpoint import Checkpoint
    from widepack_artifacts.reader import Reader
    from widepack_artifacts.weights import Weights

_SHOWN = 8


@dataclass(frozen=True)
class GivenMembers:
    """The checkpoints that the members of an artifact are compared with, in the order of the members.

    adapters: how many of them are adapters. base: what these change. files: the artifact's weights.
    """

    checkpoints: Sequence[Checkpoint]
    adapters: int
    base: str
    files: Weights


def given_members(
    artifact: Path,
    ens: Any,
    paths: Sequence[str],
    base: str | None,
    key: str | None,
    trust: bool,
    factory: Any = None,
) -> GivenMembers:
    """Opens checkpoints and folders of adapters.

    Args:
        artifact: The artifact.
        ens: The artifact, loaded.
        paths: The checkpoints and adapters.
        base: The checkpoint of the adapters' base; None for the artifact's base.
        key, trust: As `widepack.build` takes them.
        factory: The factory of a member, which loads the checkpoints as a build does; None without one.

    Raises:
        UsageError: A base is given without an adapter, or is needed.
        VerificationError: There are more or fewer checkpoints than members.
        CheckpointError: A checkpoint or an adapter cannot be read.
    """
    from widepack.checkpoints.discovery import listed, open_all, places_of
    from widepack.errors import UsageError, VerificationError
    from widepack.fleet.adapter import is_adapter
    from widepack_artifacts.reader import Reader
    from widepack_artifacts.weights import Weights

    from .member_paths import expand

    found = expand(tuple(paths)) if paths else []
    adapters = [path for path in found if is_adapter(path)]
    if base is not None and not adapters:
        raise UsageError(f"--base {base} is given, but no adapter among CKPT; leave --base out")
    checkpoints = [path for path in found if path not in adapters]
    places = places_of(listed(checkpoints), key, trust) if checkpoints else []
    if len(places) + len(adapters) != len(ens):
        raise VerificationError(
            f"checkpoints: {len(places) + len(adapters)} were given, the artifact has {len(ens)} members: "
            f"{some(ens.members, 20)}"
        )
    reader = Reader(artifact, expect=ens.manifest.digest)
    files = Weights(reader.weights_files())
    whole = _loaded(ens, open_all(places, trust), factory) if places else []
    if adapters:
        opened = {place.path: checkpoint for place, checkpoint in zip(places, whole)}
        opened |= _adapters(ens, reader, files, adapters, base, key, trust)
        whole = [opened[path] for path in found]
    return GivenMembers(whole, len(adapters), base or "the artifact's base", files)


def _loaded(ens: Any, checkpoints: Sequence[Checkpoint], factory: Any) -> list[Checkpoint]:
    """Returns the states of members after their checkpoints were loaded, as far as the model's code is known.

    Raises: VerificationError.
    """
    from widepack.checkpoints.loading import MemberLoader, with_counters, without_ignored
    from widepack.errors import MemberMismatch, VerificationError

    ignore = ens.manifest.state_dicts.ignored
    if factory is None:
        states = [ens.stored_state(name) for name in ens.members]
        return [with_counters(without_ignored(c, s, ignore), s) for c, s in zip(checkpoints, states)]
    loader = MemberLoader(factory, ignore)
    try:
        return [loader.load(checkpoint) for checkpoint in checkpoints]
    except MemberMismatch as e:
        raise VerificationError(f"checkpoints: {e}") from None


def _adapters(
    ens: Any,
    reader: Reader,
    files: Weights,
    paths: Sequence[str],
    base: str | None,
    key: str | None,
    trust: bool,
) -> dict[str, Checkpoint]:
    """Returns the member of each adapter as a checkpoint, by path. Raises: UsageError, CheckpointError."""
    from widepack.errors import UsageError
    from widepack.fleet.open_member import adapter_member, open_base

    manifest, given = ens.manifest, None
    if base is not None:
        given = open_base(manifest, base, key, trust)
    elif not ens.manifest.factored.weights:
        raise UsageError(
            f"{paths[0]} is a LoRA adapter, and the artifact stores each member's weights as they are;"
            " give the adapter's base with --base"
        )
    return {path: adapter_member(reader, files, path, given).checkpoint for path in paths}


def same_weights(ens: Any, given: GivenMembers) -> str:
    """Compares the members' weights with those of checkpoints.

    A tied weight has one of its names in a checkpoint. Floating weights that the build converted are
    converted here too.

    Args:
        ens: The artifact, loaded.
        given: The checkpoints.

    Returns:
        What was compared, for people.

    Raises:
        VerificationError: A weight differs; the message lists up to eight.
    """
    from widepack.checkpoints.differences import bit_equal
    from widepack.checkpoints.state_dict import is_extra_state
    from widepack.errors import VerificationError

    near = _Approximate(ens, given.files)
    tied = [{w.name, *w.aliases} for w in ens.manifest.member_weights if w.aliases]
    wrong: list[str] = []
    converted: set[str] = set()
    count = 0
    for name, checkpoint in zip(ens.members, given.checkpoints, strict=True):
        state = {k: v for k, v in ens.stored_state(name).items() if not is_extra_state(k)}
        weights = {k: checkpoint.get(k) for k in checkpoint.tensors()}
        count += len(weights)
        missing = sorted(
            k
            for k in set(state) - set(weights)
            if not any(k in names and names & set(weights) for names in tied)
        )
        wrong += [f"member {name}: {k} is not in {checkpoint.path}" for k in missing]
        wrong += [
            f"member {name}: {k} of {checkpoint.path} is not in the artifact"
            for k in sorted(set(weights) - set(state))
        ]
        for k in sorted(set(weights) & set(state)):
            theirs, mine = weights[k], state[k]
            if theirs.dtype != mine.dtype and theirs.is_floating_point() and mine.is_floating_point():
                theirs = theirs.to(mine.dtype)
                converted.add(str(mine.dtype).removeprefix("torch."))
            if not bit_equal(mine, theirs) and not near.accepts(name, k, mine, theirs):
                wrong.append(f"member {name}: {k} differs from {checkpoint.path}")
    if wrong:
        base = f", and the base of the adapters with --base (here: {given.base})" if given.adapters else ""
        raise VerificationError(
            f"checkpoints: {some(wrong, _SHOWN, '; ')}."
            f" Give the checkpoints in the order of the members{base}; and --model, if the model changes"
            " checkpoints when it loads them"
        )
    to = f", converted to {', '.join(sorted(converted))}" if converted else ""
    over = f" ({plural(given.adapters, 'adapter')} over {given.base})" if given.adapters else ""
    return (
        f"{plural(count, 'tensor')} of {plural(len(given.checkpoints), 'checkpoint')}{over}, bit for bit{to}"
        f"{near.found()}"
    )


class _Approximate:
    """The weights of an artifact that differ from the checkpoints' within a declared tolerance.

    ens: the artifact, loaded. files: its weights.
    """

    def __init__(self, ens: Any, files: Weights) -> None:
        from widepack.verification.record import read_approximations

        self._files, self._accepted = files, 0
        self._tolerances: dict[tuple[str, str], float] = {}
        self._bases = {n: w.base for w in ens.manifest.factored.weights for n in (w.name, *w.aliases)}
        for one in read_approximations(ens.manifest.verification):
            names = [n for n in one.weights if n in self._bases]
            self._tolerances |= {(row.member, n): one.tolerance for row in one.rows for n in names}

    def accepts(self, member: str, weight: str, mine: Tensor, theirs: Tensor) -> bool:
        """Returns whether a weight is approximate, and is as near to the checkpoint's as was declared."""
        tolerance = self._tolerances.get((member, weight))
        if tolerance is None or mine.shape != theirs.shape:
            return False
        base = self._files.get(self._bases[weight]).double()
        error, effect = (mine.double() - theirs.double()).norm(), (theirs.double() - base).norm()
        near = bool(error <= tolerance * effect)
        self._accepted += near
        return near

    def found(self) -> str:
        """Returns the end of the sentence for people: how many weights are approximate."""
        if not self._accepted:
            return ""
        most = max(self._tolerances.values())
        return (
            f", but {plural(self._accepted, 'approximate weight')}, within {most:g} of what the fine-tunes"
            " change in them"
        )
