"""Finds the programs that no graph can run, and those for which a graph cannot be faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Program, Ref

from ...backends.index_flags import is_flagged
from ...ir import ops
from ...ir.edit import all_nodes
from ...ir.random_ops import uses_random_ops
from ...ir.tensor_type import tensor_type
from ...kernels.grouped_experts import OP as GROUPED_EXPERTS
from ...kernels.grouped_experts import SORTING_KERNELS
from ...kernels.member_convs import OP as MEMBER_CONVS
from ...kernels.triton_kernels.predictions import GATES, STEP_OPS
from ...runtime.executable import Executable
from ...runtime.value_checks import checked_nodes
from ...system.devices import LAUNCH_S
from ..programs.bound_program import BoundProgram

BYTES_PER_S = 4e12
"""More than a GPU of today reads in a second, so that the time of reading is never overestimated."""
_BACKENDS = ("eager", "compile", "aot")
_PRODUCTS = ("aten.linear.", "aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.conv")
_INDEX = "aten.index.Tensor"
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def why_no_graph(bound: BoundProgram) -> str:
    """Returns why no graph can run a program; "" if one may."""
    if bound.backend not in _BACKENDS:
        return f"the backend {bound.backend!r} does not run on streams of torch"
    if uses_random_ops(bound.program):
        return "it draws random numbers, which differ from call to call"
    main, function = bound.executable.main, bound.runnable.function
    device = bound.executable.device.type
    for name, value in zip(bound.executable.names, bound.executable.given, strict=True):
        if any(t.device.type != device for t in _tensors(value)):
            return f"the value {name}, which depends on weights only, is not on {device}"
    if (node := next(checked_nodes(main), None)) is not None:
        return f"node {node.name} ({node.op}) checks values of its operands on the host"
    nodes = [n for n in all_nodes(main) if n.body is None]
    types = {s.name: s.type for s in (*main.weights, *main.inputs)} | {n.name: n.out for n in nodes}
    for node in nodes:
        if node.op == _INDEX and not _selects_by_mask(node, types):
            continue
        if any(tag in getattr(ops.resolve(node.op), "tags", ()) for tag in _TAGS):
            return f"the sizes of node {node.name} ({node.op}) depend on values"
    if function is not None and function.flat is not None and is_flagged(function.flat.program):
        return "its compiled code reports an index out of range to the host"
    return ""


def why_slower(executable: Executable) -> str:
    """Returns why a graph cannot be faster than the program, by an estimate; "" if it may be.

    Where the device needs longer to read the weights of products than the host to start all kernels, the host
    waits for the device with a graph too.
    """
    launches = LAUNCH_S * kernel_count(executable.main)
    values = dict(zip(executable.names, executable.given, strict=True))
    read = {id(t): t.nbytes for t in _factors(executable.main.nodes, values)}
    reading = sum(read.values()) / BYTES_PER_S
    if launches >= reading:
        return ""
    return (
        f"to read its weights takes {1e6 * reading:.3g} us, and to start its kernels {1e6 * launches:.3g} us"
    )


def _selects_by_mask(node: Node, types: Mapping[str, str]) -> bool:
    """Whether an index of a node is a mask, or may be one."""
    indices = ops.bind(node.op, node.args, node.kwargs)["indices"]
    found = [tensor_type(types.get(i.name, "")) for i in indices if isinstance(i, Ref)]
    return any(t is None or not t.dtype.startswith("int") for t in found)


def _factors(nodes: Iterable[Node], values: Mapping[str, object]) -> Iterator[Tensor]:
    """Yields the weights that products read. A table of which a call reads some rows is none.

    values: of the weights, by name.
    """
    for node in nodes:
        given = [values.get(a.name) if isinstance(a, Ref) else None for a in node.args]
        if node.body is not None:
            yield from _factors(node.body.nodes, dict(zip((s.name for s in node.body.inputs), given)))
        elif node.op.startswith(_PRODUCTS):
            for value in given:
                yield from _tensors(value)


def kernel_count(program: Program) -> int:
    """Returns about how many kernels a program starts. Views and arithmetic on sizes start none."""
    types = {n.name: n.out for n in program.nodes}
    count = 0
    for node in program.nodes:
        if node.body is not None:
            count += program.members * (kernel_count(node.body) + len(node.body.outputs))
        elif node.op not in ops.PYTHON and not ops.may_view(node.op):
            count += _starts(node, types, program.members)
    return count


def _starts(node: Node, types: Mapping[str, str], members: int) -> int:
    """Returns about how many kernels an op starts, in plain torch. types: of the nodes, by name.

    A recurrent layer starts some at each step; a number of steps that is not known counts as one.
    """
    if node.op == MEMBER_CONVS:
        return 2 * members  # a member's convolution, and the copy of its result
    if node.op == GROUPED_EXPERTS:
        return SORTING_KERNELS + 3  # rows are sorted, multiplied and put back
    gates = {f"widepack.{cell}_steps.default": count for cell, count in GATES.items()}.get(node.op)
    if gates is None:
        return 1
    x = ops.bind(node.op, node.args, node.kwargs)["x"]
    found = tensor_type(types.get(x.name, "")) if isinstance(x, Ref) else None
    steps = found.sizes[1] if found is not None and len(found.sizes) == 4 else 1
    return 1 + STEP_OPS[gates] * (steps if isinstance(steps, int) else 1)


def _tensors(value: object) -> Iterator[Tensor]:
    """Yields a tensor, or those of a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
