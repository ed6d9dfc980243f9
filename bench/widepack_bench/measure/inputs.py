"""Inputs for an artifact, made from what its manifest says: types, named dims, bounds and guards."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from widepack.spec.draws import Source, draw_all
from widepack.spec.input_spec import DimExpr, parse_type
from widepack_artifacts import guards
from widepack_artifacts import tree
from widepack_artifacts.manifest import Entry

from ..errors import BenchError

LIMIT = 64  # a dim without a closer bound is looked for up to here, then up to 1024
KEPT, KEPT_OF_MANY = 64, 12  # sizes of a dim that are tried together with those of other dims


def batch_dim(entry: Entry) -> str:
    """The dim that the batch runs along: `B`, else the first named dim of the first input that has one; empty where every size is fixed."""
    if "B" in entry.dims:
        return "B"
    named = [d.letter for i in entry.inputs for d in parse_type(i.type)[1] if isinstance(d, DimExpr)]
    return named[0] if named else ""


def sizes(entry: Entry, batch: int) -> dict[str, int]:
    """A size for every named dim: the batch as asked, the others near the middle of [max(min, 2), min(max, 64)], such that all guards hold.

    Raises: BenchError where no such sizes are found, naming the guards.
    """
    first = batch_dim(entry)
    if first:
        dim = entry.dims[first]
        if batch < dim.min or (dim.max is not None and batch > dim.max):
            raise BenchError(f"batch {batch}: the model was built for {first} from {dim.min} to {dim.max if dim.max is not None else 'any'}")
    fixed = {first: batch} if first else {}
    others = [name for name in entry.dims if name not in fixed]
    for limit in (LIMIT, 1024):
        choices = [_candidates(entry, name, limit, fixed)[: KEPT if len(others) < 3 else KEPT_OF_MANY] for name in others]
        for picked in _nearest(choices):
            found = fixed | dict(zip(others, picked, strict=True))
            if all(guards.holds(g.expr, found) for g in entry.guards):
                return found
        if not others:
            break
    conditions = ", ".join(guards.text(g.expr) for g in entry.guards)
    raise BenchError(f"batch {batch}: no sizes of {', '.join(entry.dims)} were found that satisfy {conditions}")


def _candidates(entry: Entry, name: str, limit: int, fixed: dict[str, int]) -> list[int]:
    """A dim's sizes from the middle outwards that satisfy the guards on it alone."""
    dim = entry.dims[name]
    low = max(dim.min, 2) if dim.max is None or dim.max >= 2 else dim.min
    high = max(low, min(dim.max if dim.max is not None else limit, limit))
    alone = [g.expr for g in entry.guards if _letters(g.expr) <= {name, *fixed}]
    fitting = (size for size in range(low, high + 1) if all(guards.holds(expr, {**fixed, name: size}) for expr in alone))
    return sorted(fitting, key=lambda size: abs(size - (low + high) // 2))


def _letters(expr: guards.Expr) -> set[str]:
    """The dims that a guard is about."""
    if isinstance(expr, list):
        return {letter for part in expr[1:] for letter in _letters(part)}
    return {expr} if isinstance(expr, str) else set()


def _nearest(choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Combinations in the order of their largest rank, so that no dim runs to its end before the others start."""
    if not all(choices):
        return
    for rank in range(max((len(c) for c in choices), default=1)):
        for ranks in itertools.product(*(range(min(rank + 1, len(c))) for c in choices)):
            if max(ranks, default=0) == rank:
                yield tuple(c[r] for c, r in zip(choices, ranks, strict=True))


def make(entry: Entry, batch: int, *, members: int = 0, device: str = "cpu", seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    """Positional inputs, keyword inputs and the sizes chosen.

    members: 0 for inputs that all members share, else N for one a member, `[N, ...]`. Floats are standard normal, integers within the manifest's
    bounds (0 and 1 where it has none), the same numbers on every device. States are left out: whoever calls has them.
    """
    found = sizes(entry, batch)
    sources = [Source(i.name, i.type, i.low, i.high) for i in entry.inputs]
    calls = [draw_all(sources, found, seed + member) for member in range(members or 1)]
    values = [(torch.stack(leaf) if members else leaf[0]).to(device) for leaf in zip(*calls, strict=True)]
    carried = {s.input for s in entry.state}
    args, kwargs = arranged(entry, values, leave={p.name for p in entry.signature if carried & set(tree.paths(p.tree))})
    return args, kwargs, found


def arranged(entry: Entry, values: Sequence[Any], leave: Collection[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a call from its leaves, but for the parameters to leave out."""
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
