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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, refs

from .. import primitives as primitives  # fills the registry
from ..ir.edit import renamed, sweep, with_nodes
from ..ir.kinds import kinds
from ..ir.tensor_type import dtype_in, rank_of, sizes_of
from .masked_indices import indices_of_mask, rewrite_indices
from .masked_rewrites import rewrite_read
from .masked_values import MaskedValue, Read, Rewrite, Tracked

_INDICES = ("aten.nonzero.default", "aten.nonzero_numpy.default", "aten.where.default")
_READS = ("aten.index.Tensor", "aten.masked_select.default")


def select_by_masks(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Returns the program without values at the positions of Stacked masks, as far as it can follow them."""
    slot_types = {s.name: s.type for s in (*program.weights, *program.inputs)}
    types = slot_types | {n.name: n.out for n in program.nodes}
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
        return rewrite_indices(read)
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
