"""Counts one kernel: FLOP, other operations and bytes, from the sizes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from widepack_artifacts.costs import MASKED

from ..ir import ops
from ..ir.torch_internals import op_base_name
from ..registry.flop_formulas import FlopFormula, tensors_in
from .expressions import ZERO, World
from .live_storages import LiveStorages
from .other_ops import looked_up, other_ops, reads_numbers


@dataclass
class KernelCount:
    """What one kernel costs. Each measure is [shared, member].

    written: (serial of the storage, bytes, whether it is shared) of each result. counted: whether operations
    are known.
    """

    costs: dict[str, list[Any]] = field(default_factory=dict)
    written: list[tuple[int, Any, bool]] = field(default_factory=list)
    counted: bool = True

    def add(self, measure: str, amount: Any, shared: bool) -> None:
        """Adds to a measure."""
        self.costs.setdefault(measure, [ZERO, ZERO])[0 if shared else 1] += amount


def count_kernel(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    formula: FlopFormula | None,
    world: World,
    live: LiveStorages,
    shared: bool,
) -> KernelCount:
    """Counts a kernel. formula: of its FLOP. shared: whether it runs once for all members."""
    count = KernelCount()
    count.add("kernels", world.expr(1), True)
    name = op_base_name(op) or getattr(op, "__name__", "")
    if formula is not None:
        flop = world.expr(formula(*args, **kwargs, out_val=result))
        count.add("flops", flop, shared)
        if "attention" in name:
            _add_masked(count, ops.bind(ops.name_of(op), tuple(args), dict(kwargs)), flop, world, shared)
    else:
        done = other_ops(name, op, [*args, *kwargs.values()], result)
        count.counted = done is not None or not reads_numbers([*args, *kwargs.values()])
        count.add("ops", world.expr(0 if done is None else done), shared)
    _count_reads(count, name, [*args, *kwargs.values()], result, world, live, shared)
    for tensor in tensors_in(result):
        storage = live.made(tensor, shared=shared)
        size = world.bytes_read(tensor, False)
        count.add("acts_written", size, storage.shared)
        count.written.append((storage.serial, size, storage.shared))
    _drop_unknown(count, world)
    return count


def _add_masked(count: KernelCount, bound: Mapping[str, Any], flop: Any, world: World, shared: bool) -> None:
    """Adds the FLOP of the pairs (query, key) that `is_causal` forbids. bound: arguments of attention."""
    if bound.get("is_causal") is not True:
        return
    queries, keys = (world.expr(bound[name].shape[-2]) for name in ("query", "key"))
    rows = sympy.Min(queries, keys)  # the queries that are forbidden some keys
    forbidden = rows * keys - rows * (rows + 1) / 2
    count.add(MASKED, sympy.expand(sympy.cancel(flop / (queries * keys)) * forbidden), shared)


def _count_reads(
    count: KernelCount,
    name: str,
    args: Sequence[Any],
    result: Any,
    world: World,
    live: LiveStorages,
    shared: bool,
) -> None:
    """Adds the bytes that a kernel reads: every tensor once."""
    seen: set[Any] = set()
    for i, tensor in enumerate(tensors_in(list(args))):
        storage = live.of(tensor)
        weight = storage is not None and storage.weight
        of_all = shared if storage is None else storage.shared
        place = (
            id(tensor) if storage is None else storage.serial,
            str(tensor.storage_offset()),
            tensor.shape,
        )
        if str(place) in seen:
            continue
        seen.add(str(place))
        elements = looked_up(name, args, result) if i == 0 else None
        if elements is not None:
            # a table that all members share is still read at places of each member
            size, of_all = world.expr(elements) * world.element(tensor.dtype, weight), shared
        else:
            size = world.bytes_read(tensor, weight)
        count.add("weights_read" if weight else "acts_read", size, of_all)


def _drop_unknown(count: KernelCount, world: World) -> None:
    """Leaves out amounts that depend on sizes which only values determine."""
    for pair in count.costs.values():
        for i, amount in enumerate(pair):
            if not world.is_known(amount):
                pair[i], count.counted = ZERO, False
    count.written = [row for row in count.written if world.is_known(row[1])]
