"""Checks the values that ops of a compiled program read as places, before the compiled code runs.

On `eager` an op such as `embedding_bag` runs behind a check of its operands (`kernels/checks`). A compiler
traces sizes alone, so its code has no check of values. Here the nodes that compute those operands run once
more, eagerly, and then the checks. These nodes are few: views of inputs, and arithmetic on indices. An
operand of which only the sizes are checked (the table of a bag) is computed without values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, refs, substitute

from ..ir import ops
from ..ir.edit import all_nodes
from ..ir.encoding import decode, iter_arguments
from ..kernels.checks import CHECKS, OF_SIZES, OF_VALUES
from .graph_module import evaluate_node
from .meta_values import metas, run_on_meta
from .unroll import unroll

MOST_NODES = 16
"""The most nodes that run twice. A program that needs more runs on `eager`."""
MOST_SIZES = 64
"""The most sizes of inputs at which tensors without values are kept."""
_SIZES = ("aten.sym_size.int", "aten.sym_numel.default")
_CHEAP = ("int64", "int32", "bool", "int", "list")


def checked_nodes(program: Program) -> Iterator[Node]:
    """The nodes whose operands must be checked by their values, also those in loops."""
    return (node for node in all_nodes(program) if node.op in OF_VALUES)


class ValueChecks:
    """The checks of one program.

    Args:
        program: The main part of a wide program.
        given: Returns a value for each of its weights.

    Attributes:
        possible: Whether the operands can be computed by few nodes. If not, `run` must not be called.
        needed: Whether the program has nodes to check.
    """

    def __init__(self, program: Program, given: Callable[[], Sequence[Any]]) -> None:
        nodes = list(checked_nodes(program))
        self.needed = bool(nodes)
        if any(n.body for n in program.nodes) and nodes:
            program = unroll(program)
            nodes = list(checked_nodes(program))
        at = {n.name: n for n in program.nodes}
        self._checked = [n for n in nodes if at.get(n.name) is n]  # a loop has names of its own
        by_value = [r for n in self._checked for r in refs(_operands(n, sizes=False))]
        by_size = [r for n in self._checked for r in refs(_operands(n, sizes=True))]
        self._before, self._numbers = _ancestors(at, by_value), list[str]()
        if not all(map(_cheap, self._before)):  # a size may be known without the values
            self._before = _ancestors(at, by_value, _SIZES)
            self._numbers = [n.name for n in self._before if n.op in _SIZES]
        self._sized = _ancestors(at, [*by_size, *self._numbers])
        self.possible = len(self._checked) == len(nodes) and len(self._before) <= MOST_NODES
        self.possible = self.possible and len(at) == len(program.nodes)  # else a name has two values
        self.possible = self.possible and all(map(_cheap, self._before)) and all(map(_has_size, self._sized))
        values = given() if self.needed else [None] * len(program.weights)
        self._weights = {s.name: v for s, v in zip(program.weights, values, strict=True)}
        self._inputs = [s.name for s in program.inputs]
        self._members = program.members
        self._known: dict[Any, dict[str, Any]] = {}  # what `_sizes` returned, by the sizes of inputs

    def run(self, *inputs: torch.Tensor) -> bool:
        """Checks the operands of a call.

        Returns: whether compiled code surely has the same operands. If not, nothing was checked.
        Raises: OperandError; what a node raises.
        """
        values = {**self._weights, **dict(zip(self._inputs, inputs, strict=True))}
        device = torch.device("cpu") if not inputs else inputs[0].device
        sized = self._sizes(inputs)
        values.update((name, sized[name]) for name in self._numbers)
        for node in self._before:
            if node.name in self._numbers:
                continue
            values[node.name] = evaluate_node(node, values, self._members, device)
            if not _exact(node, values):
                return False
        for node in self._checked:
            given = ops.bind(node.op, node.args, node.kwargs)
            without = OF_SIZES.get(node.op, ())
            read = {
                name: decode(substitute(v, (sized if name in without else values).__getitem__), device)
                for name, v in given.items()
            }
            CHECKS[node.op](**read)
        return True

    def _sizes(self, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Returns sizes, and tensors without values for operands of which only sizes are checked, by name."""
        if not self._sized and not any(n.op in OF_SIZES for n in self._checked):
            return {}
        like = tuple((x.shape, x.dtype, x.stride()) for x in inputs)
        found = self._known.get(like)
        if found is None:
            found = {k: metas(v) for k, v in (*self._weights.items(), *zip(self._inputs, inputs))}
            for node in self._sized:
                args, kwargs = (substitute(a, found.__getitem__) for a in (node.args, node.kwargs))
                found[node.name] = run_on_meta(node.op, args, kwargs)
            if len(self._known) >= MOST_SIZES:
                self._known.clear()
            self._known[like] = found
        return found

    def before(self, function: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that checks its inputs, and then calls `function`.

        eager: runs instead if compiled code may have other operands than those that were checked. It checks
        its own.
        """

        def run(*inputs: Any) -> Any:
            return function(*inputs) if self.run(*inputs) else eager(*inputs)

        return run


def _cheap(node: Node) -> bool:
    """Returns whether a node computes indices or sizes, or is a view."""
    if node.body is not None or node.op in OF_VALUES:
        return False
    return node.op in ops.PYTHON or node.out.startswith(_CHEAP) or ops.may_view(node.op)


_UNWRITTEN = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")


def _exact(node: Node, values: Mapping[str, Any]) -> bool:
    """Returns whether compiled code computes the same value as the node that has run.

    Arithmetic on floats may round otherwise, and memory that nothing has written may hold anything. The types
    that the program's file names prove nothing.
    """
    if node.op in _UNWRITTEN:
        return False
    if node.op.startswith("aten.sym_") or (node.op not in ops.PYTHON and ops.may_view(node.op)):
        return True
    read = substitute([list(node.args), node.kwargs], values.__getitem__)
    return not any(
        isinstance(v, (float, complex))
        or (isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex))
        for v in iter_arguments([read, values[node.name]])
    )


def _operands(node: Node, *, sizes: bool) -> list[Any]:
    """Returns the operands of which only sizes are checked, or all others."""
    without = OF_SIZES.get(node.op, ())
    given = ops.bind(node.op, node.args, node.kwargs)
    return [v for name, v in given.items() if (name in without) == sizes]


def _has_size(node: Node) -> bool:
    """Returns whether the sizes of a node's result depend on sizes alone."""
    return node.body is None and not ops.of_values(node.op)


def _ancestors(at: dict[str, Node], names: Sequence[str], last: Collection[str] = ()) -> list[Node]:
    """Returns the nodes that some values depend on, and those values' own, in the order of the program.

    last: the ops whose operands are left out.
    """
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in at and name not in seen:
            seen.add(name)
            if at[name].op not in last:
                todo += refs((at[name].args, at[name].kwargs))
    return [n for name, n in at.items() if name in seen]
