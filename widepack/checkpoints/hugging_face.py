"""Makes the members of `--model hf`: with transformers, from the config.json beside each checkpoint.

The config.json may be untrusted. It is read once, and transformers gets a copy of what was checked, in a
folder of its own. Only transformers' own classes are used. No code of a folder runs, and nothing is
downloaded: pretrained weights of a backbone are switched off in the config, and every connection is refused.

The class is the one that `architectures` names, or what AutoModel chooses for the config. Each member is made
from its own folder, so members may have heads of different sizes (`num_labels`). A checkpoint without a
config.json beside it uses that of the first.

Arguments of the factory are those of the config: `--model-arg use_cache=true`. The argument `folder` names
the folder of config.json for all members. `use_cache` is off by default: a cache of keys and values is not an
output of a member.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError

from ..errors import UsageError
from ..ir.torch_internals import is_fake, op_base_name
from ..system.memory import available_bytes
from .checkpoint import Checkpoint
from .factory import Factory
from .hugging_face_weights import converted
from .plain_file import read_plain
from .state_dict import RefusedFile

NAME = "hf"
FILE = "config.json"
MOST_BYTES = 16 << 20
MOST_PARTS = 4096
"""The most layers, experts or heads that a field of the config may name."""
MOST = 2**40
"""The largest integer of a config. transformers makes lists of as many entries as some fields say."""
MOST_LABELS = 10**6
LOCAL = frozenset({"eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm"})
"""Implementations that transformers and torch contain. transformers downloads others as code."""
_FLASH = re.compile(r"(paged\|)?flash_attention_\d")
_COUNT = re.compile(
    r"(?:^|_)(?:layers?|depths?|blocks?|stages?|experts?|heads?|groups?|levels?|repeats?|stacks?|branches)"
    r"(?:_|$)"
)
_NO_COUNT = re.compile(
    r"(?:^|_)(?:size|sizes|dim|dims|length|width|ids?|tokens?|window|channels?|eps|max)(?:_|$)"
)
_CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
_thread = threading.local()
_installing = threading.Lock()
_installed: list[str] = []
_MAKERS = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided"})
_BY_COUNT = frozenset({"arange", "eye", "linspace"})


def hugging_face(args: Mapping[str, object] | None, beside: Sequence[str]) -> Factory:
    """Returns the factory of folders that `save_pretrained` wrote.

    beside: the checkpoints, each a folder or a file in one. Raises: UsageError.
    """
    config_args = dict(args or {})
    if folder := str(config_args.pop("folder", "") or ""):
        return _of_folder(folder, config_args)
    return HuggingFaceFolders(list(dict.fromkeys(map(_folder_of, beside))) or [os.curdir], config_args)


class HuggingFaceFolder(Factory):
    """Makes members from the config.json of one folder."""

    converts = True

    def converted(self, checkpoint: Checkpoint, module: nn.Module) -> Checkpoint:
        """Returns a checkpoint as `from_pretrained` converts it. Raises: MemberMismatch; UsageError."""
        with no_network():
            return converted(_transformers(), checkpoint, module)


class HuggingFaceFolders(HuggingFaceFolder):
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
                f"{path} needs a download ({refused}), and --model {NAME} downloads nothing; save the model "
                "with a config that contains its parts, or name a factory of your own: --model file.py:make"
            ) from None

    return HuggingFaceFolder(NAME, make, args)


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
    kind = getattr(transformers, name, None)
    base = getattr(transformers, "PreTrainedModel", nn.Module)
    if isinstance(kind, type) and issubclass(kind, base) and kind is not base:
        return kind
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


class ConnectionRefused(RuntimeError):
    """Raised in place of a connection. place: the host, as far as it is known."""

    def __init__(self, place: str) -> None:
        super().__init__(f"connects to {place}")
        self.place = place


@contextmanager
def no_network() -> Iterator[None]:
    """In the block, every connection of this thread raises ConnectionRefused, so that nothing is downloaded.

    An audit hook of Python sees the connections, so libraries cannot go around it by their own settings.
    It is installed once; Python cannot remove it.
    """
    with _installing:
        if not _installed:
            sys.addaudithook(_refuse)
            _installed.append("hook")
    before = getattr(_thread, "refuses", False)
    _thread.refuses = True
    try:
        yield
    finally:
        _thread.refuses = before


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in _CONNECTS and getattr(_thread, "refuses", False):
        place = args[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else args[1]
        if isinstance(place, (str, bytes)) and event in ("socket.connect", "socket.sendto"):
            return  # a socket of this machine
        raise ConnectionRefused(str(place[0] if isinstance(place, tuple) and place else place)[:100])


@contextmanager
def bounded_memory(title: str) -> Iterator[None]:
    """Refuses tensors for which this machine has no memory, before they are made, inside a with block.

    The sizes come from a file that an untrusted source may have written. Without a bound, a size of 10^12
    ends the process, or all others of the machine.

    title: what describes the model, in the error. Raises: UsageError.
    """
    free = available_bytes()
    if free is None or is_fake(torch.empty(0)):  # tensors without memory
        yield
        return
    with _Bounded(title, free):
        yield


class _Bounded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Adds up the bytes of new tensors. title: as for `bounded_memory`. free: the bytes that there are."""

    def __init__(self, title: str, free: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._title, self._free, self._used = title, free, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        count = _numbers(op_base_name(func), args)
        if count and torch.device(named.get("device") or "cpu").type == "cpu":
            dtype = named.get("dtype") or torch.get_default_dtype()
            self._used += count * dtype.itemsize
            if self._used > self._free:
                raise UsageError(
                    f"{self._title} describes a model of at least {self._used:,} bytes, and {self._free:,} "
                    "bytes of memory are free. Compare its sizes, such as vocab_size, with those of the "
                    "checkpoint"
                )
        return func(*args, **named)


def _numbers(name: str, args: Any) -> int:
    """Returns how many numbers an op makes; 0 if it is none that makes a tensor of given sizes."""
    if name in _MAKERS and args and isinstance(args[0], (list, tuple, torch.Size)):
        return math.prod(args[0])
    numbers = [v for v in args if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if name not in _BY_COUNT or not numbers:
        return 0
    if name == "arange":
        start, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
        return max(0, int((end - start) / (numbers[2] if len(numbers) > 2 else 1)))
    return int(numbers[0]) * int(numbers[-1]) if name == "eye" else int(numbers[-1])


def read_config(path: str, folder: str, model: str) -> dict[str, Any]:
    """Returns the content of a config.json, checked.

    Args:
        path: The file.
        folder: Its folder, in errors.
        model: The value of `--model`, in errors.

    Raises:
        UsageError: It cannot be read, or names more parts than a model has, or code.
    """
    try:
        config = strict_json.parse(read_plain(path, MOST_BYTES), FILE, constants=True)
    except FileNotFoundError:
        raise UsageError(
            f"--model {model} needs the config.json that save_pretrained writes, but {folder} has none;"
            " give --model-arg folder=PATH, or another --model"
        ) from None
    except RefusedFile as refused:
        raise UsageError(f"--model {model}: {path} {refused}") from None
    except (OSError, ArtifactError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--model {model}: {path} cannot be read: {reason}") from None
    if not isinstance(config, dict):
        raise UsageError(f"--model {model}: {path} is not a JSON object")
    _check(config, f"--model {model}: {path}")
    without_flash_attention(config)
    return config


def _check(config: dict[str, Any], title: str) -> None:
    """Checks each number, and each name of an implementation. Raises: UsageError."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            if "implementation" in key:
                left += [(key, v) for v in value.values()]
            else:
                left += [(str(k), v) for k, v in value.items()]
        elif isinstance(value, list):
            left += [(key, v) for v in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            _check_number(key, value, title)
        elif "implementation" in key:
            check_implementation(key, value, title)


def _check_number(key: str, value: int, title: str) -> None:
    most = MOST_LABELS if key == "num_labels" else MOST
    if _COUNT.search(key) and not _NO_COUNT.search(key):
        most = MOST_PARTS
    if abs(value) > most:
        raise UsageError(f"{title}: {key[:60]} is {value}; at most {most} is possible")


def check_implementation(key: str, value: object, title: str) -> None:
    """Checks the name of an implementation of attention or experts. Raises: UsageError."""
    if value is None or (isinstance(value, str) and (value in LOCAL or _FLASH.fullmatch(value))):
        return
    raise UsageError(
        f"{title}: {key[:60]} is {str(value)[:80]!r}, for which transformers may download code;"
        f" known are {', '.join(sorted(LOCAL))}"
    )


def without_flash_attention(config: dict[str, Any]) -> None:
    """Removes implementations that need another package, which transformers would download.

    The weights are the same, and transformers then chooses an implementation of its own.
    """
    left: list[dict[str, Any]] = [config]
    while left:
        part = left.pop()
        for key in [k for k in part if "implementation" in k]:
            several = part[key].values() if isinstance(part[key], dict) else [part[key]]
            if any(isinstance(v, str) and v not in LOCAL for v in several):
                del part[key]
        left += [v for v in part.values() if isinstance(v, dict)]


@contextmanager
def copied(config: dict[str, Any], folder: str) -> Iterator[str]:
    """Yields a new folder with the config. transformers guesses a model's type by the name of the folder."""
    with tempfile.TemporaryDirectory(prefix="widepack-") as place:
        name = os.path.basename(os.path.abspath(folder))[:200] or "model"
        made = os.path.join(place, name)
        os.mkdir(made, 0o700)
        with open(os.path.join(made, FILE), "w", encoding="utf-8") as file:
            json.dump(config, file)
        yield made
