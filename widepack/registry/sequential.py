"""What runs an op when no strategy of its own does: `sequential`, one op once a member.

It is the tests' definition of every strategy, and the last resort for a single op. Never member 0 for everybody.
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Shared, Stacked, Value
from .writer import Writer, put_shared, wide_items


def sequential(w: Writer, op: str, args: Any, kwargs: Any) -> Any:
    """The op once a member on its own slices, results stacked; several outputs give several."""
    stacked = {id(x): w.call("unbind.int", x.value) for x in wide_items([args, kwargs]) if isinstance(x, Stacked)}
    runs = [w.call(op, *member(args, i, w, stacked), **member(kwargs, i, w, stacked)) for i in range(w.members)]
    return join(w, runs)


def member(args: Any, i: int, w: Writer, stacked: dict[int, Value]) -> Any:
    """Member i's arguments."""
    if isinstance(args, Stacked):
        return w.call("operator.getitem", stacked[id(args)], i)
    if isinstance(args, Shared):
        return put_shared(args)
    if isinstance(args, (list, tuple)):
        return [member(a, i, w, stacked) for a in args]
    if isinstance(args, dict):
        return {k: member(a, i, w, stacked) for k, a in args.items()}
    return args


def join(w: Writer, runs: list[Value]) -> Any:
    """N results as one Stacked value, or a tuple of them."""
    if isinstance(runs[0].held, (tuple, list)):
        parts = range(len(runs[0].held))
        return tuple(join(w, [w.call("operator.getitem", r, k) for r in runs]) for k in parts)
    return Stacked(w.call("stack", runs))
