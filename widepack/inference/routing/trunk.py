"""Splits a member program for rows of several members: the part that all members share, and the rest.

The trunk reads weights that all members share, and runs once on all rows. The rest runs for each member on
its own rows, over weights of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from widepack_artifacts.program import Node, Output, Program, Ref, Slot, refs

from ...ir import ops
from ...ir.edit import needed
from ...rows.layout import Layout, RowAxis


@dataclass(frozen=True)
class SplitProgram:
    """A member program in two parts.

    trunk: takes the shared weights and the inputs of a call, and returns what the rest reads of it. None if
    all members' work is their own. rest: takes the weights that it reads, then the values of the trunk, then
    inputs of the call. inputs: the numbers of these inputs. axes: for each value of the trunk and each of
    these inputs where its rows are; None for a value that is the same for all rows.
    """

    trunk: Program | None
    rest: Program
    inputs: Sequence[int]
    axes: Sequence[RowAxis | None]


Layouts = Sequence[Mapping[str, Layout]]
"""For several choices of sizes where the rows are in each value."""


def split_trunk(program: Program, own: Collection[str], layouts: Layouts) -> SplitProgram:
    """Splits a member program.

    Args:
        program: The program of one member.
        own: The sources of the weights that members do not share.
        layouts: From `walk`, for several choices of the other dims' sizes if there are any.
    """
    per_member = {s.name for s in program.weights if s.source in own}
    for node in program.nodes:
        if any(r in per_member for r in refs((node.args, node.kwargs))):
            per_member.add(node.name)
    rest, read = _rest(program, per_member, layouts)
    shared = [n for n in program.nodes if n.name not in per_member]
    made = [n.name for n in shared if n.name in read]
    trunk_nodes = needed(shared, made)
    inputs = [i for i, s in enumerate(program.inputs) if s.name in read]
    if not any(map(_works, trunk_nodes)):
        every = list(range(len(program.inputs)))
        return SplitProgram(None, program, every, [_axis(layouts, s.name) for s in program.inputs])
    names = [*made, *(program.inputs[i].name for i in inputs)]
    weights = tuple(s for s in program.weights if s.name in read)
    trunk = replace(
        program,
        weights=tuple(s for s in program.weights if s.source not in own),
        nodes=tuple(trunk_nodes),
        outputs=tuple(Output(Ref(n), "shared") for n in made),
    )
    types = {**{s.name: s.type for s in program.inputs}, **{n.name: n.out for n in program.nodes}}
    slots = tuple(Slot(n, n, "shared", types[n]) for n in names)
    remaining = replace(program, weights=weights, inputs=slots, nodes=tuple(rest))
    return SplitProgram(trunk, remaining, inputs, [_axis(layouts, n) for n in names])


def _rest(program: Program, per_member: Collection[str], layouts: Layouts) -> tuple[list[Node], set[str]]:
    """Returns the nodes of the rest, and the values that it reads from outside.

    A value that depends on the number of rows, or that is no tensor, is computed again for each member.
    """
    read = {r for o in program.outputs for r in refs(o.value)}
    rest: list[Node] = []
    for node in reversed(program.nodes):
        if node.name in read and (node.name in per_member or _again(node, layouts)):
            rest.append(node)
            read.update(refs((node.args, node.kwargs)))
    made = {n.name for n in rest}
    return rest[::-1], {r for r in read if r not in made}


def _again(node: Node, layouts: Layouts) -> bool:
    """Returns whether the rest computes a value of the trunk again."""
    is_tensor = node.out.endswith("]")
    return not is_tensor or not _divides([found[node.name] for found in layouts])


def _divides(found: Sequence[Layout]) -> bool:
    """Returns whether a value can be divided by rows at all sizes.

    `after` and `before` may follow sizes of a call. One of them is known from the size of the dim if the
    other is 1.
    """
    if all(layout is None for layout in found):
        return True
    axes = [layout for layout in found if isinstance(layout, RowAxis)]
    if len(axes) < len(found) or len({a.dim for a in axes}) > 1:
        return False
    return len(set(axes)) == 1 or all(a.before == 1 for a in axes) or all(a.after == 1 for a in axes)


def _works(node: Node) -> bool:
    """Returns whether a node computes: neither a view nor a number."""
    return not node.op.startswith(("operator.", "aten.sym_", "math.", "torch.")) and not ops.only_views(
        node.op
    )


def _axis(layouts: Layouts, name: str) -> RowAxis | None:
    layout = layouts[0][name]
    return layout if isinstance(layout, RowAxis) else None
