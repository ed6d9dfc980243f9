"""Rewrites values at the true positions of a Stacked mask, whose number differs between members.

`y[m]` has the shape `[*a, K, *b]`, where m is true at K positions of the dims `[*m]` of y. The pass computes
at every position, `[*a, *m, *b]`, what the program computes at these K. Where the number K disappears again,
the mask chooses.

| case | a value at the positions is read by | and becomes |
|---|---|---|
| 1 | a pointwise op | the same op at every position |
| 2 | an op along dims behind the positions, a linear layer, a norm | the same op at every position |
| 3 | a reshape that removes leading dims of size 1 | the same, `[K, *b]` |
| 4 | a sum or a mean over the positions | a sum with 0 at the other positions; for a mean, divided by K |
| 5 | a loss, with or without its mean or sum | the loss at every position, then case 4 |
| 6 | `broadcast_tensors` of values of one type | the same values |
| 7 | `x[m] = v`, `x.index_put([m], v)`, `x.masked_scatter(m, v)` | `where(m, v, x)` or `where(m, x + v, x)` |

The indices of the positions, `nonzero(m)` and `where(m)`, are followed too:

| case | the indices are read by | and become |
|---|---|---|
| 8 | `unbind`, `getitem`, `select`, `squeeze`, `reshape` | the indices of one dim of m |
| 9 | `x[i, j]`, `index_select` | a value at the positions: x, the indexed dims as dims of m |
| 10 | `x[i, j] = v`, `index_copy`, `index_add` | `where`, or a sum over the dims of m without an index |

Requires: a functional member program with types, and the kinds of its slots.

Leaves alone: values that it cannot follow; Shared masks, which have the same positions for all members; ops
that may refuse a number at the other positions, where unused numbers are computed: integer divisions, table
look-ups.

Masks are compared by how they are computed: `y > 0` written twice is one mask.

`masked_rewrites.py` has the cases 1 to 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, refs

from .. import primitives as primitives  # fills the registry
from ..ir.edit import renamed, sweep, types_of, with_nodes
from ..ir.kinds import kinds
from ..ir.tensor_type import dtype_in, rank_of, sizes_of, tensor_type
from .masked_rewrites import (
    UNCHANGED,
    Handler,
    MaskedValue,
    PositionIndices,
    Read,
    Rewrite,
    Rewriter,
    Tracked,
    rewrite_read,
)

_INDICES = ("aten.nonzero.default", "aten.nonzero_numpy.default", "aten.where.default")
_READS = ("aten.index.Tensor", "aten.masked_select.default")


def select_by_masks(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Returns the program without values at the positions of Stacked masks, as far as it can follow them."""
    types = types_of(program)
    # Without `values` a value at the positions is Ragged, and so is a mask computed from it: that one is left
    # alone.
    kind_of = kinds(program, slots, values=False)
    if not any(_masked_value(n, types, kind_of) or _is_indices(n, types, kind_of) for n in program.nodes):
        return program
    tracked = Tracked(types)
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        node = renamed(node, to)
        tracked.equal.learn(node)
        new_nodes, result = _rewrite(node, tracked, kind_of)
        kept += new_nodes
        if isinstance(result, Ref):
            to[node.name] = result
            types[result.name] = node.out
            continue
        tracked.store(node.name, result)
        kept.append(node)
    return sweep(with_nodes(program, kept, to))


def _rewrite(node: Node, tracked: Tracked, kind_of: Mapping[str, Kind]) -> Rewrite:
    """Returns the new nodes for a node, and what the node becomes."""
    value = _masked_value(node, tracked.types, kind_of)
    if value is not None and value.mask not in tracked.masked and value.dense.name not in tracked.masked:
        return [], replace(value, mask=tracked.equal.first(value.mask))
    read = Read(node, tracked)
    if _is_indices(node, tracked.types, kind_of):
        return indices_of_mask(read)
    if node.op == "operator.getitem" and node.args[0].name in tracked.tuples:
        return [], tracked.tuples[node.args[0].name][node.args[1]]
    names = list(refs((node.args, node.kwargs)))
    if any(name in tracked.indices for name in names):
        return _rewrite_indices(read)
    return rewrite_read(read) if any(name in tracked.masked for name in names) else ([], None)


def _masked_value(node: Node, types: Mapping[str, str], kind_of: Mapping[str, Kind]) -> MaskedValue | None:
    """Returns what a node reads by a Stacked mask: `x[..., m]` or `masked_select`."""
    source = node.args[0] if node.op in _READS else None
    if not isinstance(source, Ref):
        return None
    *leading, mask = node.args[1] if node.op == "aten.index.Tensor" else [node.args[1]]
    if any(i is not None for i in leading) or not isinstance(mask, Ref):
        return None
    mask_type, source_type = types.get(mask.name, ""), types.get(source.name, "")
    before, within = len(leading), rank_of(mask_type)
    behind = rank_of(source_type) - before - within
    if dtype_in(mask_type) != "bool" or kind_of.get(mask.name) != "stacked" or within == 0 or behind < 0:
        return None
    if node.op == "aten.masked_select.default" and behind > 0:
        return None
    if sizes_of(source_type)[before : before + within] != sizes_of(mask_type):
        return None  # A mask that broadcasts has other positions.
    return MaskedValue(mask.name, source, before, within, behind)


def _is_indices(node: Node, types: Mapping[str, str], kind_of: Mapping[str, Kind]) -> bool:
    """Whether a node returns the indices of the true positions of a Stacked mask."""
    mask = node.args[0] if node.op in _INDICES else None
    return isinstance(mask, Ref) and kind_of.get(mask.name) == "stacked" and rank_of(types[mask.name]) > 0


def _rewrite_indices(read: Read) -> Rewrite:
    """Rewrites a node that reads indices of positions."""
    node = read.node
    first = node.args[0]
    indices = read.tracked.indices.get(first.name) if isinstance(first, Ref) else None
    if indices is not None:
        return _part(read, indices)
    return _AT_INDICES[node.op](read) if node.op in _AT_INDICES else UNCHANGED


def _part(read: Read, indices: PositionIndices) -> Rewrite:
    """Case 8: the indices of one dim of the mask: an item of a tuple, a column of `[K, within]`, or `[K, 1]`
    squeezed or reshaped to `[K]`. `unbind` gives the tuple of all columns.
    """
    whole, dim = indices.dim is None, read.arguments.get("dim")
    part: int | None = 0
    match read.node.op:
        case "operator.getitem" if whole:
            part = read.node.args[1]
        case "aten.unbind.int" if whole and dim in (1, -1):
            part = None
        case "aten.select.int" if whole and dim in (1, -1):
            part = read.arguments["index"] % indices.within
        case "aten.squeeze.dim" | "aten.squeeze.dims" if (
            whole and indices.within == 1 and dim in (1, -1, [1], [-1])
        ):
            pass
        case "aten.reshape.default" | "aten.view.default" if (
            indices.within == 1 and rank_of(read.node.out) == 1
        ):
            pass
        case _:
            return UNCHANGED
    return [], replace(indices, dim=part)


def indices_of_mask(read: Read) -> Rewrite:
    """Case 8: `nonzero` and `where` of a mask; of numbers, the mask is where they are not 0."""
    mask, types = read.node.args[0], read.tracked.types
    write = Rewriter(read.node)
    type_ = tensor_type(types[mask.name])
    if type_ is not None and type_.dtype != "bool":
        mask = write("ne.Scalar", mask, 0)
        types[mask.name] = str(type_.with_dtype("bool"))
        read.tracked.equal.learn(write.nodes[-1])
    return write.nodes, PositionIndices(read.tracked.equal.first(mask.name), rank_of(types[mask.name]), None)


def read_at(read: Read) -> Rewrite:
    """Case 9: `x[..., i, j]` is x, with the indexed dims as dims of the mask.

    They take the order of the mask's dims. Dims of the mask without an index get size 1.
    """
    x, tracked = read.node.args[0], read.tracked
    at = _indexed_dims(read, _index_list(read))
    if at is None or not isinstance(x, Ref) or read.is_tracked(x.name):
        return UNCHANGED
    mask, dims, before, behind = at
    write, value = Rewriter(read.node), x
    if dims != sorted(dims):
        order = [before + dims.index(d) for d in sorted(dims)]
        rest = range(before + len(dims), rank_of(tracked.types[x.name]))
        value = write("permute", x, [*range(before), *order, *rest])
    for d in range(mask.within):
        value = value if d in dims else write("unsqueeze", value, before + d)
    return write.nodes, MaskedValue(mask.mask, value, before, mask.within, behind)


def write_at(read: Read) -> Rewrite:
    """Case 10: `x[..., i, j] = v`, `index_copy` and `index_add` write where the mask is true."""
    arguments = read.arguments
    value = arguments["values"] if "values" in arguments else arguments["source"]
    add = bool(arguments.get("accumulate", False)) or read.node.op == "aten.index_add.default"
    alpha = arguments.get("alpha", 1)
    scaled = add and alpha != 1
    x, tracked = read.node.args[0], read.tracked
    at = _indexed_dims(read, _index_list(read))
    if at is None or not isinstance(x, Ref) or x.name in tracked.masked:
        return UNCHANGED
    mask, dims, before, behind = at
    if dims != sorted(dims):
        return UNCHANGED
    all_dims = len(dims) == mask.within
    one = read.masked_at(value)
    if one is None and all_dims and not scaled:
        one = _constant(read, value, mask, before, behind)
    if one is None or (one.mask, one.before, one.behind) != (mask.mask, before, behind):
        return UNCHANGED
    write = Rewriter(read.node)
    if all_dims and not scaled:
        dense = write("add.Tensor", x, one.dense) if add else one.dense
        return write.nodes, write("where.self", write.mask(one), dense, x)
    if not add:
        return UNCHANGED  # One position may get several values, and torch does not define which one stays.
    summed = write("where.ScalarOther", write.mask(one), one.dense, 0)
    others = [before + d for d in range(mask.within) if d not in dims]
    summed = write("sum.dim_IntList", summed, others) if others else summed
    return write.nodes, write("add.Tensor", x, summed, alpha=alpha)


def _index_list(read: Read) -> list[Any]:
    """Returns the indices as `x[...]` takes them, from a list or from one index along `dim`."""
    arguments = read.arguments
    if "indices" in arguments:
        return list(arguments["indices"])
    dim = arguments["dim"] % rank_of(read.tracked.types[read.node.args[0].name])
    return [None] * dim + [arguments["index"]]


def _indexed_dims(read: Read, indices: list[Any]) -> tuple[PositionIndices, list[int], int, int] | None:
    """Returns the mask of these indices, its dim for each index, and how many dims lie before and behind.

    None unless all indices belong to one mask, each to another dim, without a None between or behind them,
    and the indexed dims of x have the sizes of the mask's dims.
    """
    present = [i for i in indices if i is not None]
    of_positions = [read.tracked.indices.get(i.name) if isinstance(i, Ref) else None for i in present]
    mask, before = of_positions[0], len(indices) - len(present)
    if mask is None or any(i is not None for i in indices[:before]):
        return None
    dims = [p.dim for p in of_positions if p is not None and p.mask == mask.mask and p.dim is not None]
    if not len(dims) == len(present) == len(set(dims)):
        return None
    x, types = read.node.args[0], read.tracked.types
    if not isinstance(x, Ref):
        return None
    sizes, mask_sizes = sizes_of(types[x.name]), sizes_of(types[mask.mask])
    behind = rank_of(types[x.name]) - before - len(dims)
    if behind < 0 or sizes[before : before + len(dims)] != tuple(mask_sizes[d] for d in dims):
        return None
    return mask, dims, before, behind


def _constant(read: Read, value: Any, mask: PositionIndices, before: int, behind: int) -> MaskedValue | None:
    """Returns a value without the dim K as a masked value, equal at every position, if it broadcasts so."""
    if not isinstance(value, Ref) or value.name in read.tracked.indices:
        return None
    if rank_of(read.tracked.types[value.name]) > behind:
        return None
    return MaskedValue(mask.mask, value, before, mask.within, behind)


_AT_INDICES: dict[str, Handler] = {
    "aten.index.Tensor": read_at,
    "aten.index_select.default": read_at,
    "aten.index_put.default": write_at,
    "aten.index_add.default": write_at,
    "aten.index_copy.default": write_at,
}
