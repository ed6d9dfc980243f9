"""Follows branches on whether a mask selected any rows, such as

    if rows.shape[0] > 0:
        y.index_add_(0, rows, net(x[rows]))

The number of rows is data, so torch.export does not follow such a branch. If an export fails at one, it is
repeated as if each selection had rows. Code under such a branch usually does nothing where there are none.
`same_without_rows` in `trial.py` checks this. If it does not hold, the member is refused as before.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)

from ...ir.torch_internals import replaced
from ..explain import is_infrastructure, user_frame

_ASKING = ("symbolic_shapes.py", "sym_node.py", "recording.py", "torch/__init__.py")


@contextmanager
def rows_assumed(lines: set[str]) -> Iterator[None]:
    """Lets an export inside a with block take branches on numbers of rows as if there are rows.

    lines: receives the user's lines that select these rows.
    """
    evaluate, create = ShapeEnv.evaluate_expr, ShapeEnv.create_unbacked_symint
    selected: dict[Any, str] = {}

    def created(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        size = create(self, *args, **kwargs)
        selected[size.node.expr] = user_frame(traceback.extract_stack()[:-1])
        return size

    def evaluated(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(self, orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer, rows = _with_rows(orig_expr)
            if answer is None or rows not in selected or not _user_asks():
                raise
            lines.add(selected[rows])
            return answer

    with replaced({(ShapeEnv, "evaluate_expr"): evaluated, (ShapeEnv, "create_unbacked_symint"): created}):
        yield


def _with_rows(condition: Any) -> tuple[Any, Any]:
    """Returns a condition's truth for any number of rows from 1 on, if it is the opposite for 0 rows, and the
    number of rows. (None, None) for other conditions.
    """
    symbols: set[Any] = getattr(condition, "free_symbols", set())
    if len(symbols) != 1 or free_unbacked_symbols(condition) != symbols:
        return None, None
    (rows,) = symbols
    without = condition.subs(rows, 0)
    some = condition.subs(rows, sympy.Symbol("more", integer=True, nonnegative=True) + 1)
    opposite = {without, some} == {sympy.true, sympy.false}
    return (some, rows) if opposite else (None, None)


def _user_asks() -> bool:
    """Whether the member's code itself asks for the truth of a condition, not a function of torch."""
    frame = sys._getframe(1)  # as traceback does, without reading source files
    while frame.f_back is not None and frame.f_code.co_filename.endswith((*_ASKING, __file__)):
        frame = frame.f_back
    return not is_infrastructure(frame.f_code.co_filename)
