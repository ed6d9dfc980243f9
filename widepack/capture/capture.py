"""Captures one member: its program, guards, constants and calling convention.

The member must be fresh and in the mode that the program is for. The result is a functional program of ops
that the format allows, with the weights named as in the state dict. Every condition under which the export by
torch.export holds becomes arithmetic over named dims. Capture has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.export.graph_signature import OutputKind

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.entry import Parameter
from widepack_artifacts.guards import letters, of_small_sizes
from widepack_artifacts.literals import Literal
from widepack_artifacts.program import Program
from widepack_artifacts.tree import Tree

from ..checkpoints.differences import bit_equal
from ..checkpoints.literals import other_literal, value_read
from ..errors import CaptureError
from ..ir.guards import InputLeaf, factor_of
from ..ir.torch_internals import buffers_of, guard_texts
from ..ir.values import known
from ..spec.entries import FORWARD
from ..spec.state import CarriedState, StateRequest, without
from .call import MemberCall, leaf_type
from .effects import (
    changed_constants,
    drop_first_changes,
    refuse_changes,
    refuse_shared_memory,
    registered_buffers,
)
from .explain import explain, is_specialized, reads, way_out
from .export import ExportAttempt, MemberExporter, has_dataclass, run_once
from .exported import state_tensors, tensor_inputs
from .guards import GuardSource, bound_line, conditions_of, guards_from, names_of, place_of
from .named_fields import Make
from .program import member_program, modules_of, outputs_of, symbols_of
from .reachable import tensors_of
from .state import ExportedMember, StateRequests, carried_by, states_of_entry
from .trial import Trial, why_not


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A member as data.

    Attributes:
        program: The member program.
        weights: Name in the weights table -> (role, tensor of the captured member). A tensor that the
            checkpoint has is on the meta device, without memory.
        inputs: The tensors of a call, then the buffers that are states.
        signature: The parameters of the method, in order.
        outputs: (name, type) of the result's tensors, then of states that are in no result.
        result: The tree of the result, without states.
        returned: The tree of the result, with states.
        dims: Letter -> (least, most, source line).
        sizes: Letter -> size in the example.
        guards: The conditions on sizes under which the program holds.
        fixed: Sentences about sizes that the member's code fixes.
        states: What the caller carries from call to call.
        unchanged: Requested buffers that this entry does not change.
        attributes: The plain attributes of the module before it was exported; None where no module was
            exported.
        modules, classes: The module of each node, by the node's name; the class of each module.
        frees_graph: Forward takes derivatives and frees what autograd recorded, so that no gradient flows
            back through its answers.
        makes: As `MemberCall` has it.
        literals: What its code reads from the member's own tensors, so that it belongs to the program.
    """

    program: Program
    weights: dict[str, tuple[str, torch.Tensor]]
    inputs: tuple[InputLeaf, ...]
    signature: tuple[Parameter, ...]
    outputs: tuple[tuple[str, str], ...]
    result: Tree
    returned: Tree
    dims: dict[str, tuple[int, int | None, str]]
    sizes: dict[str, int]
    guards: tuple[GuardSource, ...]
    fixed: tuple[str, ...] = ()
    states: tuple[CarriedState, ...] = ()
    unchanged: frozenset[str] = frozenset()
    attributes: Mapping[str, str] | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    frees_graph: bool = False
    makes: Mapping[str, Make] = field(default_factory=dict)
    literals: tuple[Literal, ...] = ()


class FixedSize(CaptureError):
    """A member fixes sizes that the inputs name as dynamic dims. letters: those dims."""

    def __init__(self, message: str, letters: Sequence[str]) -> None:
        super().__init__(message)
        self.letters = tuple(letters)


def capture(
    make: Callable[[], nn.Module],
    call: MemberCall,
    *,
    named_dims: bool = True,
    entry: str = FORWARD,
    states: Sequence[StateRequest] = (),
    gradients: bool = False,
    dropout: bool = False,
    rehearse: bool = True,
) -> Captured:
    """Captures a fresh member.

    Args:
        make: Makes a fresh member at every call, in the mode that the program is for.
        call: The example call.
        named_dims: The user named the dims, so a dim that the member's code fixes is an error. Otherwise the
            size is kept and described in `fixed`.
        entry: The method to capture.
        states: What the caller wants to carry, where the entry has it.
        gradients: The program must give gradients: it contains what stops them (no_grad blocks).
        dropout: Dropout is active, whatever the mode is.
        rehearse: Run the member once first. Members of fake tensors have no values, and cannot run.

    Raises:
        CaptureError: The member cannot be captured. The message is one paragraph with the user's source line.
    """
    fresh: nn.Module | None = None  # as few members at a time as possible: each has all weights
    requests = StateRequests()
    if states:
        fresh = make()
        requests = states_of_entry(fresh, call, entry, states)
        refuse_shared_memory(fresh, requests.buffers)
    # Another module is exported, because its attributes must be those of a fresh member.
    ran = make() if rehearse else None
    empty = _empty_buffers(ran)
    answer, raised = run_once(ran, call, entry) if ran is not None else (None, None)
    filled = sorted(empty - _empty_buffers(ran))
    del ran
    module = fresh if fresh is not None else make()
    del fresh
    refusal = ""
    if raised is not None:
        refusal = why_not(Trial(make(), entry, call.args, call.kwargs, call.leaves, call.sizes))
    # An export does not notice an index past a table, or a dtype that a layer refuses.
    if refusal and not states:
        raise CaptureError(refusal) from raised
    exporter = MemberExporter(make, call, entry, requests, has_dataclass(answer), gradients, dropout)
    attempt = exporter.first(module)
    fixed: tuple[str, ...] = ()
    if attempt.error is not None and is_specialized(attempt.error):
        attempt, call, fixed = _with_fixed_sizes(exporter, attempt, named_dims)
    if attempt.exported is None:
        changed = changed_constants(attempt.error, make, call, entry) or registered_buffers(make, call, entry)
        why = refusal or changed or _why_no_export(attempt, call)
        state = f". {_state_in(attempt.module, filled, entry)}" if filled and not refusal else ""
        raise CaptureError(f"{why}{state}") from attempt.error
    try:
        return _captured(exporter, attempt, attempt.exported, call, fixed)
    except CaptureError as e:
        if not filled:
            raise
        raise CaptureError(_state_in(attempt.module, filled, entry)) from e


def _state_in(module: nn.Module, filled: Sequence[str], entry: str) -> str:
    """The message for buffers that are None, and tensors after the first call."""
    return (
        f"{type(module).__name__} keeps state in {', '.join(filled)}: None at first, and a tensor after a "
        f"call of {entry}. A state of a program has a shape from the beginning: register it with zeros of "
        f"its shape, and build with {' '.join(f'--state {n}' for n in filled)}"
    )


def _empty_buffers(module: nn.Module | None) -> set[str]:
    """Returns the names of the buffers of a module that are None."""
    parts = [] if module is None else module.named_modules()
    return {
        f"{path}.{name}" if path else name
        for path, part in parts
        for name, buffer in buffers_of(part).items()
        if buffer is None
    }


def _why_no_export(attempt: ExportAttempt, call: MemberCall) -> str:
    """Explains why a member that takes the example has no export."""
    assert attempt.error is not None
    letters_of = {s: guard_forms.text(expr) for s, expr in names_of(attempt.seen, call.leaves).items()}
    return explain(attempt.error, attempt.module, letters_of)


def _with_fixed_sizes(
    exporter: MemberExporter, failed: ExportAttempt, named_dims: bool
) -> tuple[ExportAttempt, MemberCall, tuple[str, ...]]:
    """Exports again after the member's code fixed a dim: torch then decides which dims are dynamic.

    Returns the export, the call without letters for fixed dims, and a sentence for each of them.
    Raises: FixedSize if the user named the dims; CaptureError.
    """
    call = exporter.call
    attempt = exporter.attempt(exporter.make(), Dim.AUTO, grad=failed.grad, derivatives=failed.derivatives)
    if attempt.exported is None:
        raise CaptureError(_why_no_export(attempt, call)) from failed.error
    kept, fixed = _without_fixed_dims(attempt, attempt.exported, call)
    if named_dims:
        way = next(filter(None, map(way_out, fixed)), "")
        raise FixedSize(
            f"{type(failed.module).__name__} fixes a size that the inputs name as a dynamic dim: "
            f"{'; '.join(fixed)}. Give that size as a number, or change the member's code{way}",
            sorted(set(call.sizes) - set(kept.sizes)),
        ) from failed.error
    return attempt, kept, fixed


def _without_fixed_dims(
    attempt: ExportAttempt, exported: torch.export.ExportedProgram, call: MemberCall
) -> tuple[MemberCall, tuple[str, ...]]:
    """Returns the call without letters for dims that the code fixes, and a sentence for each of them.

    A sentence names the input, the size, the axis and the user's line.
    """
    seen = attempt.seen
    lines = {
        place: line
        for key, line in seen.fixed.items()
        if isinstance(key, str) and (place := place_of(key, seen))
    }
    fixed_letters: set[str] = set()
    for leaf, node in zip(call.leaves, tensor_inputs(exported)):
        shape = node.meta["val"].shape
        fixed_letters |= {factor_of(t)[1] for axis, t in leaf.axes.items() if known(shape[axis]) is not None}
    leaves, sentences = [], []
    for leaf in call.leaves:
        here = {axis: text for axis, text in leaf.axes.items() if factor_of(text)[1] in fixed_letters}
        for axis, text in here.items():
            size = leaf.example.shape[axis]
            line = lines.get((leaf.name, axis)) or seen.fixed.get(size, "")
            by = f", fixed by {line}" if line else ""
            sentences.append(f"{leaf.name} has {size} at axis {axis} ({text}){by}")
        kept = {axis: text for axis, text in leaf.axes.items() if axis not in here}
        leaves.append(replace(leaf, axes=kept, type=leaf_type(leaf.example, kept, leaf.name, {})))
    sizes = {letter: size for letter, size in call.sizes.items() if letter not in fixed_letters}
    return replace(call, leaves=tuple(leaves), sizes=sizes), tuple(sentences)


def _captured(
    exporter: MemberExporter,
    attempt: ExportAttempt,
    exported: torch.export.ExportedProgram,
    call: MemberCall,
    fixed: tuple[str, ...],
) -> Captured:
    """Turns an exported program into a captured member. call: without letters for fixed dims."""
    requests = exporter.requests
    prefix = attempt.prefix
    member = ExportedMember(exported, attempt.module, exporter.make, call, exporter.entry, prefix)
    changed = drop_first_changes(member, attempt.assigned - set(requests.buffers))
    _refuse_changed_literals(member, attempt.literals, changed, gradients=exporter.gradients)
    refuse_changes(member, changed)
    exported.graph.eliminate_dead_code()
    symbols = symbols_of(member)
    outputs, returned, new_values = outputs_of(exported, symbols, requests.new_values)
    matched = carried_by(member, requests, outputs, new_values)
    modules, classes = modules_of(member)
    weights, program = member_program(member, matched, symbols)
    lines, unwritable = conditions_of(attempt.seen, call.leaves)
    guards = guards_from(guard_texts(exported), call.leaves, member.name, lines, unwritable)
    saved = member.module.state_dict()  # the checkpoints have these tensors
    return Captured(
        program=program,
        weights={n: (role, t.to("meta") if n in saved else t) for n, (role, t) in weights.items()},
        inputs=(*call.leaves, *matched.leaves),
        signature=call.signature,
        outputs=tuple(matched.outputs),
        result=without(returned, {s.output for s in matched.states}),
        returned=returned,
        dims=_ranges(member, symbols, guards, lines),
        sizes=call.sizes,
        guards=guards,
        fixed=fixed,
        states=tuple(matched.states),
        unchanged=frozenset(matched.unchanged),
        attributes=attempt.attributes,
        modules=modules,
        classes=classes,
        frees_graph=attempt.derivatives and attempt.differentiated.frees_graph,
        makes=call.makes,
        literals=attempt.literals,
    )


def _refuse_changed_literals(
    member: ExportedMember, literals: Sequence[Literal], assigned: Collection[str], *, gradients: bool
) -> None:
    """Refuses a member whose code reads tensors of its own that change. Raises: CaptureError.

    assigned: buffers that the module replaces by other tensors.
    """
    specs = member.program.graph_signature.output_specs
    changed = {member.own(s.target) for s in specs if s.kind is OutputKind.BUFFER_MUTATION} | set(assigned)
    parameters = member.module.named_parameters(remove_duplicate=False)
    trained = {n for n, p in parameters if p.requires_grad and gradients}
    for literal in literals:
        for name in (n for n in literal.weights if n in changed | trained):
            what, instead = reads(literal.line)
            why = "it is a parameter, which trains"
            if name in changed:
                why = "forward changes it"
                instead = (
                    "If the first call sets it, save the members after a call, so that the branch is not "
                    "taken; otherwise take this code out of forward"
                )
            raise CaptureError(
                f"{member.name} {what} at {literal.line}: of its own {name}, and {why}, so its value is no "
                f"constant of the program. {instead}"
            )


def _ranges(
    member: ExportedMember,
    symbols: Mapping[Any, str],
    guards: Sequence[GuardSource],
    lines: Sequence[GuardSource],
) -> dict[str, tuple[int, int | None, str]]:
    """Returns each letter's bounds as far as torch.export knows them, and the user's lines behind them.

    A lower bound of 2, or one from conditions on small sizes, may be torch.export's own and not the member's.
    lines: the conditions in the order in which the export met them.
    """
    small = {letter for g in guards if of_small_sizes(g.expr) for letter in letters(g.expr)}
    bounds: dict[str, tuple[int, int | None]] = dict.fromkeys(member.call.sizes, (1, None))
    for symbol, range_ in member.program.range_constraints.items():
        letter = symbols.get(symbol, "")
        if letter not in bounds:
            continue
        least, most = bounds[letter]
        of_member = range_.lower.is_Integer and int(range_.lower) > 2 and letter not in small
        low = int(range_.lower) if of_member else 1
        high = int(range_.upper) if range_.upper.is_Integer else None
        highs = [bound for bound in (most, high) if bound is not None]
        bounds[letter] = max(least, low), min(highs) if highs else None
    conditions = [*guards, *lines]
    ranges: dict[str, tuple[int, int | None, str]] = {}
    for letter, (least, most) in bounds.items():
        ends = [(least, least - 1)] if least > 1 else []
        ends += [(most, most + 1)] if most is not None else []
        sources = dict.fromkeys(bound_line(letter, size, outside, conditions) for size, outside in ends)
        ranges[letter] = least, most, " and ".join(filter(None, sources))
    return ranges


def check_literals(
    captured: Captured, member: Callable[[int], nn.Module], members: Sequence[int], names: Sequence[str]
) -> None:
    """Refuses members whose code reads other values from its own tensors than that of the captured one.

    The program was captured with the values of one member: a branch on them went one way.

    member: Returns a member by its number. members: Those of this capture; the captured one is the first.
    names: Of all members.
    Raises: MemberMismatch.
    """
    first = _values(captured, member(members[0])) if captured.literals else []
    for i in members[1:] if captured.literals else ():
        for literal, a, b in zip(captured.literals, first, _values(captured, member(i))):
            if a is None or b is None or not bit_equal(a, b):
                raise other_literal(literal, (names[members[0]], a), (names[i], b))


def _values(captured: Captured, module: nn.Module) -> list[torch.Tensor | None]:
    """Returns what a member's code reads, for each literal; None where the member lacks a tensor for it."""
    known = {**dict(tensors_of(module)), **state_tensors(module)}
    return [
        value_read(x.expression, known.__getitem__) if known.keys() >= {*x.weights} else None
        for x in captured.literals
    ]
