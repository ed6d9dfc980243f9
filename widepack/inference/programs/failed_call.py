"""Explains a call that an op refused: which node, which inputs, and for an index its value and its bounds.

A compiled program does not say which node failed. So the nodes run once more, one after the other, on the
values of the call. Nothing of this runs for a call that succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, refs, substitute

from ...backends.task import first_line
from ...errors import InputError, WidepackError
from ...ir import ops
from ...ir.edit import needed
from ...runtime.admission import check_member_run
from ...runtime.budget import OverBudget
from ...runtime.graph_module import evaluate_node
from .bound_program import BoundProgram

_INDEXED = {
    "aten.embedding": ("weight", "indices", 0),
    "aten.embedding_bag": ("weight", "indices", 0),
    "aten.gather": ("self", "index", None),
    "aten.index_select": ("self", "index", None),
    "aten.take_along_dim": ("self", "indices", None),
}
"""Ops that read a tensor at indices: the tensor, the indices, and the dim if it is always the same."""


Run = tuple[Program, Sequence[Any], Sequence[torch.Tensor]]
"""A program, a value for each of its weights, and its inputs."""


def explained(
    title: str,
    bound: BoundProgram,
    member: Callable[[int], tuple[Program, Sequence[Any]]],
    inputs: Sequence[torch.Tensor],
    per_member: Sequence[bool],
    error: Exception,
) -> WidepackError:
    """Returns the error of a call that failed.

    Args:
        title: The entry in messages.
        bound: The wide program that failed.
        member: Returns the program of a member and its weights.
        inputs: The inputs of the call.
        per_member: For each input whether it has one value for each member.
        error: What the backend raised.

    Returns:
        An InputError. It names the node, the line of the model and the inputs that the node depends on. For
        an index out of range it names the input, the value and the bounds.
    """
    for program, weights, values in _runs(bound, member, inputs, per_member):
        found = _failing(program, weights, values)
        if found is not None:
            return InputError(f"{title}: {_sentence(program, *found)}")
    return InputError(f"{title} cannot run on these inputs: {first_line(error) or type(error).__name__}")


def unknown_row(title: str, runs: Iterable[Run]) -> InputError | None:
    """Returns the error of the first run that reads a tensor at an index out of range; None if none does.

    Args:
        title: What was called, in the message.
        runs: Programs that may fail as the call did, with their weights and inputs.
    """
    for program, weights, inputs in runs:
        found = _failing(program, weights, inputs)
        if found is not None:
            node, values, _ = found
            wrong = _index_out_of_range(node, values) is not None
            return InputError(f"{title}: {_sentence(program, *found)}") if wrong else None
    return None


def _runs(
    bound: BoundProgram,
    member: Callable[[int], tuple[Program, Sequence[Any]]],
    inputs: Sequence[torch.Tensor],
    per_member: Sequence[bool],
) -> Iterator[Run]:
    """Yields the programs that may fail as the call did: those of the members, then the wide program.

    Nothing has checked what a member program takes on these inputs; one that takes too much is left out.
    """
    for place in range(bound.program.members):
        program, weights = member(place)
        own = [x[place] if stacked else x for x, stacked in zip(inputs, per_member)]
        try:
            check_member_run("the member program", program, [*weights, *own])
        except OverBudget:
            continue
        yield program, weights, own
    yield bound.executable.main, bound.executable.given, inputs


def _sentence(program: Program, node: Node, values: Mapping[str, Any], cause: Exception) -> str:
    names = _inputs_of(program, (node.args, node.kwargs))
    where = place_of(node)
    wrong = _index_out_of_range(node, values)
    if wrong is None:
        given = f" with {_listed(names)}" if names else ""
        return f"{where} cannot run{given}: {first_line(cause) or type(cause).__name__}"
    value, size, index = wrong
    possible = f"but {where} looks up one of {size} rows: 0 to {size - 1} are possible"
    names = _inputs_of(program, index, by_sizes=False)
    known = {s.source or s.name: values[s.name] for s in program.inputs if s.name in values}
    if len(names) == 1 and bool((known[names[0]] == value).any()):
        return f"{_listed(names)} contains {value}, {possible}"
    if names:
        return f"an index computed from {_listed(names)} contains {value}, {possible}"
    sized = [f"{name} {list(known[name].shape)}" for name in _inputs_of(program, index)]
    if not sized:
        return f"an index that no input determines contains {value}, {possible}"
    return (
        f"an index computed from the sizes of {_listed(sized)} contains {value}, {possible}. A bound of that "
        f'size in the build, such as --input "T=1..{size}", lets the artifact refuse it by its name'
    )


def place_of(node: Node) -> str:
    """Returns a node in words, with the user's line that it comes from."""
    return f"node {node.name} ({node.op}{f', from {node.source}' if node.source else ''})"


def _listed(names: Sequence[str]) -> str:
    return ("the input " if len(names) == 1 else "the inputs ") + ", ".join(names)


def _failing(
    program: Program, weights: Sequence[Any], inputs: Sequence[torch.Tensor]
) -> tuple[Node, Mapping[str, Any], Exception] | None:
    """Returns the first node that fails in a call, with the values before it."""
    if any(x.device.type != "cpu" for x in inputs):
        return None  # after an error inside a kernel, a GPU runs nothing more
    return first_failing(program, weights, inputs, torch.device("cpu"))


def first_failing(
    program: Program, weights: Sequence[Any], inputs: Sequence[torch.Tensor], device: torch.device
) -> tuple[Node, Mapping[str, Any], Exception] | None:
    """Runs the nodes one after the other and returns the first one that fails, with the values before it."""
    slots = (*program.weights, *program.inputs)
    values: dict[str, Any] = {s.name: v for s, v in zip(slots, (*weights, *inputs), strict=True)}
    with torch.inference_mode():
        for node in program.nodes:
            try:
                values[node.name] = evaluate_node(node, values, program.members, device)
            except Exception as e:  # noqa: BLE001  # whatever the op raises is the cause that is reported
                return node, values, e
    return None


def _inputs_of(program: Program, arguments: Any, by_sizes: bool = True) -> list[str]:
    """Returns the names of the inputs that arguments depend on, in the order of the inputs.

    by_sizes: whether inputs count whose sizes alone are read.
    """
    read = set(refs(arguments))
    nodes = [n for n in program.nodes if by_sizes or not n.op.startswith("aten.sym_")]
    read.update(r for n in needed(nodes, read) for r in refs((n.args, n.kwargs)))
    return [s.source or s.name for s in program.inputs if s.name in read]


def _index_out_of_range(node: Node, values: Mapping[str, Any]) -> tuple[int, int, Any] | None:
    """Returns the first index that a node cannot look up, the number of rows, and the argument that holds the
    index; None for other nodes.
    """
    rule = _INDEXED.get(node.op.rpartition(".")[0])
    if rule is None:
        return None
    given = ops.bind(node.op, tuple(substitute(node.args, values.__getitem__)), dict(node.kwargs))
    table, index = given.get(rule[0]), given.get(rule[1])
    dim = given.get("dim", 0) if rule[2] is None else rule[2]
    if not isinstance(table, torch.Tensor) or not isinstance(index, torch.Tensor) or not isinstance(dim, int):
        return None
    if not -table.dim() <= dim < table.dim() or index.dtype.is_floating_point or index.dtype.is_complex:
        return None
    size = table.shape[dim]
    wrong = index[(index < 0) | (index >= size)]
    argument = ops.bind(node.op, node.args, dict(node.kwargs))[rule[1]]
    return (int(wrong[0]), size, argument) if wrong.numel() else None
