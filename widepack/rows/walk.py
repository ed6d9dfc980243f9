"""Walks a member program and shows that each row of an answer depends on its own row of the inputs alone.

Each value gets a layout (`layout.py`): where the rows are in it. A rule for each op says where they are in
the result, or that the op mixes them. So a program that passes has independent rows for all values of inputs
and weights. Shapes come from a run on fake tensors with sizes as expressions, and one with numbers. A size or
a number depends on the batch if its expression has the dim of the batch.

A rule that cannot tell raises `NoRule`: such a program is not shown to be independent, and may still be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from widepack_artifacts.program import Node, Program

from ..errors import LoweringError
from ..ir.fake_values import Fakes, replay
from ..ir.op_records import record
from . import families, indices, networks, products, shapes
from .axes import row_axis_of
from .call import Batch, Call, NoRule, Rule, expression
from .layout import EVEN, UNKNOWN, Layout, RowAxis, RowNumbers

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        *(families.pointwise, families.moved, families.along, families.reduction, families.over_dim),
        *(families.of_all, families.renorm, families.loss),
        *(shapes.reshape, shapes.squeeze, shapes.broadcast, shapes.repeat, shapes.repeat_interleave),
        *(shapes.select, shapes.part, shapes.parts, shapes.getitem, shapes.cat, shapes.stack, shapes.pad),
        *(shapes.same_content, shapes.arange, shapes.cast),
        *(indices.embedding, indices.one_hot, indices.gather, indices.scatter, indices.index_select),
        *(indices.index_write, indices.part_write, indices.index, indices.index_put, indices.membership),
        *(products.matmul, products.linear, products.bilinear, products.einsum, products.tensordot),
        *(products.attention, products.cdist),
        *(networks.convolution, networks.norm_of_last, networks.norm_of_groups, networks.norm_of_batch),
        *(networks.spatial, networks.prelu, networks.in_front, networks.recurrent, networks.cell),
        *(networks.spectrogram, networks.matrices),
    )
}
"""What ops do with rows, by the names that the records of ops have (`ir/op_records.py`)."""
RULES |= {
    "expand": families.moved,
    "slice_write": indices.part_write,
    "diagonal": partial(families.along, why="takes the diagonal of the rows"),
    "unfold": partial(families.along, why="makes windows of the rows"),
    "unbind": partial(families.along, why="splits the rows"),
    "matrix_part": partial(families.before_last, many=2, why="takes places by their numbers"),
    "diag_embed": partial(families.before_last, many=1, why="makes diagonals of the rows"),
}
_TAKES_SIZES = frozenset(
    {"arange", "expand", "getitem", "part", "parts", "repeat", "repeat_interleave", "reshape", "same_content"}
) | {"select"}
"""The rules that say what a number of rows among the arguments may be. All others refuse one."""
_KEEPS_NUMBERS = frozenset(
    {"arange", "broadcast", "cast", "expand", "getitem", "index", "moved", "part", "repeat", "reshape"}
) | {"squeeze"}
"""The rules that may read the number of each row: they keep it as it is, or look up the row."""
_READS_SIZES = frozenset(
    {"cast", "expand", "getitem", "index", "part", "reshape", "same_content", "select", "slice_write"}
)
"""Rules of ops whose result may have no rows where an argument has some, and no dim of the batch: most read
its sizes. `select`, `part` and `index` read places of a value that is the same for all rows, and
`slice_write` may write over all of its first argument.
"""
_COMPARISONS = frozenset(f"operator.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_WHOLE = frozenset({torch.int32, torch.int64})
"""The dtypes that have the number of every row."""


def walk(
    program: Program, letter: str, sizes: Sequence[Mapping[str, int]], least: int = 1
) -> list[dict[str, Layout]]:
    """Computes where the rows are in each value of a member program.

    Args:
        program: The program. Its inputs have types over named dims.
        letter: The dim of the batch.
        sizes: Sizes that the guards allow, each at least 2. With a second mapping in which the other dims
            have other sizes, no result depends on two sizes that are equal by chance.
        least: The smallest batch that the guards allow.

    Returns:
        For each of the sizes the layout of each value, by name.

    Raises:
        MixesRows: A node by which one row changes another.
        NoRule: The first node of which no rule shows that it keeps rows apart; no other node is known to mix
            them.
        LoweringError: The sizes of the program's values cannot be computed.
    """
    fakes = Fakes(sizes[0])
    symbolic, symbol = replay(program, fakes), expression(fakes.dims[letter])
    fakes.check()
    found = []
    for chosen in sizes:
        values = replay(program, Fakes(chosen, static=True))
        found.append(_layouts(program, letter, Batch(values, symbolic, symbol, int(chosen[letter]), least)))
    return found


def _layouts(program: Program, letter: str, batch: Batch) -> dict[str, Layout]:
    """Returns the layout of each value at one choice of sizes. Raises: as `walk`."""
    layouts: dict[str, Layout] = {s.name: None for s in program.weights}
    for slot in program.inputs:
        layouts[slot.name] = row_axis_of(slot.type, letter)
        if layouts[slot.name] is None and batch.dims(batch.symbolic[slot.name]):
            raise LoweringError(f"the input {slot.source} has a dim that must be equal to {letter}")
    first: NoRule | None = None
    for node in program.nodes:
        try:
            layouts[node.name] = layout_of_node(node, layouts, batch)
        except NoRule as e:
            first = first or e
            result = batch.values[node.name]
            layouts[node.name] = UNKNOWN if isinstance(result, torch.Tensor) else [UNKNOWN] * _count(result)
    if first is not None:
        raise first
    return layouts


def _count(result: Any) -> int:
    return len(result) if isinstance(result, (list, tuple)) else 0


def layout_of_node(node: Node, layouts: Mapping[str, Layout], batch: Batch) -> Layout:
    """Returns the layout of a node's result. batch: with the values of all nodes so far.

    Raises: MixesRows; NoRule.
    """
    if node.body is not None:
        raise NoRule(node, "a loop")
    call = Call.of(node, layouts, batch)
    if not isinstance(call.result, (torch.Tensor, list, tuple)):
        return _number(call)
    if call.reads_unknown_numbers():
        call.unknown("computes with a comparison of the number of rows")
    rows = record(node.op).rows
    if any(layout is UNKNOWN for _, layout in call.tensors()):
        _refuse_all(call, rows)
        call.unknown("reads a value whose rows are not known")
    if not rows:
        if call.reads_rows() or call.counts_rows():
            call.unknown()
        return call.several(None)
    if rows not in _KEEPS_NUMBERS and any(isinstance(layout, RowNumbers) for _, layout in call.tensors()):
        call.unknown("computes with the number of the row")
    if rows not in _TAKES_SIZES and call.counts_rows():
        call.unknown("computes with the number of rows")
    found = RULES[rows](call)
    _check(call, found)
    if rows not in _READS_SIZES:
        _keeps_rows(call, found)
    return found


def _refuse_all(call: Call, rows: str) -> None:
    """Refuses an op that reads all places of a value whose rows are not known. Raises: MixesRows."""
    whole = rows == "reduction" and "other" not in call.given and families.named_dims(call) is None
    if whole or rows == "of_all":
        call.mixes("computes with all places of a value whose rows are not known")


def _keeps_rows(call: Call, found: Layout) -> None:
    """Checks that an op which reads rows, or a dim of the batch, has such a result. Raises: NoRule."""
    read, made = _kinds(layout for _, layout in call.tensors()), _kinds([found])
    if RowAxis in read and RowAxis not in made:
        call.unknown("returns a value without rows")
    if read and not made:
        call.unknown("returns a value without a dim of the batch")


def _kinds(layouts: Iterable[Layout]) -> set[type]:
    """Returns which kinds of layouts of the batch there are: `RowAxis` also for the numbers of rows."""
    found: set[type] = set()
    for layout in layouts:
        if isinstance(layout, list):
            found |= _kinds(layout)
        elif layout is not None:
            found.add(RowAxis if isinstance(layout, RowNumbers) else type(layout))
    return found


def _number(call: Call) -> Layout:
    """A number: a size may be read of any value, the values of a tensor of none with rows.

    Whether the number of rows is larger than another, or equal to it, may become a number that is no
    expression of it: `2 * (B > 3)` is 2 in the sizes that the walk reads. So what reads a comparison is not
    known.
    """
    compares = call.node.op in _COMPARISONS and call.counts_rows()
    if compares or call.reads_unknown_numbers():
        return UNKNOWN
    if not call.node.op.startswith(("aten.sym_", "operator.", "math.", "torch.sym_")) and call.reads_rows():
        call.mixes("reads a number of all rows")
    return None


def _check(call: Call, found: Layout) -> None:
    """Checks that the rows are in the only dim of a result that depends on the batch, and in no part of it.

    Raises: NoRule for another size that depends on the number of rows.
    """
    if isinstance(call.result, torch.Tensor):
        parts: Sequence[Layout] = [found]
    elif isinstance(found, list) and len(found) == len(call.result):
        parts = found
    else:
        call.unknown("has several results")
    for number, layout in enumerate(parts):
        axis = layout.axis if isinstance(layout, RowNumbers) else layout
        dims_of_batch = call.result_dims(number) if call.has_shape(number) else []
        if isinstance(axis, RowAxis):
            if dims_of_batch != [axis.dim] or not call.is_size(number, axis):
                call.unknown("has another size that depends on the number of rows")
        elif layout is None and dims_of_batch:
            call.unknown("has a size that depends on the number of rows")
        elif layout is EVEN and not dims_of_batch:
            call.unknown("reduces a dim whose size is the number of rows")
        if isinstance(layout, RowNumbers) and call.dtype(number) not in _WHOLE:
            call.unknown("changes the type of the number of the row")
