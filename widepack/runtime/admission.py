"""Checks a program of an artifact before it runs: its slots, its outputs, and its cost against the budget
(`walk.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.program import Node, Program, refs

from ..errors import ArtifactError, WidepackError
from ..ir import limits, ops
from ..ir.tensor_type import tensor_type
from .budget import Budget, OverBudget
from .prologue import split

Inputs = Callable[[bool], Sequence[Any]]
"""Returns the inputs of a program. True: with their values. False: only their sizes matter."""


@contextlib.contextmanager
def guarded(
    title: str, first: Callable[[Exception], WidepackError | None] = lambda error: None
) -> Iterator[None]:
    """Turns every error in the block into an ArtifactError, except errors of widepack and a device that is
    out of memory.

    title: the program in messages. first: returns a better error for some errors.
    """
    try:
        yield
    except (WidepackError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        if (better := first(e)) is not None:
            raise better from e
        lines = str(e).strip().splitlines()
        raise ArtifactError(
            f"{title}: {type(e).__name__}: {lines[0][:300] if lines else 'no message'}"
        ) from e


def check_slots(
    title: str, program: Program, entry: Entry, table: Mapping[str, Weight], members: int
) -> None:
    """Checks the weights, inputs and outputs of a wide program against the manifest.

    Raises: ArtifactError.
    """
    if program.members != members:
        raise ArtifactError(f"{title} is for {program.members} members, but {members} are loaded")
    check_counts(title, program, entry, table)
    for slot in program.weights:
        row = table[slot.source]
        if slot.kind != row.kind:
            raise ArtifactError(
                f"{title} takes the weight {row.name} as {slot.kind}, but in the manifest's table it "
                f"is {row.kind}"
            )


def check_member_slots(
    title: str, program: Program, entry: Entry, table: Mapping[str, Weight], member: int
) -> None:
    """Checks the types of the weights and inputs of a member program against the manifest.

    member: the number of a member that the program is for. Raises: ArtifactError.
    """
    for slot in program.weights:
        row = table[slot.source]
        expected = f"{row.dtype}[{','.join(map(str, row.of(member)))}]"
        if tensor_type(slot.type) != tensor_type(expected):
            raise ArtifactError(
                f"{title} takes the weight {row.name[:80]} as {slot.type[:80]!r}, but in the manifest's "
                f"table it is {expected[:80]}"
            )
    for slot, leaf in zip(program.inputs, entry.inputs):
        if tensor_type(slot.type) != tensor_type(leaf.type):
            raise ArtifactError(
                f"{title} takes the input {leaf.name[:80]} as {slot.type[:80]!r}, but the entry's type is "
                f"{leaf.type[:80]}"
            )


def check_counts(title: str, program: Program, entry: Entry, known: Container[str]) -> None:
    """Checks that a program reads known weights, and has as many inputs and outputs as its entry.

    known: the names of the manifest's weights. Raises: ArtifactError.
    """
    for slot in program.weights:
        if slot.source not in known:
            raise ArtifactError(
                f"{title} reads the weight {slot.source[:80]!r}, which the manifest's table does not have"
            )
    for what, found, expected in (
        ("inputs", program.inputs, entry.inputs),
        ("outputs", program.outputs, entry.outputs),
    ):
        if len(found) != len(expected):
            raise ArtifactError(f"{title} has {len(found)} {what}, but the entry has {len(expected)}")


def admit(
    budget: Budget,
    title: str,
    program: Program,
    weights: Mapping[str, Any],
    inputs: Inputs,
    device: torch.device,
    prologue: bool,
) -> tuple[list[Any], float]:
    """Walks a program before it runs.

    weights: a value for each source. prologue: whether the nodes that depend on weights alone run first.
    Returns: its outputs, on the meta device or with data, and the most bytes that it takes at one time.
    Raises: ArtifactError naming the node that is refused.
    """
    # Only a program that was not checked on this machine before needs the rules of costs.
    from .walk import NeedsValues, Walk

    values_of_weights = [weights[s.source] for s in program.weights]
    spent = budget.spent
    for values in (False, True):
        random = random_sizes(program)[0] if values else ()
        walk = Walk(budget, title, device, values=values, random=random)
        try:
            if not prologue:
                return walk.run(program, [*values_of_weights, *inputs(values)]), walk.peak - budget.resident
            parts = split(program)
            derived = walk.run(parts.prologue, values_of_weights, read=False)
            prologue_bytes = walk.kept
            return walk.run(parts.main, [*derived, *inputs(values)], prologue_bytes), max(
                walk.peak, budget.resident + prologue_bytes
            ) - budget.resident
        except NeedsValues:
            budget.spent = spent
    raise ArtifactError(f"{title} cannot be walked")  # a walk with values never needs more


def check_member_run(
    title: str, program: Program, given: Sequence[Any], budget: Budget | None = None
) -> None:
    """Checks what a member program of an untrusted file takes at these sizes, before it runs.

    title: the program in messages. given: its weights, then its inputs. budget: default what files and inputs
    of this size allow. A program that cannot run on them is not refused here: the run itself fails. Raises:
    OverBudget naming the node that takes more memory or work.
    """
    from .walk import NeedsValues, Walk

    weights, inputs = given[: len(program.weights)], given[len(program.weights) :]
    budget = budget or Budget.of(limits.size(weights), limits.size(inputs), use="run")
    for values in (False, True):
        try:
            Walk(replace(budget), title, torch.device("cpu"), values=values).run(program, list(given))
        except NeedsValues:
            continue
        except OverBudget:
            raise
        except ArtifactError:
            pass
        return


def check_outputs(title: str, program: Program, outputs: Sequence[Any], entry: Entry, members: int) -> None:
    """Checks that each output has its kind. Raises: ArtifactError."""
    for slot, value, leaf in zip(program.outputs, outputs, entry.outputs):
        if slot.kind == "stacked" and not (
            isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == members
        ):
            raise ArtifactError(
                f"{title}: the output {leaf.name or 0} is declared Stacked, but is not a tensor of {members} "
                "members"
            )
        if slot.kind == "ragged" and not (isinstance(value, (list, tuple)) and len(value) == members):
            raise ArtifactError(
                f"{title}: the output {leaf.name or 0} is declared Ragged, but is not a list of {members}"
            )


_UNWRITTEN = ("empty", "empty_like", "new_empty")
_SIZING = {"aten.index.Tensor": 1, "aten.masked_select.default": 1, "aten.repeat_interleave.self_Tensor": 1}
"""The argument whose values determine the size of the result. Other ops: all arguments."""


def random_sizes(program: Program, drawn: Collection[str] = ()) -> tuple[list[Node], bool]:
    """Finds the nodes whose result's size may depend on random numbers, or on memory that nothing has
    written. Whether it does, the types of the arguments tell: an index of whole numbers has no such result.

    drawn: the inputs that contain random numbers. Returns: those nodes, also of loops, and whether the
    program draws any.
    """
    found: list[Node] = []
    random, any_drawn = set(drawn), False
    for node in program.nodes:
        reads = any(r in random for r in refs((node.args, node.kwargs)))
        if node.body is not None:
            inside = [
                s.name for s, a in zip(node.body.inputs, node.args) if any(r in random for r in refs(a))
            ]
            of_body, draws = random_sizes(node.body, inside)
            found += of_body
        else:
            if reads and ops.of_values(node.op) and any(r in random for r in refs(_sizing(node))):
                found.append(node)
            draws = not ops.pure(node.op, node.args, node.kwargs) or node.op.split(".")[1] in _UNWRITTEN
        any_drawn |= draws
        if reads or draws:
            random.add(node.name)
    return found, any_drawn


def _sizing(node: Node) -> Any:
    """Returns the arguments whose values determine the size of a node's result."""
    place = _SIZING.get(node.op)
    if place is None or len(node.args) <= place:
        return node.args, node.kwargs
    return node.args[place]
