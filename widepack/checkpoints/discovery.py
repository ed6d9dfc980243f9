"""Opens the checkpoints that a user names, and derives the members' names from their paths.

A checkpoint is one file, recognized by its content (open_file.py), or several files (shards.py): an index of
shards as Hugging Face writes it for safetensors and `.bin`, or a folder with an index or one file of weights.
state_dict.py finds the weights in a file.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from widepack_artifacts.errors import plain

from ..errors import CheckpointError, UsageError
from ..spec.names import checkpoint_of
from .checkpoint import Checkpoint, Content
from .member_keys import is_pattern, keys_in
from .shards import read_content
from .state_dict import RefusedFile

_KEY_PARTS = re.compile(r"[.\[]")
SUFFIXES = (".npz", ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pt2")


class LeftOut(NamedTuple):
    """A checkpoint that was left out, and why. number: its place among the given checkpoints."""

    number: int
    path: str
    why: str


class MemberPlace(NamedTuple):
    """Where a member is: a file or folder, and the key of its state dict there, or None.

    part: the key if the file has several members, or "".
    """

    path: str
    key: str | None
    part: str = ""

    @property
    def name(self) -> str:
        """A path that tells the members of a file apart, for their names: `ens/models/3`."""
        stem, suffix = os.path.splitext(self.path)
        root = stem if suffix.lower() in SUFFIXES else self.path
        return os.path.join(root, *_KEY_PARTS.split(self.part.rstrip("]"))) if self.part else self.path


def open_checkpoint(path: str | Path, key: str | None = None, trust_pickle: bool = False) -> Checkpoint:
    """Opens one checkpoint.

    path: a file or folder, recognized by its content. key: where the state dict is in a file, see
    state_dict.py. trust_pickle: whether to run the code that a pickle names. Raises: CheckpointError that
    names what the file is.
    """
    try:
        return read_content(str(path), trust_pickle).checkpoint(str(path), key)
    except RefusedFile as refused:
        raise CheckpointError(f"checkpoint {path}: {refused}") from None


def checkpoint_in_memory(state: Mapping[str, Any], title: str, key: str | None = None) -> Checkpoint:
    """Returns a state dict as a checkpoint. Tensors on other devices are copied to the CPU.

    title: of the state dict, in messages. key: as for a file. Raises: CheckpointError.
    """
    held = copy.copy(state) if isinstance(state, dict) else dict(state)  # with the modules' versions
    held.update(tree_map_only(torch.Tensor, _on_cpu, dict(state)))
    try:
        return Content(held, []).checkpoint(title, key)
    except RefusedFile as refused:
        raise CheckpointError(f"checkpoint {title}: {refused}") from None


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def places_of(paths: Sequence[str], key: str | None = None, trust_pickle: bool = False) -> list[MemberPlace]:
    """Returns where each member is. A key with `*` (member_keys.py) names several members of each file.

    A file that cannot be read is one place; to open it gives the reason. Raises: UsageError for a file that
    is named twice with one key.
    """
    if key and (twice := next((path for i, path in enumerate(paths) if path in paths[:i]), None)):
        way_out = (
            "name the file once: the key takes all of its members"
            if is_pattern(key)
            else "for several members of one file give a key with *, for example --key 'model_*'"
        )
        raise UsageError(f"{twice} is named twice with the key {key!r}, which gives equal members; {way_out}")
    if not is_pattern(key):
        return [MemberPlace(path, key) for path in paths]
    assert key is not None
    places: list[MemberPlace] = []
    for path in paths:
        try:
            parts = keys_in(read_content(path, trust_pickle).value, key)
            places += [MemberPlace(path, part, part) for part in parts]
        except RefusedFile:
            places.append(MemberPlace(path, key))
    return places


def open_all(places: Sequence[MemberPlace], trust_pickle: bool = False) -> list[Checkpoint]:
    """Opens all checkpoints, in order. Raises: one CheckpointError that lists all unreadable ones."""
    opened, bad = open_good(places, trust_pickle)
    if bad:
        raise bad_ones(bad, len(places))
    return opened


def open_good(
    places: Sequence[MemberPlace], trust_pickle: bool = False
) -> tuple[list[Checkpoint], list[LeftOut]]:
    """Opens the readable checkpoints, in order, and returns why the others are left out."""
    opened: list[Checkpoint] = []
    bad: list[LeftOut] = []
    contents: dict[str, Content] = {}  # of files with several members, which are read once
    for i, place in enumerate(places):
        try:
            content = contents.get(place.path) or read_content(place.path, trust_pickle)
            if place.part:
                contents[place.path] = content
            checkpoint = content.checkpoint(place.path, place.key)
            checkpoint.part = place.part
            opened.append(checkpoint)
        except RefusedFile as refused:
            bad.append(LeftOut(i, f"{place.path}:{place.part}" if place.part else place.path, str(refused)))
    return opened, bad


def listed(paths: Sequence[str | Path], example: str = "widepack build ckpts/*.pt -o ens.wide") -> list[str]:
    """Returns the paths of the checkpoints as texts. example: a command that names some, for messages.

    Raises: UsageError if there are none, if one is not a path or cannot be stored in a manifest, or if
    `paths` is one path instead of a list.
    """
    if isinstance(paths, (str, Path)):
        raise UsageError(f"checkpoints must be a list of paths, not the one path {str(paths)!r}")
    paths = list(paths or ())
    if not paths:
        raise UsageError(f"no checkpoints: name the files of the members, for example {example}")
    if any(isinstance(path, nn.Module) for path in paths):
        raise UsageError(
            "checkpoints are modules in memory; fuse takes these: widepack.fuse(models, sample), and its"
            ' save("ens.wide") writes an artifact. Here give the paths of files'
        )
    texts = [str(checkpoint_of(path, f"checkpoint {i}")) for i, path in enumerate(paths)]
    for text in texts:
        if (
            "\n" in text
            or "\t" in text
            or plain(text) != text
            or text.encode("utf-8", "replace") != text.encode("utf-8", "surrogateescape")
        ):
            raise UsageError(
                f"checkpoint {text!r}: this path has a character that is not text, so an artifact cannot "
                "name the file; rename it, or link to it by another name"
            )
    return texts


def bad_ones(bad: Sequence[LeftOut], count: int) -> CheckpointError:
    """Returns one error for all unusable checkpoints. count: the number of all checkpoints."""
    head = "" if len(bad) == 1 else f"{len(bad)} of {count} checkpoints cannot be used:\n- "
    return CheckpointError(head + "\n- ".join(f"checkpoint {b.number} ({b.path}): {b.why}" for b in bad))


def member_names(paths: Sequence[str | Path]) -> list[str]:
    """Returns the shortest parts of the paths that differ between the members, in order; they are unique.

    1. the file's stem, or the first folder, counted from the file, that differs for all members:
       `runs/a/best.pt`, `runs/b/best.pt` -> `a`, `b`;
    2. the shortest ends of the paths, without the end that all share:
       `a/fold0/best.pt`, `b/fold0/best.pt`, `a/fold1/best.pt` -> `a/fold0`, `b/fold0`, `a/fold1`;
    3. the same with suffixes: `m.pt`, `m.safetensors`;
    4. for a file that is named twice, a number: `m`, `m-2`.
    """
    texts = [os.path.normpath(path) for path in paths]
    if any(text == os.curdir or os.pardir in PurePath(text).parts for text in texts):
        texts = [os.path.abspath(text) for text in texts]  # `.` and `..` do not name a folder
    stems, files = [_parts(text, strip=True) for text in texts], [_parts(text, strip=False) for text in texts]
    names = _distinct(stems) or _distinct(files) or ["/".join(_differing(parts, stems)) for parts in stems]
    taken = set(names)
    seen: set[str] = set()
    unique = []
    for name in names:
        chosen, number = name, 2
        while chosen in seen or (chosen != name and chosen in taken):
            chosen, number = f"{name}-{number}", number + 1
        seen.add(chosen)
        unique.append(chosen)
    return unique


def _parts(path: str, strip: bool) -> tuple[str, ...]:
    pure = PurePath(path)
    parts = pure.parts[1:] if pure.anchor else pure.parts
    if strip and parts:
        stem, suffix = os.path.splitext(parts[-1])
        parts = (*parts[:-1], stem if suffix.lower() in SUFFIXES else parts[-1])
    return parts or ("checkpoint",)


def _distinct(rows: list[tuple[str, ...]]) -> list[str] | None:
    """Returns the names of steps 1 and 2 of `member_names`; None if two rows are equal."""
    if len(set(rows)) < len(rows):
        return None
    for k in range(1, min((len(parts) for parts in rows), default=0) + 1):
        if len({parts[-k] for parts in rows}) == len(rows):
            return [parts[-k] for parts in rows]
    rows = [_differing(parts, rows) for parts in rows]
    for k in range(1, max((len(parts) for parts in rows), default=0) + 1):
        names = ["/".join(parts[-k:]) for parts in rows]
        if len(set(names)) == len(names):
            return names
    return ["/".join(parts) for parts in rows]


def _differing(parts: tuple[str, ...], rows: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns a row without the end that all rows share. At least one part of every row is left."""
    shared = 0
    while all(len(row) > shared + 1 and row[-1 - shared] == parts[-1 - shared] for row in rows):
        shared += 1
    # Equal rows share all parts; then the file's name is the shortest useful text.
    return parts[-1:] if len(set(rows)) == 1 else parts[: len(parts) - shared]
