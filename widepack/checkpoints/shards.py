"""Checkpoints in several files: an index `{"weight_map": {tensor name: file name}}` with its shards beside it, and folders of weights.

In a folder the first of these is taken: an artifact of one file, else the index of several, safetensors before `.bin`; else the only file of weights that
there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from .open_file import Checkpoint, look, open_file
from .state_dict import Refused, TensorInfo, named_under, without_wrappers

INDEX = ".index.json"
FIRST = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pt2")
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "scaler.pt")  # what trainers put beside them
_MAX_INDEX_BYTES = 64 << 20


def is_index(path: str, start: bytes) -> bool:
    """Whether a file is an index of shards, by its content; a JSON text of another kind is none."""
    if not start.lstrip().startswith(b"{") or os.path.getsize(path) > _MAX_INDEX_BYTES:
        return False
    try:
        with open(path, "rb") as file:
            found = strict_json.parse(file.read(), path)
    except (ArtifactError, OSError):
        return path.endswith(INDEX)  # open_index says what is wrong with it
    return isinstance(found, dict) and "weight_map" in found


def open_folder(path: str, key: str | None, trust: bool) -> Checkpoint:
    """The weights in a folder. Raises: Refused."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror or error}") from None
    chosen = next((name for name in FIRST if name in names), None)
    if chosen is None:
        indexes = [name for name in names if name.endswith(INDEX)]
        files = [name for name in names if name.endswith(_WEIGHTS) and name not in _NO_WEIGHTS]
        if ".metadata" in names:
            raise Refused(
                f"is a folder of torch.distributed.checkpoint; make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} {path.rstrip(os.sep)}.pt"
            )
        if "zero_to_fp32.py" in names:
            raise Refused("is a folder of DeepSpeed; make one file of it with the zero_to_fp32.py in it")
        if len(indexes) + (0 if indexes else len(files)) != 1:
            found = f"it holds {', '.join([*indexes, *files][:6])}" if indexes or files else "it holds no weights"
            raise Refused(f"is a folder, and {found}; name the files in it, for example {os.path.join(path, '*.pt')}")
        (chosen,) = indexes or files
    inner = os.path.join(path, chosen)
    opened = open_index(inner, key, trust) if chosen.endswith(INDEX) else open_file(inner, key, trust)
    opened.path = path
    return opened


def open_index(path: str, key: str | None, trust: bool) -> Checkpoint:
    """The shards of an index as one checkpoint; each tensor is read from the file that the index names. Raises: Refused that lists all missing files."""
    status, _ = look(path)
    files = _files(path)
    folder = os.path.dirname(path)
    missing = sorted({name for name in files.values() if not os.path.isfile(os.path.join(folder, name))})
    if missing:
        raise Refused(
            f"is an index of {len(set(files.values()))} files, of which {', '.join(missing[:6])}{' and more' if len(missing) > 6 else ''} are not there"
        )
    shards: dict[str, Checkpoint] = {}
    for name in dict.fromkeys(files.values()):
        try:
            shards[name] = open_file(os.path.join(folder, name), None, trust).unstripped()
        except Refused as refused:
            raise Refused(f"its shard {name} {refused}") from None
    infos: dict[str, TensorInfo] = {}
    for tensor, name in files.items():
        held = shards[name].tensors()
        if tensor not in held:
            raise Refused(f"the index says that {tensor} is in {name}, which does not hold it; copy or download both again")
        infos[tensor] = held[tensor]
    chosen = {f"{key}.{name}": info for name, info in named_under(infos, key).items()} if key else infos
    if not chosen:
        raise Refused(
            f"is an index of shards, which has no dicts in it, and no name begins with '{key}.', so the key {key!r} names nothing there; build without it"
            if key
            else "is an index of no tensors"
        )

    def read(name: str) -> torch.Tensor:
        return shards[files[name]].get(name)

    parts = [(path, status), *(part for shard in shards.values() for part in shard.files)]
    names = {name[len(key) + 1 :] if key else name: name for name in chosen}
    plain, prefix = without_wrappers(names)
    return Checkpoint(path, chosen, read, "", status, files=parts).renamed({name: names[known] for name, known in plain.items()}, prefix)


def _files(path: str) -> Mapping[str, str]:
    """The index's map from tensors to files, which are beside it. Raises: Refused."""
    try:
        with open(path, "rb") as file:
            found = strict_json.parse(file.read(), "the index")
    except ArtifactError as error:
        raise Refused(f"is no index of shards: {error}") from None
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror or error}") from None
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise Refused("is no index of shards: it has no weight_map of file names by tensor")
    away = next((name for name in files.values() if os.path.basename(name) != name or name in ("", ".", "..")), None)
    if away is not None:
        raise Refused(f"is an index that names {away!r}; shards are files beside their index")
    return files
