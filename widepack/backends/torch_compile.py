"""Provides the backend `compile`: code of TorchInductor, the compiler of `torch.compile`, in this process.

It compiles when a program is bound, with `compile="now"`. Named dims are dynamic. The program is a graph
already, so no Python is traced, and nothing compiles again: the conditions on sizes that the compiler assumes
are checked before each call (`variants.py`), and the flat graph runs at all other sizes. Compiled programs
exist until the process ends, apart from torch's cache; the backend `aot` stores them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .covering import compiled_at, covering
from .flat import Flat, flatten
from .index_flags import is_flagged
from .task import Sizes, Task, Unavailable
from .variants import Checked, Variant

if TYPE_CHECKING:
    from .tracing import TracedGraph

NAME = "compile"
COPIES = False
# else the values of small weights become constants
OPTIONS: dict[str, Any] = {"always_keep_tensor_constants": True}


def bind(task: Task) -> Checked:
    """Compiles and binds a program.

    Raises: Unavailable unless the task may compile; LoweringError if it fails or answers wrongly.
    """
    if not task.compile:
        raise Unavailable(
            f"{task.title} is not compiled: torch.compile compiles again in every process, and loading "
            "compiles only on request.\n"
            "load(backend='compile', compile='now') compiles now; `widepack compile ARTIFACT` with "
            "backend='aot' compiles once "
            "for all processes."
        )
    flat = flatten(task.program, task.weights(), NAME, task.title)
    variants = covering(task, flat, lambda _, sizes: _compile(task, flat, sizes))
    return Checked(task, flat.shape, variants, flagged=is_flagged(flat.program), flat=flat)


def _compile(task: Task, flat: Flat, example: Sizes) -> Variant:
    """Compiles a variant at sizes. Raises: LoweringError."""
    run, made = compiled_at(task, flat, example, "torch.compile", _inductor)
    return Variant(lambda inputs: run(*inputs), made.conditions(), fixed=bool(made.fixed))


def _inductor(made: TracedGraph) -> Any:
    return torch._inductor.compile(made.module, list(made.inputs), options=OPTIONS)
