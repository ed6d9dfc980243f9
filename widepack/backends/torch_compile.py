"""`compile`: `torch.compile` of the flat graph, in this process.

It compiles when a program is bound, with `compile="now"`, at the sizes of `sizes_to_try`; named dims are marked dynamic. A later call that would have to
compile again runs the flat graph instead: a call never compiles. Nothing outlives the process but torch's own cache; `aot` keeps its programs.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from ..errors import LoweringError, WidepackError
from ..spec.input_spec import parse_type
from .flat import flatten
from .task import Function, Sizes, Task, Unavailable, first_line, sizes_to_try, words
from .tracing import with_weights
from .variants import Checked, Variant

NAME = "compile"
COPIES = False


def bind(task: Task) -> Function:
    """Raises: Unavailable unless the task may compile; LoweringError for what does not compile, or answers otherwise."""
    if not task.compile:
        raise Unavailable(
            f"{task.said} would have to be compiled, which torch.compile does in every process anew, and loading never compiles unless it is asked to: "
            "load(backend='compile', compile='now') does it now; `widepack compile ARTIFACT` and backend='aot' compile once for all processes"
        )
    flat = flatten(task.program, task.weights, NAME, task.said)
    module = with_weights(flat, task.device)[0]
    run: Any = torch.compile(module, fullgraph=True)
    sizes: Any = None
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            for sizes in sizes_to_try(task):
                if task.progress:
                    task.progress(f"compiling {task.said}", 0, 1)
                _try(task, run, flat, sizes)
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{task.said} does not compile with torch.compile of torch {torch.__version__}{f' at {words(sizes)}' if sizes else ''}: {type(e).__name__}: {first_line(e)}; "
            "load with backend='eager'"
        ) from e

    def call(inputs: list[torch.Tensor]) -> Any:
        with _STEADY:
            return run(*inputs)

    return Checked(task.device, flat, [Variant(call)], task.eager)


class _Steady:
    """While any call runs, nothing compiles. torch keeps its stance for the whole process: the first call that is in takes it, the last that is out gives it back."""

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


_STEADY = _Steady()


def _try(task: Task, run: Any, flat: Any, sizes: Sizes) -> None:
    """Compile for one call's sizes and hold the answer to the flat graph's. Raises: LoweringError."""
    try:
        inputs = [x.contiguous() for x in task.inputs(sizes)]
        want = task.eager(*inputs)
    except (RuntimeError, ValueError, IndexError):
        return  # inputs that members do not take at these sizes
    for x, slot in zip(inputs, flat.program.inputs):
        shift = x.dim() - len(parse_type(slot.type)[1])
        for axis, dim in enumerate(parse_type(slot.type)[1]):
            if not isinstance(dim, int) and x.shape[axis + shift] > 1:
                torch._dynamo.mark_dynamic(x, axis + shift)
    wrong = task.differ(flat.outputs(run(*inputs)), want)
    if wrong:
        raise LoweringError(
            f"{task.said}: the compiled program differs from the flat graph at {words(sizes) or 'its sizes'}: {wrong}; load with backend='eager'"
        )
