"""Runs wide programs with a backend.

Each is a file with one function: `bind(task) -> BoundFunction` (`task.py`).

| name | what runs the program | compiles |
|---|---|---|
| `eager` | the flat graph, op after op | never |
| `compile` | code of TorchInductor for the flat graph, in memory | in each process, with `compile="now"` |
| `aot` | an AOTInductor package from the local cache | once, by `widepack compile` or `compile="now"` |
| `onnxruntime` | ONNX Runtime sessions | never (writes the ONNX graph of a member once, into the cache) |

A graph is no backend: it records what one of these runs on a GPU (`graph_capture.py`).

`auto` is the backend that the plan names, if it can run here; else a compiled program of the cache that was
measured to be faster (`inference/programs/program_binder.py`); else `eager`.

| file | what it does |
|---|---|
| `aot.py` | The backend `aot`: AOTInductor packages from a cache |
| `covering.py` | Compiles variants of a program until they cover its sizes, and checks each |
| `eager.py` | The backend `eager`: the flat graph |
| `exported_graph.py` | Assembles an ExportedProgram of torch from the nodes of a program |
| `flat.py` | Writes a program as a flat graph, for compilers and readers |
| `graph_capture.py` | Records runs as graphs of a device |
| `index_flags.py` | Adds flags for indices out of range, and for divisions by 0, to a flat program |
| `member_inputs.py` | Gives a program of one member its own inputs, and names by their order |
| `member_loops.py` | Writes a program with loops as a program of one member |
| `onnx_backend.py` | The backend `onnxruntime`: ONNX Runtime sessions |
| `onnx_binding.py` | Notes which ONNX Runtime sessions run a program, and runs them |
| `onnx_graphs.py` | Finds the ONNX graph of one member, or writes it |
| `onnx_members.py` | Divides an ONNX model into one member's part and the rest |
| `onnx_member_sessions.py` | Runs single members by sessions of their own |
| `onnx_model.py` | Translates a flat program into an ONNX model |
| `onnx_packed.py` | Keeps sessions with their packed weights in the cache |
| `onnx_parts.py` | Takes the part of a session's file that computes some of its outputs |
| `onnx_recurrent.py` | Translates recurrent layers into ONNX's own ops |
| `onnx_repeat.py` | Repeats the ONNX graph of one member, once for each member |
| `onnx_rewrites.py` | Rewrites an ONNX model to few nodes |
| `onnx_session.py` | Makes an ONNX Runtime session |
| `onnx_wire.py` | Reads and writes parts of an ONNX file, without the package onnx |
| `task.py` | Defines the argument and the result of a backend |
| `torch_compile.py` | The backend `compile`: TorchInductor in this process |
| `torch_export.py` | Writes a wide program as a torch.export program, for readers without widepack |
| `tracing.py` | Prepares a flat program for torch's compilers |
| `variants.py` | Runs compiled programs at their sizes, and the flat graph at all others |
"""

from __future__ import annotations

from importlib import import_module

from ..errors import UsageError
from .task import Backend as Backend
from .task import BoundFunction as BoundFunction
from .task import Mapped as Mapped
from .task import MemberFunctions as MemberFunctions
from .task import Task as Task
from .task import Unavailable as Unavailable

_FILES = {"eager": "eager", "compile": "torch_compile", "aot": "aot", "onnxruntime": "onnx_backend"}
NAMES = tuple(_FILES)


def backend(name: str) -> Backend:
    """The backend of this name. Imports its file. Raises: UsageError for an unknown name."""
    if name not in _FILES:
        raise UsageError(f"backend={name!r} is unknown; known: auto, {', '.join(NAMES)}")
    found: Backend = import_module(f".{_FILES[name]}", __package__)  # a module with NAME and bind
    return found
