"""Backends: what runs a wide program. One file a backend, one function in each: `bind(task) -> callable of the inputs` (task.py).

| name | what it is | compiles |
|---|---|---|
| `eager` | the flat graph, op after op | never |
| `compile` | `torch.compile` of the flat graph | in each process, with `compile="now"` |
| `aot` | an AOTInductor package from the local cache | once, by `widepack compile` or `compile="now"` |
| `onnxruntime` | an ONNX Runtime session over the weights file | never (it writes an ONNX file into the cache once) |

`auto` is what the plan names where that can run here, else `eager`.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import UsageError
from .task import Backend as Backend
from .task import Mapped as Mapped
from .task import Task as Task
from .task import Unavailable as Unavailable

_FILES = {"eager": "eager", "compile": "compiled", "aot": "aot", "onnxruntime": "onnx_sessions"}
NAMES = tuple(_FILES)


def backend(name: str) -> Backend:
    """The backend of this name; its file is imported now. Raises: UsageError."""
    if name not in _FILES:
        raise UsageError(f"backend={name!r} is unknown; known: auto, {', '.join(NAMES)}")
    found: Backend = import_module(f".{_FILES[name]}", __package__)  # a module with NAME and bind
    return found
