"""Counts one kernel: FLOP, other operations and bytes, from the sizes of its tensors.

A kernel without a FLOP formula does other operations:

1. A pool does one for each element of its window and each element of its result, an adaptive pool one for
   each element that it reads.
2. An embedding bag does one for each element of the rows that it adds up.
3. A Fourier transform of n complex numbers does 5 * log2(n) for each, one of real numbers half of that.
4. An op with a number of operations in its record does so many for each element of its first result: none,
   if it copies, makes, gathers or orders values.
5. torch tags elementwise ops as `pointwise`: one for each element of the result.
6. torch tags sums and the like as `reduction`: one for each element that is read.
7. Any other op is not counted: None. It is named where totals are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from widepack_artifacts.costs import MASKED
from widepack_artifacts.program import Node

from ..ir import ops
from ..ir.limits import tensors
from ..ir.op_records import RECORDS, OpRecord, by_tags
from ..ir.torch_internals import op_base_name
from ..ir.values import known
from ..runtime.flop_formulas import FlopFormula
from .expressions import ZERO, SizeSymbols
from .live_storages import LiveStorages


@dataclass
class Kernel:
    """A kernel of a program, and what it costs.

    node: the node that starts it. op: its name, such as `aten.addmm`. shared: whether it runs once for all
    members. times: how often it runs in a call. read: the sizes of the tensors that it reads. strides: of the
    first of them. made: the sizes of its first result. costs: each measure as [shared, member]. written:
    (serial of the storage, bytes, whether it is shared) of each result. counted: whether operations are
    known.
    """

    node: Node
    op: str
    shared: bool
    times: int
    read: tuple[tuple[Any, ...], ...]
    strides: tuple[Any, ...]
    made: tuple[Any, ...]
    costs: dict[str, list[Any]] = field(default_factory=dict)
    written: list[tuple[int, Any, bool]] = field(default_factory=list)
    counted: bool = True

    def add(self, measure: str, amount: Any, shared: bool) -> None:
        """Adds to a measure."""
        self.costs.setdefault(measure, [ZERO, ZERO])[0 if shared else 1] += amount

    def count(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        formula: FlopFormula | None,
        symbols: SizeSymbols,
        live: LiveStorages,
    ) -> None:
        """Adds the costs of a call of the kernel. formula: of its FLOP."""
        self.add("kernels", symbols.expr(1), True)
        name, given = op_base_name(op) or getattr(op, "__name__", ""), [*args, *kwargs.values()]
        if formula is not None:
            flop = symbols.expr(formula(*args, **kwargs, out_val=result))
            self.add("flops", flop, self.shared)
            if "attention" in name:
                _add_masked(self, ops.bind(ops.name_of(op), tuple(args), dict(kwargs)), flop, symbols)
        else:
            done = other_ops(name, op, given, result)
            self.counted = done is not None or not reads_numbers(given)
            self.add("ops", symbols.expr(0 if done is None else done), self.shared)
        _count_reads(self, name, op, given, result, symbols, live)
        for tensor in tensors(result):
            storage = live.made(tensor, shared=self.shared)
            size = symbols.bytes_read(tensor, False)
            self.add("acts_written", size, storage.shared)
            self.written.append((storage.serial, size, storage.shared))
        _drop_unknown(self, symbols)


def _add_masked(kernel: Kernel, bound: Mapping[str, Any], flop: Any, symbols: SizeSymbols) -> None:
    """Adds the FLOP of the pairs (query, key) that `is_causal` forbids. bound: arguments of attention."""
    if bound.get("is_causal") is not True:
        return
    queries, keys = (symbols.expr(bound[name].shape[-2]) for name in ("query", "key"))
    rows = sympy.Min(queries, keys)  # the queries that are forbidden some keys
    forbidden = rows * keys - rows * (rows + 1) / 2
    kernel.add(MASKED, sympy.expand(sympy.cancel(flop / (queries * keys)) * forbidden), kernel.shared)


def _count_reads(
    kernel: Kernel,
    name: str,
    op: Any,
    args: Sequence[Any],
    result: Any,
    symbols: SizeSymbols,
    live: LiveStorages,
) -> None:
    """Adds the bytes that a kernel reads: every tensor once."""
    seen: set[Any] = set()
    for i, tensor in enumerate(tensors(args)):
        storage = live.of(tensor)
        weight = storage is not None and storage.weight
        of_all = kernel.shared if storage is None else storage.shared
        place = (
            id(tensor) if storage is None else storage.serial,
            str(tensor.storage_offset()),
            tensor.shape,
        )
        if str(place) in seen:
            continue
        seen.add(str(place))
        elements = looked_up(name, op, args, result) if i == 0 else None
        if elements is not None:
            # a table that all members share is still read at places of each member
            size, of_all = symbols.expr(elements) * symbols.element(tensor.dtype, weight), kernel.shared
        else:
            size = symbols.bytes_read(tensor, weight)
        kernel.add("weights_read" if weight else "acts_read", size, of_all)


def _drop_unknown(kernel: Kernel, symbols: SizeSymbols) -> None:
    """Leaves out amounts that depend on sizes which only values determine."""
    for pair in kernel.costs.values():
        for i, amount in enumerate(pair):
            if not symbols.is_known(amount):
                pair[i], kernel.counted = ZERO, False
    kernel.written = [row for row in kernel.written if symbols.is_known(row[1])]


_ADAPTIVE = ("_adaptive_avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "mkldnn_adaptive_avg_pool")
_TRANSFORMS = {"_fft_c2c": 5.0, "_fft_r2c": 2.5, "_fft_c2r": 2.5}
"""Operations for each element and each power of two in the size of a Fourier transform."""


def other_ops(name: str, op: Any, args: Sequence[Any], result: Any) -> Any:
    """Returns the number of operations of a kernel, or None if it is not counted.

    name: without library and overload, for example `native_layer_norm`.
    """
    made, read = list(tensors(result)), list(tensors(args))
    facts = _facts(name, op)
    if name.startswith(_ADAPTIVE):
        return read[0].numel()
    if facts.cost == "pool":
        window = [args[1]] if isinstance(args[1], int) else list(args[1])
        spatial = int(name.split("pool")[1][0])
        return made[0].numel() * math.prod(window) ** (spatial if len(window) == 1 else 1)
    if facts.cost == "bag":
        return _rows_of_bags(read)
    if name in _TRANSFORMS:
        return _of_transform(_TRANSFORMS[name], made[0] if name == "_fft_c2r" else read[0], args[1])
    if facts.ops is not None:
        return facts.ops * made[0].numel()
    if torch.Tag.reduction in getattr(op, "tags", ()) or name == "trace":
        return read[0].numel() if read else None
    return None


def looked_up(name: str, op: Any, args: Any, result: Any) -> Any:
    """Returns how many elements of its first argument an op looks up; None if it reads the whole.

    name: without library and overload.
    """
    facts = _facts(name, op)
    if facts.cost == "bag":
        return _rows_of_bags(list(tensors(args)))
    made = next(tensors(result), None)
    return made.numel() if facts.reads == "result" and made is not None else None


def _facts(name: str, op: Any) -> OpRecord:
    """Returns what is known of a kernel, which programs need not be able to name."""
    library = getattr(op, "namespace", "aten")
    return RECORDS.get(f"{library}.{name}") or by_tags(op) or OpRecord()


def _rows_of_bags(read: Sequence[Tensor]) -> Any:
    """Returns the number of elements in the rows of a table [R, W] at the places [P]."""
    table, places = read[:2]
    return places.numel() * table.shape[1]


def _of_transform(each: float, numbers: Tensor, dims: Sequence[int]) -> Any:
    """Returns the operations of a Fourier transform over dims; None if a size of them is a symbol.

    numbers: the argument, or the result where that is real.
    """
    sizes = [known(numbers.shape[d]) for d in dims]
    if None in sizes:
        return None
    return math.ceil(each * sum(math.log2(n) for n in sizes if n)) * numbers.numel()


def reads_numbers(args: Any) -> bool:
    """Whether an op reads floating or complex tensors, so that leaving it out makes totals too small."""
    return any(t.is_floating_point() or t.is_complex() for t in tensors(args))
