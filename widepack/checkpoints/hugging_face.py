"""Makes the members of `--model hf`: with transformers, from the config.json beside each checkpoint.

Only transformers' own classes are used. No code of a folder runs, and nothing is downloaded: pretrained
weights of a backbone are switched off in the config, and every connection is refused. The class is the one
that `architectures` names, or what AutoModel chooses for the config. Each member is made from its own folder,
so members may have heads of different sizes (`num_labels`). A checkpoint without a config.json beside it uses
that of the first.

Arguments of the factory are those of the config: `--model-arg use_cache=true`. The argument `folder` names
the folder of config.json for all members. `use_cache` is off by default: a cache of keys and values is not an
output of a member.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .checkpoint import Checkpoint
from .factory import Factory
from .hugging_face_config import check_implementation, copied, read_config
from .memory_bound import bounded_memory
from .no_network import ConnectionRefused, no_network

NAME = "hf"


def hugging_face(args: Mapping[str, object] | None, beside: Sequence[str]) -> Factory:
    """Returns the factory of folders that `save_pretrained` wrote.

    beside: the checkpoints, each a folder or a file in one. Raises: UsageError.
    """
    config_args = dict(args or {})
    if folder := str(config_args.pop("folder", "") or ""):
        return _of_folder(folder, config_args)
    return HuggingFaceFolders(list(dict.fromkeys(map(_folder_of, beside))) or [os.curdir], config_args)


class HuggingFaceFolders(Factory):
    """Makes each member from the config.json beside its checkpoint.

    folders: of the checkpoints. The first one must have a config.json.
    """

    def __init__(self, folders: Sequence[str], args: Mapping[str, object]) -> None:
        self._first = _of_folder(folders[0], args)
        super().__init__(NAME, self._first, args)
        self.takes_state_dict = True  # each folder has the sizes of its weights
        self._folders = tuple(folders)
        self._of = {folders[0]: self._first}
        self._shapes: dict[str, dict[str, torch.Size]] = {}

    def __call__(self, state_dict: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Makes a fresh member. state_dict: of a member; the first folder with its shapes makes it.

        Raises: UsageError.
        """
        if state_dict is None:
            return self._made(self._folders[0])
        for folder in self._folders:
            if folder not in self._shapes:
                module = self._made(folder)
                self._shapes[folder] = {name: tensor.shape for name, tensor in module.state_dict().items()}
            shapes = self._shapes[folder]
            if all(name not in shapes or shapes[name] == t.shape for name, t in state_dict.items()):
                return self._made(folder)
        return self._made(self._folders[0])

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """Returns a fresh member from the folder of a checkpoint. Raises: UsageError."""
        return self._made(_folder_of(checkpoint.path))

    def _made(self, folder: str) -> nn.Module:
        if folder not in self._of:
            with_config = os.path.isfile(os.path.join(folder, "config.json"))
            self._of[folder] = _of_folder(folder, self.args) if with_config else self._first
        factory = self._of[folder]
        factory.dtype = self.dtype
        return factory()


def _folder_of(path: str) -> str:
    return path if os.path.isdir(path) else os.path.dirname(path) or os.curdir


def _of_folder(folder: str, args: Mapping[str, object]) -> Factory:
    """Returns the factory of one folder. Raises: UsageError."""
    path = os.path.join(folder, "config.json")
    config = read_config(path, folder, NAME)
    transformers = _transformers()
    model_class = _model_class(transformers, config, path)

    def make(**overrides: object) -> nn.Module:
        try:
            with no_network():
                return _make(transformers, model_class, config, folder, overrides)
        except Exception as error:
            if (refused := _refused_connection(error)) is None:
                raise
            raise UsageError(
                f"{path} needs a download ({refused}), and --model {NAME} downloads nothing;"
                " save the model with a config that contains its parts, or name a factory of your own:"
                " --model file.py:make"
            ) from None

    return Factory(NAME, make, args)


def _refused_connection(error: BaseException | None) -> ConnectionRefused | None:
    """Returns the refused connection that caused an error; None if there is none."""
    for _ in range(20):
        if error is None or isinstance(error, ConnectionRefused):
            return error
        error = error.__cause__ or error.__context__
    return None


def _transformers() -> ModuleType:
    """Imports transformers. Raises: UsageError."""
    try:
        import transformers
    except ImportError:
        raise UsageError(
            f"--model {NAME} needs transformers, which is not installed: pip install 'widepack[hf]'"
        ) from None
    module: ModuleType = transformers
    return module


def _model_class(transformers: ModuleType, config: Mapping[str, Any], path: str) -> type[nn.Module] | None:
    """Returns the class that the config names; None if it names none.

    Raises: UsageError for an unknown one.
    """
    architectures = config.get("architectures")
    name = ""
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        name = architectures[0]
    if not name:
        return None
    found = getattr(transformers, name, None)
    base = getattr(transformers, "PreTrainedModel", nn.Module)
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    reason = (
        "its code is in the folder, and code of a folder is not run"
        if "auto_map" in config
        else f"transformers {transformers.__version__} has no such model"
    )
    raise UsageError(
        f"--model {NAME}: {path} names the architecture {name}, but {reason};"
        " name a factory of your own: --model file.py:make"
    )


def _make(
    transformers: ModuleType,
    model_class: type[nn.Module] | None,
    read: dict[str, Any],
    folder: str,
    overrides: Mapping[str, object],
) -> nn.Module:
    """Makes one member with fresh weights.

    read: the content of config.json. overrides: values of the config's fields. Raises: UsageError.
    """
    with copied(read, folder) as place:
        config: Any = transformers.AutoConfig.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
    config.name_or_path = folder
    for key, value in overrides.items():
        if "implementation" in key:
            check_implementation(key, value, f"--model {NAME}")
    for key, value in {"use_cache": False, **overrides}.items():
        if not hasattr(config, key) and key != "use_cache":
            raise UsageError(f"--model {NAME}: the config of {folder} has no {key!r}")
        setattr(config, key, value)
    without_pretrained_parts(config)
    path = os.path.join(folder, "config.json")
    with _default_dtype(getattr(config, "dtype", None)), bounded_memory(f"--model {NAME}: {path}"):
        module: nn.Module = (
            transformers.AutoModel.from_config(config, trust_remote_code=False)
            if model_class is None
            else model_class(config)
        )
    return module


def without_pretrained_parts(config: Any, depth: int = 0) -> None:
    """Switches off the pretrained weights of backbones: a member's weights come from its checkpoint."""
    if hasattr(config, "use_pretrained_backbone"):
        config.use_pretrained_backbone = False
    for part in vars(config).values() if depth < 4 else ():
        if hasattr(part, "model_type"):
            without_pretrained_parts(part, depth + 1)


@contextmanager
def _default_dtype(dtype: object) -> Iterator[None]:
    """Sets the dtype of weights that a model makes without a dtype, as `from_pretrained` does."""
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
