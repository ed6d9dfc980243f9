"""Gives an export the shapes of a recurrent layer's result at once.

torch computes them step after step: seconds for a GRU of 64 steps whose batch is dynamic. The layer is one
node of the program in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ...ir.limits import recurrent_result
from ...ir.op_records import RECURRENT_LAYERS
from ...ir.torch_internals import decompositions_wrapped, is_fake


@contextmanager
def recurrent_shapes() -> Iterator[None]:
    """Computes the shapes of recurrent layers without their steps, inside a with block."""
    with ExitStack() as stack:
        for name in sorted(RECURRENT_LAYERS):
            wrap = partial(partial, _at_once, f"{name}.input")
            stack.enter_context(decompositions_wrapped(name.removeprefix("aten."), "input", wrap))
        yield


def _at_once(op: str, steps: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns a layer's result without numbers; for an input with numbers what `steps` returns."""
    result = recurrent_result(op, args, kwargs) if is_fake(args[0]) else None
    return steps(*args, **kwargs) if result is None else result
