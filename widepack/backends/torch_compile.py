"""Provides the backend `compile`: `torch.compile` of the flat graph, in this process.

It compiles when a program is bound, with `compile="now"`, at the sizes of `sizes_to_try`; named dims are
dynamic. A call never compiles: it runs the flat graph if it would have to compile again. Compiled programs
exist until the process ends, apart from torch's cache; the backend `aot` stores them.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from ..errors import LoweringError, WidepackError
from ..ir.tensor_type import parse_slot
from ..ir.torch_internals import mark_dynamic
from .flat import flatten
from .index_flags import is_flagged
from .task import Sizes, Task, Unavailable, first_line, sizes_to_try, words
from .tracing import with_weights
from .variants import Checked, Variant

NAME = "compile"
COPIES = False


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
    flat = flatten(task.program, task.weights, NAME, task.title)
    sizes: Any = None
    try:
        module = with_weights(flat, task.device, task.example)[0]
        run: Any = torch.compile(module, fullgraph=True)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            for sizes in sizes_to_try(task):
                if task.progress:
                    task.progress(f"compiling {task.title}", 0, 1)
                _try(task, run, flat, sizes)
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{task.title} does not compile with torch.compile of torch "
            f"{torch.__version__}{f' at {words(sizes)}' if sizes else ''}: {type(e).__name__}: "
            f"{first_line(e)}; "
            "load with backend='eager'"
        ) from e

    def call(inputs: list[torch.Tensor]) -> Any:
        with _COMPILED_CALLS:
            return run(*inputs)

    return Checked(task.device, flat, [Variant(call)], task.eager, flagged=is_flagged(flat.program))


class _CompiledCalls:
    """Prevents compilation while any call runs.

    torch has one stance for the process: the first call that enters sets it, the last that leaves resets it.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance = torch.compiler.set_stance("eager_on_recompile")
                self._stance.__enter__()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(None, None, None)


_COMPILED_CALLS = _CompiledCalls()


def _try(task: Task, run: Any, flat: Any, sizes: Sizes) -> None:
    """Compiles at the sizes of one call and checks the answers against the flat graph.

    Raises: LoweringError.
    """
    try:
        inputs = [x.contiguous() for x in task.inputs(sizes)]
        want = task.eager(*inputs)
    except (RuntimeError, ValueError, IndexError):
        return  # members do not accept inputs of these sizes
    for x, slot in zip(inputs, flat.program.inputs):
        dims = parse_slot(slot.type).dims
        shift = x.dim() - len(dims)
        for axis, dim in enumerate(dims):
            if not isinstance(dim, int) and x.shape[axis + shift] > 1:
                mark_dynamic(x, axis + shift)
    try:
        found = run(*inputs)
    except (ConstraintViolationError, UserError):
        if sizes == dict(task.example):
            raise
        return  # the code would be for this size only; calls with it run the flat graph
    wrong = task.differ(flat.outputs(found), want)
    if wrong:
        raise LoweringError(
            f"{task.title}: the compiled program differs from the flat graph at "
            f"{words(sizes) or 'its sizes'}: {wrong}; load with backend='eager'"
        )
