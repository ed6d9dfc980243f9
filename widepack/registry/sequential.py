"""Runs an op once for each member: the strategy `sequential`.

Lowering uses it for an op without a strategy that applies. It also defines the result of every other
strategy: tests compare them with it.
"""

from __future__ import annotations

from typing import Any

from ..ir.encoding import map_arguments
from ..ir.values import Shared, Stacked, Value
from .writer import Writer, wide_items


def sequential(w: Writer, op: str, args: Any, kwargs: Any) -> Any:
    """Calls the op once for each member, and stacks the results; a tuple for several results."""
    stacked = {
        id(x): w.call("unbind.int", x.value) for x in wide_items([args, kwargs]) if isinstance(x, Stacked)
    }
    runs = [
        w.call(op, *member(args, i, w, stacked), **member(kwargs, i, w, stacked)) for i in range(w.members)
    ]
    return join(w, runs)


def member(args: Any, i: int, w: Writer, stacked: dict[int, Value]) -> Any:
    """Returns the arguments of member i."""

    def of_member(arg: Any) -> Any:
        if isinstance(arg, Stacked):
            return w.call("operator.getitem", stacked[id(arg)], i)
        return arg.value if isinstance(arg, Shared) else arg

    return map_arguments(args, of_member, as_lists=True)


def join(w: Writer, runs: list[Value]) -> Any:
    """Stacks the results of N members; a tuple for several results."""
    if isinstance(runs[0].fake, (tuple, list)):
        parts = range(len(runs[0].fake))
        return tuple(join(w, [w.call("operator.getitem", r, k) for r in runs]) for k in parts)
    return Stacked(w.call("stack", runs))
