"""Walks a member program and shows that each row of an answer depends on its own row of the inputs alone.

Each value gets a layout (`layout.py`): where the rows are in it. A rule for each op says where they are in
the result, or that the op mixes them. So a program that passes has independent rows for all values of inputs
and weights. Shapes come from a run on fake tensors with sizes as expressions, and one with numbers. A size or
a number depends on the batch if its expression has the dim of the batch.

A rule that cannot tell raises `NoRule`: such a program is not shown to be independent, and may still be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.program import Node, Program

from ..errors import LoweringError
from ..ir.fake_values import Fakes, replay
from . import dims, indices, networks, pointwise, products, shapes
from .axes import row_axis_of
from .call import Batch, Call, NoRule, Rule, expression
from .layout import EVEN, UNKNOWN, Layout, RowAxis, RowNumbers

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **shapes.RULES,
    **dims.RULES,
    **products.RULES,
    **networks.RULES,
    **indices.RULES,
}
_SIZED = frozenset(
    """
    _unsafe_view arange empty expand expand_copy full narrow narrow_copy new_empty new_full new_ones new_zeros
    ones operator.getitem repeat repeat_interleave reshape select select_copy slice slice_copy split
    split_copy split_with_sizes split_with_sizes_copy tile unflatten unsafe_split unsafe_split_with_sizes
    view view_copy zeros
    """.split()  # noqa: SIM905  a list has one line for each
)
"""Ops that take sizes. Their rules say what the number of rows may be; all others refuse it."""
_NUMBERED = frozenset(
    """
    _to_copy _unsafe_view alias alias_copy arange broadcast_tensors clone contiguous detach expand expand_as
    expand_copy flatten index lift lift_fresh lift_fresh_copy movedim mT numpy_T operator.getitem permute
    permute_copy ravel repeat reshape reshape_as slice slice_copy squeeze squeeze_copy swapaxes swapdims t
    t_copy tile transpose transpose_copy unflatten unsqueeze unsqueeze_copy view view_as view_copy
    """.split()  # noqa: SIM905  a list has one line for each
)
"""Ops that may read the number of each row. Their rules keep it as it is, or look up the row."""
_COMPARISONS = frozenset(f"operator.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_READ_SIZES = frozenset(
    """
    empty_like expand_as full_like index new_empty new_full new_ones new_zeros ones_like operator.getitem
    reshape_as select select_copy slice slice_copy slice_scatter type_as view_as zeros_like
    """.split()  # noqa: SIM905  a list has one line for each
)
"""Ops whose result may have no rows where an argument has some, and no dim of the batch: most read its sizes.

`select`, `slice` and `index` read places of a value that is the same for all rows, and `slice_scatter` may
write over all of its first argument.
"""
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
    base = _base(node.op)
    if call.reads_unknown_numbers():
        call.unknown("computes with a comparison of the number of rows")
    rule = RULES.get(base)
    if rule is None and pointwise.is_pointwise(node.op):
        rule = pointwise.pointwise
    if any(layout is UNKNOWN for _, layout in call.tensors()):
        dims.refuse_all(call)
        call.unknown("reads a value whose rows are not known")
    if rule is None:
        if call.reads_rows() or call.counts_rows():
            call.unknown()
        return call.several(None)
    if base not in _NUMBERED and any(isinstance(layout, RowNumbers) for _, layout in call.tensors()):
        call.unknown("computes with the number of the row")
    if base not in _SIZED and call.counts_rows():
        call.unknown("computes with the number of rows")
    found = rule(call)
    _check(call, found)
    if base not in _READ_SIZES:
        _keeps_rows(call, found)
    return found


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


def _base(op: str) -> str:
    """Returns the name of an op without its library and its overload."""
    library, _, rest = op.partition(".")
    return rest.partition(".")[0] if library == "aten" else op


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
