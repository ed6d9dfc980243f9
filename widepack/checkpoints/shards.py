"""Opens checkpoints of several files: an index `{"weight_map": {tensor name: file name}}` with its shards,
and folders.

In a folder the first of these is taken: one file with all weights, the index of several files (safetensors
before `.bin`), or the only file of weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from .checkpoint import Checkpoint
from .open_file import look, open_file
from .plain_file import read_plain
from .state_dict import RefusedFile, TensorInfo, named_under, without_wrappers

INDEX = ".index.json"
FIRST = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pt2")
_NO_WEIGHTS = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "rng_state.pth",
    "scaler.pt",
)  # what trainers write beside the weights
_MAX_INDEX_BYTES = 64 << 20


def is_index(path: str, start: bytes) -> bool:
    """Returns whether a file is an index of shards, by its content. Other JSON files are not."""
    if not start.lstrip().startswith(b"{") or os.path.getsize(path) > _MAX_INDEX_BYTES:
        return False
    try:
        found = strict_json.parse(read_plain(path, _MAX_INDEX_BYTES), path)
    except (ArtifactError, OSError, RefusedFile):
        return path.endswith(INDEX)  # open_index then reports the mistake
    return isinstance(found, dict) and "weight_map" in found


def open_folder(path: str, key: str | None, trust: bool) -> Checkpoint:
    """Opens the weights in a folder. Raises: RefusedFile."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise RefusedFile(f"cannot be read: {error.strerror or error}") from None
    chosen = next((name for name in FIRST if name in names), None)
    if chosen is None:
        indexes = [name for name in names if name.endswith(INDEX)]
        files = [name for name in names if name.endswith(_WEIGHTS) and name not in _NO_WEIGHTS]
        if ".metadata" in names:
            raise RefusedFile(
                "is a folder of torch.distributed.checkpoint; convert it to one file:"
                " python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
                f" {path} {path.rstrip(os.sep)}.pt"
            )
        if "zero_to_fp32.py" in names:
            raise RefusedFile("is a folder of DeepSpeed; convert it to one file with its zero_to_fp32.py")
        if len(indexes) + (0 if indexes else len(files)) != 1:
            found = f"it has {', '.join([*indexes, *files][:6])}" if indexes or files else "it has no weights"
            raise RefusedFile(
                f"is a folder, and {found}; name the files in it, for example {os.path.join(path, '*.pt')}"
            )
        (chosen,) = indexes or files
    inner = os.path.join(path, chosen)
    opened = open_index(inner, key, trust) if chosen.endswith(INDEX) else open_file(inner, key, trust)
    opened.path = path
    return opened


def open_index(path: str, key: str | None, trust: bool) -> Checkpoint:
    """Opens the shards of an index as one checkpoint. Each tensor is read from the file that the index names.

    Raises: RefusedFile that lists all missing files.
    """
    status, _ = look(path)
    files = _files(path)
    folder = os.path.dirname(path)
    missing = sorted({name for name in files.values() if not os.path.isfile(os.path.join(folder, name))})
    if missing:
        raise RefusedFile(
            f"is an index of {len(set(files.values()))} files, of which these are missing:"
            f" {', '.join(missing[:6])}{' and more' if len(missing) > 6 else ''}"
        )
    shards: dict[str, Checkpoint] = {}
    for name in dict.fromkeys(files.values()):
        try:
            shards[name] = open_file(os.path.join(folder, name), None, trust).unstripped()
        except RefusedFile as refused:
            raise RefusedFile(f"its shard {name} {refused}") from None
    infos: dict[str, TensorInfo] = {}
    for tensor, name in files.items():
        shard = shards[name].tensors()
        if tensor not in shard:
            raise RefusedFile(
                f"the index says that {tensor} is in {name}, but it is not; copy or download both again"
            )
        infos[tensor] = shard[tensor]
    chosen = {f"{key}.{name}": info for name, info in named_under(infos, key).items()} if key else infos
    if not chosen:
        raise RefusedFile(
            f"is an index of shards, which has no dicts, and no name in it begins with '{key}.',"
            f" so the key {key!r} names nothing; build without it"
            if key
            else "is an index of no tensors"
        )

    def read(name: str) -> torch.Tensor:
        return shards[files[name]].get(name)

    parts = [(path, status), *(part for shard in shards.values() for part in shard.files)]
    names = {name[len(key) + 1 :] if key else name: name for name in chosen}
    plain, prefix = without_wrappers(names)
    return Checkpoint(path, chosen, read, "", status, files=parts).renamed(
        {name: names[known] for name, known in plain.items()}, prefix
    )


def _files(path: str) -> Mapping[str, str]:
    """Returns the index's map from tensors to files beside it. Raises: RefusedFile."""
    try:
        found = strict_json.parse(read_plain(path, _MAX_INDEX_BYTES), "the index")
    except ArtifactError as error:
        raise RefusedFile(f"is not an index of shards: {error}") from None
    except OSError as error:
        raise RefusedFile(f"cannot be read: {error.strerror or error}") from None
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise RefusedFile("is not an index of shards: it has no weight_map of file names by tensor")
    away = next(
        (name for name in files.values() if os.path.basename(name) != name or name in ("", ".", "..")), None
    )
    if away is not None:
        raise RefusedFile(f"is an index that names {away!r}; shards must be files beside their index")
    return files
