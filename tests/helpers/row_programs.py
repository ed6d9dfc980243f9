"""Grows random programs whose rows the walk proves to be independent, and compares each value with the proof.

A program grows by one node at a time: an op from `row_program_ops.py` over values that are there. A node that
the walk refuses is dropped, so what stays is proved. Then the program runs on other batches: a row is
replaced, and each row runs alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from row_program_ops import OPS, Args
from torch import Tensor

from widepack.errors import LoweringError
from widepack.ir import ops
from widepack.ir.encoding import decode, encode
from widepack.ir.fake_values import CPU, Fakes, replay, run_node
from widepack.rows.call import Batch, MixesRows, expression
from widepack.rows.layout import EVEN, Layout, RowAxis, RowNumbers
from widepack.rows.verdict import UNREADABLE
from widepack.rows.walk import layout_of_node, walk
from widepack_artifacts.program import Node, Output, Program, Ref, Slot, substitute

WALKED, OTHER = 5, 7
"""The batch of the walk, and another one: from both it is known how a size depends on the batch."""
INPUTS = {
    "x": "float64[B,6]",
    "y": "float64[B,3,5]",
    "t": "float64[5,B,2]",
    "i": "int64[B,3]",
    "k": "int64[B]",
}
WEIGHTS = {"w": (6,), "m": (5, 6), "c": (5, 5), "v": (3, 5), "one": (1,)}
REFUSED = (MixesRows, *UNREADABLE)
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError)
LARGEST = 3000
"""The most numbers of a value."""
CLOSE = 1e-7
LEAST = 1e-3
"""A difference below `CLOSE` times this is rounding of numbers that cancel."""


def draws(rows: int, seed: int) -> dict[str, Tensor]:
    """Returns inputs and weights. The weights are the same for all seeds."""
    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    found = {n: torch.randn(s, generator=same, dtype=torch.float64) for n, s in WEIGHTS.items()}
    for name, type_ in INPUTS.items():
        dtype, _, sizes = type_.partition("[")
        shape = [rows if s == "B" else int(s) for s in sizes[:-1].split(",")]
        if dtype == "int64":
            found[name] = torch.randint(0, 3, shape, generator=own)
        else:
            found[name] = torch.randn(shape, generator=own, dtype=torch.float64)
    return found


def run(nodes: Sequence[Node], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all values of a program."""
    found = dict(values)
    for node in nodes:
        args = decode(substitute(node.args, found.__getitem__), CPU)
        kwargs = decode(substitute(node.kwargs, found.__getitem__), CPU)
        found[node.name] = ops.resolve(node.op)(*args, **kwargs)
    return found


@dataclass
class Grown:
    """A program that grows. at: its values for both batches. sizes: the nodes that compute sizes."""

    draw: random.Random
    nodes: list[Node] = field(default_factory=list)
    at: tuple[dict[str, Any], dict[str, Any]] = field(
        default_factory=lambda: (dict(draws(WALKED, 1)), dict(draws(OTHER, 1)))
    )
    layouts: dict[str, Layout] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: [*INPUTS, *WEIGHTS])

    def __post_init__(self) -> None:
        self.restart()

    def program(self) -> Program:
        """Returns the program, with all values as outputs."""
        weights = tuple(Slot(n, n, "shared", f"float64[{','.join(map(str, s))}]") for n, s in WEIGHTS.items())
        inputs = tuple(Slot(n, n, "shared", t) for n, t in INPUTS.items())
        return Program(weights, inputs, tuple(self.nodes), (Output(Ref(self.names[-1]), "shared"),))

    def restart(self) -> None:
        """Computes the sizes of all values anew: an op that is dropped may have fixed the batch."""
        self.fakes, self.fixed = Fakes({"B": WALKED}), Fakes({"B": WALKED}, static=True)
        values, symbolic = replay(self.program(), self.fixed), replay(self.program(), self.fakes)
        self.batch = Batch(values, symbolic, expression(self.fakes.dims["B"]), WALKED, 1)
        if not self.layouts:
            self.layouts = {**dict.fromkeys(WEIGHTS), **{n: RowAxis(axis(n)) for n in INPUTS}}

    def examine(self, nodes: Sequence[Node]) -> dict[str, Layout]:
        """Returns the layouts of all values, with those of new nodes. Raises: an error of the walk."""
        values, symbolic, layouts = dict(self.batch.values), dict(self.batch.symbolic), dict(self.layouts)
        for node in nodes:
            values[node.name] = run_node(node, values, self.fixed, 0)
            symbolic[node.name] = run_node(node, symbolic, self.fakes, 0)
            batch = replace(self.batch, values=values, symbolic=symbolic)
            layouts[node.name] = layout_of_node(node, layouts, batch)
        self.fakes.check()
        self.batch = replace(self.batch, values=values, symbolic=symbolic)
        return layouts

    def append(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Adds a node with its values. Raises: an error of the op."""
        name = f"n{len(self.nodes)}"
        node = Node(name, op, tuple(encode(list(args))), dict(encode(dict(kwargs))))
        for values in self.at:
            values[name] = run([node], values)[name]
        self.nodes.append(node)
        return name

    def size(self, here: int, there: int) -> Any:
        """Returns a size by its numbers for both batches: a number, or a node that computes it."""
        if here == there:
            return here
        factor, rest = divmod(there - here, OTHER - WALKED)
        if rest:
            raise ValueError("no multiple of the batch")
        name = self.append("aten.sym_size.int", [Ref("x"), 0], {})
        if factor != 1:
            name = self.append("operator.mul", [Ref(name), factor], {})
        if more := here - factor * WALKED:
            name = self.append("operator.add", [Ref(name), more], {})
        return Ref(name)

    def grow(self) -> bool:
        """Adds one op. Returns whether it stays."""
        before, values = list(self.nodes), [dict(v) for v in self.at]
        try:
            op, args, kwargs = self.draw.choice(OPS)(Args(self.draw, self.names, self.at, self.size))
            added = [self.append(op, args, kwargs)]
            results = [v[added[0]] for v in self.at]
            if isinstance(results[0], (tuple, list)):
                at = self.draw.randrange(len(results[0]))
                added.append(self.append("operator.getitem", [Ref(added[0]), at], {}))
                results = [v[added[1]] for v in self.at]
            fits = all(isinstance(r, Tensor) and 0 < r.numel() <= LARGEST and r.dim() < 6 for r in results)
            self.names.append(added[-1])
            if fits:
                layouts = self.examine(self.nodes[len(before) :])
                if layouts[self.names[-1]] is not None or self.draw.random() < 0.2:
                    self.layouts = layouts
                    return True
        except (*FAILURES, *REFUSED):
            pass
        self.nodes, self.at = before, (values[0], values[1])
        self.names = [n for n in self.names if n in values[0]]
        try:
            self.fakes.check()
        except LoweringError:
            self.restart()
        return False


def grown(seed: int, size: int) -> Grown:
    """Returns a program of so many ops, by its seed."""
    found = Grown(random.Random(seed))
    for _ in range(size * 12):
        found.grow()
        if len(found.names) >= len(INPUTS) + len(WEIGHTS) + size:
            break
    (found.layouts,) = walk(found.program(), "B", [{"B": WALKED}])
    return found


def row_of(value: Tensor, layout: Layout, row: int, rows: int) -> Tensor:
    """Returns what a value has of a row, or all of a value without rows."""
    if not isinstance(layout, RowAxis):
        return value
    places = [i for i in range(value.shape[layout.dim]) if i // layout.after % rows == row]
    return value.index_select(layout.dim, torch.tensor(places))


def same(a: Tensor, b: Tensor) -> bool:
    """Returns whether two values are equal but for rounding. NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = a[torch.isfinite(a)].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * (scale + LEAST), equal_nan=True)


def axis(name: str) -> int:
    """Returns the dim of the rows of an input."""
    return INPUTS[name].partition("[")[2][:-1].split(",").index("B")


def changed(values: Mapping[str, Tensor], row: int, how: str, rows: int) -> dict[str, Tensor]:
    """Returns values whose inputs have another row."""
    found, others = dict(values), draws(rows, 99)
    for name in INPUTS:
        value, dim = values[name].clone(), axis(name)
        new = {
            "draw": others[name].select(dim, row),
            "copy": value.select(dim, (row + 1) % rows).clone(),
            "zero": torch.zeros_like(value.select(dim, row)),
            "large": value.select(dim, row) * (1e5 if value.is_floating_point() else 0) + 2,
            "nan": value.select(dim, row) * (torch.nan if value.is_floating_point() else 1),
        }[how]
        value.select(dim, row).copy_(new)
        found[name] = value
    return found


def wrong(found: Grown) -> str:
    """Returns which value of a program is not as the walk says; "" if none is."""
    layouts = {n: y for n, y in found.layouts.items() if n in found.names}
    for rows in (2, 3, 6):
        values = draws(rows, rows)
        try:
            right = run(found.nodes, values)
        except FAILURES:
            continue
        for row in range(rows):
            for how in ("draw", "copy", "zero", "large", "nan"):
                try:
                    other = run(found.nodes, changed(values, row, how, rows))
                except FAILURES:
                    continue
                for name, layout in layouts.items():
                    for r in set(range(rows)) - {row}:
                        if not same(
                            row_of(right[name], layout, r, rows), row_of(other[name], layout, r, rows)
                        ):
                            return f"{name} {layout}: row {row} of {rows} ({how}) changes row {r}"
            alone = {
                n: v.index_select(axis(n), torch.tensor([row])) if n in INPUTS else v
                for n, v in values.items()
            }
            try:
                other = run(found.nodes, alone)
            except FAILURES:
                continue
            for name, layout in layouts.items():
                if not _same_alone(right[name], other[name], layout, row, rows):
                    return f"{name} {layout}: row {row} of {rows} is another alone"
    return ""


def _same_alone(many: Tensor, one: Tensor, layout: Layout, row: int, rows: int) -> bool:
    """Returns whether a value has the same row in a batch as alone."""
    if isinstance(layout, RowNumbers):
        return bool((row_of(many, layout.axis, row, rows) == row).all()) and bool((one == 0).all())
    if layout is EVEN and many.dim() == one.dim():
        for dim in range(many.dim()):
            if many.shape[dim] != one.shape[dim]:
                most = min(many.shape[dim], one.shape[dim])
                many, one = many.narrow(dim, 0, most), one.narrow(dim, 0, most)
    return same(row_of(many, layout, row, rows), one)


def smaller(found: Grown) -> Grown:
    """Returns a part of a program that is still wrong, with fewer nodes."""
    nodes = list(found.nodes)
    for node in reversed(list(nodes)):
        less = [n for n in nodes if n is not node]
        if any(Ref(node.name) in _flat((n.args, list(n.kwargs.values()))) for n in less):
            continue
        part = replace(found, nodes=less, names=[n for n in found.names if n != node.name])
        if wrong(part):
            nodes, found = less, part
    return found


def _flat(argument: Any) -> list[Any]:
    if isinstance(argument, (list, tuple)):
        return [x for a in argument for x in _flat(a)]
    return [argument]
