"""Opens checkpoints of several files: an index `{"weight_map": {tensor name: file name}}` with its shards,
and folders.

In a folder the first of these is taken: one file with all weights, the index of several files (safetensors
before `.bin`), or the only file of weights.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError, some
from widepack_artifacts.folder import path_state

from .checkpoint import Content
from .open_file import look, open_file, read_file
from .plain_file import read_plain
from .state_dict import RefusedFile

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


def _is_index(path: str, start: bytes) -> bool:
    """Returns whether a file is an index of shards, by its content. Other JSON files are not."""
    if not start.lstrip().startswith(b"{") or os.path.getsize(path) > _MAX_INDEX_BYTES:
        return False
    try:
        content = strict_json.parse(read_plain(path, _MAX_INDEX_BYTES), path)
    except (ArtifactError, OSError, RefusedFile):
        return path.endswith(INDEX)  # _read_index then reports the mistake
    return isinstance(content, dict) and "weight_map" in content


def _check_is_whole(path: str) -> None:
    """Raises: RefusedFile if a file is a part of a folder of torch.distributed.checkpoint."""
    folder = os.path.dirname(path)
    if path.endswith(_DISTRIBUTED) and os.path.exists(os.path.join(folder, _METADATA)):
        raise RefusedFile(f"is a part of a folder of torch.distributed.checkpoint; {_converted(folder)}")


def _converted(folder: str) -> str:
    return (
        "convert the folder to one file: python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
        f" {folder or os.curdir} {folder.rstrip(os.sep) or 'checkpoint'}.pt"
    )


def read_content(path: str, trust: bool = False) -> Content:
    """Returns what a file, an index of shards, or a folder has. trust: whether to unpickle any object.

    Raises: RefusedFile.
    """
    status, start = look(path)
    _check_is_whole(path)
    if stat.S_ISDIR(status.st_mode):
        return _read_folder(path, trust)
    return _read_index(path, trust) if _is_index(path, start) else read_file(path, trust, (status, start))


def _read_folder(path: str, trust: bool) -> Content:
    """Reads the weights in a folder. Raises: RefusedFile."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise RefusedFile(f"cannot be read: {error.strerror or error}") from None
    if path_state(Path(path)) == "artifact":
        raise RefusedFile(
            "is an artifact, not a checkpoint; `widepack extract` writes its members as checkpoints"
        )
    chosen = next((name for name in FIRST if name in names), None)
    if chosen is None:
        indexes = [name for name in names if name.endswith(INDEX)]
        files = [name for name in names if name.endswith(_WEIGHTS) and name not in _NO_WEIGHTS]
        if _METADATA in names:
            raise RefusedFile(f"is a folder of torch.distributed.checkpoint; {_converted(path)}")
        if advice := _deepspeed(path, names):
            raise RefusedFile(advice)
        if len(indexes) + (0 if indexes else len(files)) != 1:
            raise RefusedFile(_no_weights(path, [*indexes, *files]))
        (chosen,) = indexes or files
    inner = os.path.join(path, chosen)
    return _read_index(inner, trust) if chosen.endswith(INDEX) else read_file(inner, trust)


_METADATA, _DISTRIBUTED = ".metadata", ".distcp"
_STATES = "mp_rank_00_model_states.pt"
_SCRIPT = "zero_to_fp32.py"


def _deepspeed(path: str, names: Sequence[str]) -> str:
    """Returns how the weights of a folder of DeepSpeed are converted; "" for another folder.

    The root has the script and the file `latest`; a subfolder has the states of each rank.
    """
    inside = any(name.endswith("_optim_states.pt") for name in names) or _STATES in names
    tags = [n for n in names if os.path.isfile(os.path.join(path, n, _STATES))]
    if not inside and not tags and _SCRIPT not in names:
        return ""
    root = os.path.dirname(os.path.abspath(path)) if inside else path
    script = os.path.join(root, _SCRIPT)
    run = script if os.path.isfile(script) else "-m deepspeed.utils.zero_to_fp32"
    out = f"{root.rstrip(os.sep)}-fp32"
    return f"is a folder of DeepSpeed; convert it, and give the new folder: python {run} {root} {out}"


def _no_weights(path: str, names_of_weights: Sequence[str]) -> str:
    """Returns why a folder is not one checkpoint, and what to give instead."""
    if names_of_weights:
        first = os.path.join(path, names_of_weights[0])
        return (
            f"is a folder, and it has {some(names_of_weights, 6)}; name the files in it, for example {first}"
        )
    if inner := folders_inside(path, has_weights):
        return f"is a folder without weights; its subfolders have some: give {some(inner, 4)}"
    return "is a folder, and it has no weights: no .safetensors, .bin, .pt, .pth or .ckpt file"


def folders_inside(path: str, wanted: Callable[[str], bool]) -> list[str]:
    """Returns the subfolders that are wanted, or those in subfolders if there are none."""
    folders = _subfolders([path])
    if inner := [folder for folder in folders if wanted(folder)]:
        return inner
    return [folder for folder in _subfolders(folders) if wanted(folder)]


def _subfolders(paths: Sequence[str]) -> list[str]:
    """Returns the first folders in folders."""
    found: list[str] = []
    for path in paths:
        try:
            with os.scandir(path) as entries:
                found += sorted(entry.path for entry in entries if entry.is_dir())
        except OSError:
            continue  # it cannot be read
    return found[:200]


def has_weights(folder: str) -> bool:
    """Returns whether a folder has a file that may be a checkpoint."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(n.endswith((*_WEIGHTS, INDEX)) and n not in _NO_WEIGHTS for n in names) or ".metadata" in names


def _read_index(path: str, trust: bool) -> Content:
    """Reads the shards of an index. Each tensor is read from the file that the index names.

    Raises: RefusedFile that lists all missing files.
    """
    status, _ = look(path)
    files = _files(path)
    folder = os.path.dirname(path)
    missing = sorted({name for name in files.values() if not os.path.isfile(os.path.join(folder, name))})
    if missing:
        raise RefusedFile(
            f"is an index of {len(set(files.values()))} files, of which these are missing: {some(missing, 6)}"
        )
    shards: dict[str, Mapping[str, Any]] = {}
    opened = [(path, status)]
    for name in dict.fromkeys(files.values()):
        try:
            shard = open_file(os.path.join(folder, name), None, trust).unstripped()
        except RefusedFile as refused:
            raise RefusedFile(f"its shard {name} {refused}") from None
        shards[name] = shard.mapped_state_dict()
        opened += shard.files
    for tensor, name in files.items():
        if tensor not in shards[name]:
            raise RefusedFile(
                f"the index says that {tensor} is in {name}, but it is not; copy or download both again"
            )
    if not files:
        raise RefusedFile("is an index of no tensors")
    value = {tensor: shards[name][tensor] for tensor, name in files.items()}
    return Content(value, opened, "an index of shards", mapped=True)


def _files(path: str) -> Mapping[str, str]:
    """Returns the index's map from tensors to files beside it. Raises: RefusedFile."""
    try:
        content = strict_json.parse(read_plain(path, _MAX_INDEX_BYTES), "the index")
    except ArtifactError as error:
        raise RefusedFile(f"is not an index of shards: {error}") from None
    except OSError as error:
        raise RefusedFile(f"cannot be read: {error.strerror or error}") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise RefusedFile("is not an index of shards: it has no weight_map of file names by tensor")
    away = next(
        (name for name in files.values() if os.path.basename(name) != name or name in ("", ".", "..")), None
    )
    if away is not None:
        raise RefusedFile(f"is an index that names {away!r}; shards must be files beside their index")
    return files
