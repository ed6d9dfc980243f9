"""Makes inputs for an artifact from its manifest: types, named dims, bounds and guards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from widepack.ir.tensor_type import parse_slot
from widepack.spec.draws import InputSource, draw_all
from widepack.spec.input_spec import DimExpr
from widepack_artifacts import guards, tree
from widepack_artifacts.entry import Entry

from ..errors import BenchError

LIMIT = 64  # The first search limit of a dim without a bound; the second is 1024.
KEPT, KEPT_OF_MANY = 64, 12  # Sizes of a dim that are combined with those of other dims.


def batch_dim(entry: Entry) -> str:
    """Returns the batch dim: `B`, or else the first named dim of the first input that has one.

    Empty where every size is fixed.
    """
    if "B" in entry.dims:
        return "B"
    named = [d.letter for i in entry.inputs for d in parse_slot(i.type).dims if isinstance(d, DimExpr)]
    return named[0] if named else ""


def sizes(entry: Entry, batch: int) -> dict[str, int]:
    """Returns a size for every named dim for which all guards hold.

    The batch is the requested one. The others are near the middle of [max(min, 2), min(max, 64)]. Raises:
    BenchError with the guards where no sizes are found.
    """
    first = batch_dim(entry)
    if first:
        dim = entry.dims[first]
        if batch < dim.min or (dim.max is not None and batch > dim.max):
            raise BenchError(
                f"batch {batch}: the model was built for {first} from {dim.min} to "
                f"{dim.max if dim.max is not None else 'any'}"
            )
    fixed = {first: batch} if first else {}
    others = [name for name in entry.dims if name not in fixed]
    for limit in (LIMIT, 1024):
        choices = [
            _candidates(entry, name, limit, fixed)[: KEPT if len(others) < 3 else KEPT_OF_MANY]
            for name in others
        ]
        for picked in _nearest(choices):
            named = fixed | dict(zip(others, picked, strict=True))
            if all(guards.holds(g.expr, named) for g in entry.guards):
                return named
        if not others:
            break
    conditions = ", ".join(guards.text(g.expr) for g in entry.guards)
    raise BenchError(
        f"batch {batch}: no sizes of {', '.join(entry.dims)} were found that satisfy {conditions}"
    )


def _candidates(entry: Entry, name: str, limit: int, fixed: dict[str, int]) -> list[int]:
    """Returns a dim's sizes that satisfy the guards on it alone, from the middle outwards."""
    dim = entry.dims[name]
    low = max(dim.min, 2) if dim.max is None or dim.max >= 2 else dim.min
    high = max(low, min(dim.max if dim.max is not None else limit, limit))
    alone = [g.expr for g in entry.guards if _letters(g.expr) <= {name, *fixed}]
    fitting = (
        size
        for size in range(low, high + 1)
        if all(guards.holds(expr, {**fixed, name: size}) for expr in alone)
    )
    return sorted(fitting, key=lambda size: abs(size - (low + high) // 2))


def _letters(expr: guards.Expr) -> set[str]:
    """Returns the dims of a guard."""
    if isinstance(expr, list):
        return {letter for part in expr[1:] for letter in _letters(part)}
    return {expr} if isinstance(expr, str) else set()


def _nearest(choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yields combinations in the order of their largest rank: all dims move away from the middle together."""
    if not all(choices):
        return
    for rank in range(max((len(c) for c in choices), default=1)):
        for ranks in itertools.product(*(range(min(rank + 1, len(c))) for c in choices)):
            if max(ranks, default=0) == rank:
                yield tuple(c[r] for c, r in zip(choices, ranks, strict=True))


def make(
    entry: Entry, batch: int, *, members: int = 0, device: str = "cpu", seed: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    """Returns positional inputs, keyword inputs and the chosen sizes.

    members: 0 for inputs that all members share, or N for stacked inputs `[N, ...]`. Floats are standard
    normal. Integers are within the manifest's bounds (0 and 1 where it has none). The numbers are the same on
    every device. States are left out: the caller carries them.
    """
    named = sizes(entry, batch)
    sources = [InputSource(i.name, i.type, i.low, i.high) for i in entry.inputs]
    calls = [draw_all(sources, named, seed + member) for member in range(members or 1)]
    values = [(torch.stack(leaf) if members else leaf[0]).to(device) for leaf in zip(*calls, strict=True)]
    carried = {s.input for s in entry.state}
    args, kwargs = arranged(
        entry, values, leave={p.name for p in entry.signature if carried & set(tree.paths(p.tree))}
    )
    return args, kwargs, named


def arranged(
    entry: Entry, values: Sequence[Any], leave: Collection[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arranges leaves as the inputs of a call, without the parameters in `leave`."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, kind, shape, *_ in entry.signature:
        if name in leave:
            continue
        value = tree.build(shape, list(values), lambda _name, rows: dict(rows))
        if kind == "positional":
            args.append(value)
        else:
            kwargs[name] = value
    return tuple(args), kwargs


Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
