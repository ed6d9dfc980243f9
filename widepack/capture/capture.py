"""Capture: one member -> its program, guards, constants and calling convention.

requires: a fresh member in eval mode. ensures: a functional program of allowed ops whose weights are named as in the state dict; every condition under which
the export holds as arithmetic over named dims; no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind, TensorArgument

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.guards import letters, of_small_sizes
from widepack_artifacts.manifest import Parameter
from widepack_artifacts.program import Program
from widepack_artifacts.tree import Tree

from .attributes import attributes_of
from .call import Call, leaf_type, of_any_name
from .state import MEMBER, Traced, Wanted, assignments, carried_by, wanted_of
from .guards import GuardSource, Leaf, bound_line, factor_of, guards_of, lines_of, names_of, place_of
from .effects import drop_first_changes, refuse_changes, refuse_shared_memory
from ..spec.entries import FORWARD
from ..errors import CaptureError
from .explain import explain, has_no_derivative, is_specialized, way_out
from .export import export, run_once
from .program import member_program, outputs_of, symbols_of
from ..spec.state import Asked, Carried, without
from .trial import Trial, why_not
from ..ir.values import known
from .export_events import Seen, watched


@dataclass(frozen=True)
class Captured:
    """A member as data.

    weights: program weight name in the table -> (role, tensor of the captured member; without memory where its checkpoint has it). inputs: the leaves of a call, then the buffers that are states.
    signature: (parameter, kind, tree over leaves) in the forward's order. outputs: (name, type) of the result's leaves, then of states that are in no result.
    result: tree over outputs, without those of states; returned: with them. dims: letter -> (least, most, source line). fixed: sentences about sizes that the
    code fixes. states: what the caller carries. attributes: the plain attributes of the module that was exported, before it was; None where there is none.
    """

    program: Program
    weights: dict[str, tuple[str, torch.Tensor]]
    inputs: tuple[Leaf, ...]
    signature: tuple[Parameter, ...]
    outputs: tuple[tuple[str, str], ...]
    result: Tree
    dims: dict[str, tuple[int, int | None, str]]
    sizes: dict[str, int]
    guards: tuple[GuardSource, ...]
    fixed: tuple[str, ...]
    returned: Tree
    states: tuple[Carried, ...] = ()
    unchanged: frozenset[str] = frozenset()  # buffers asked for that this entry leaves as they are
    attributes: Mapping[str, str] | None = None


def capture(
    make: Callable[[], nn.Module],
    call: Call,
    *,
    asked: bool = True,
    entry: str = FORWARD,
    states: Sequence[Asked] = (),
    gradients: bool = False,
    dropout: bool = False,
) -> Captured:
    """Export a fresh member.

    make: gives a fresh member, every time, in the mode that the program is for. asked: the dims were named by the user, so that one which the member's code fixes is an error; else
    the size is kept, and said in `fixed`. entry: the method to export. states: what the caller shall carry, where the entry has it.
    gradients: the program is one to take gradients of: what stops them (no_grad blocks) is in it. dropout: dropout is on, whatever the mode.
    Raises: CaptureError in one paragraph with the user's own source line.
    """
    wanted = Wanted((), (), {})
    fresh: nn.Module | None = None  # one at a time where it can be: each holds a whole member's weights
    if states:
        fresh = make()
        wanted = wanted_of(fresh, call.leaves, call.signature, entry, states)
        refuse_shared_memory(fresh, wanted.buffers)
    answer, raised = run_once(make(), call, entry)  # another one: the module that is captured is the one whose attributes are known
    module = fresh if fresh is not None else make()
    del fresh
    own = why_not(Trial(make(), entry, call.args, call.kwargs, call.leaves, call.sizes)) if raised is not None else ""
    if own and not states:  # an export sees no index past a table, and no dtype that a layer refuses
        raise CaptureError(own) from raised
    strange = _is_strange(answer)

    def exported_from(module: nn.Module, dim: Any, grad: bool) -> _Tried:
        keywords = of_any_name(module, call, entry)
        direct = entry == FORWARD and not wanted.buffers and not wanted.leaves and not keywords and not strange and not _taken(module)
        attributes = attributes_of(module)
        with assignments(module) as assigned, watched() as seen:
            root = module if direct else Traced(module, entry, wanted.buffers, wanted.leaves, keywords)
            try:
                return _Tried(
                    module, attributes, not direct, assigned, seen, export(root, call, dim, grad, gradients=gradients, dropout=dropout), None
                )
            except Exception as e:  # noqa: BLE001  # whatever torch raises is explained
                return _Tried(module, attributes, not direct, assigned, seen, None, e)

    fixed: tuple[str, ...] = ()
    grad = True
    tried = exported_from(module, Dim.DYNAMIC, grad)
    if tried.error is not None and has_no_derivative(tried.error):
        grad = False  # the second way only: without derivatives torch may take several ops as one that has no form in a program
        tried = exported_from(make(), Dim.DYNAMIC, grad)  # a failed export leaves marks on the module too
    if tried.error is not None and is_specialized(tried.error):
        first, tried = tried, exported_from(make(), Dim.AUTO, grad)
        if tried.exported is None:
            raise CaptureError(_why(tried, call)) from first.error
        kept, fixed = _with_fixed(tried, call)
        if asked:
            lost = sorted(set(call.sizes) - set(kept.sizes))
            raise FixedSize(
                f"{type(module).__name__} fixes a size that the inputs name as a dynamic dim: {'; '.join(fixed)}. Give that size as a number, or change the "
                f"member's code{next(filter(None, map(way_out, fixed)), '')}",
                lost,
            ) from first.error
        call = kept
    if tried.exported is None:
        raise CaptureError(own or _why(tried, call)) from tried.error
    module, exported, seen = tried.module, tried.exported, tried.seen
    prefix = MEMBER if tried.wrapped else ""
    changed = drop_first_changes(exported, make, call, entry, prefix, tried.assigned - set(wanted.buffers))
    refuse_changes(exported, module, call, entry, prefix, changed)
    exported.graph.eliminate_dead_code()
    symbols = symbols_of(exported, call)
    outputs, returned, news = outputs_of(exported, symbols, len(wanted.buffers) + len(wanted.leaves))
    found = carried_by(exported, module, call.leaves, entry, wanted, states, outputs, news, prefix)
    weights, program = member_program(exported, module, call, entry, prefix, found, symbols)
    guards = guards_of(exported, call.leaves, type(module).__name__, seen)
    dims = _ranges(exported, call, symbols, guards, lines_of(seen, call.leaves))
    carried = {s.output for s in found.states}
    saved = module.state_dict()
    return Captured(
        program,
        {n: (role, value.to("meta") if n in saved else value) for n, (role, value) in weights.items()},  # those are in the checkpoints
        (*call.leaves, *found.leaves),
        call.signature,
        found.outputs,
        without(returned, carried),
        dims,
        call.sizes,
        guards,
        fixed,
        returned,
        found.states,
        frozenset(found.unchanged),
        tried.attributes,
    )


class FixedSize(CaptureError):
    """A member that fixes sizes which the inputs name as dynamic dims. letters: those dims."""

    def __init__(self, message: str, letters: Sequence[str]) -> None:
        super().__init__(message)
        self.letters = tuple(letters)


@dataclass(frozen=True)
class _Tried:
    """An export, or why there is none. attributes: of the module before it. wrapped: whether in `Traced`. assigned: buffers in whose place it puts others."""

    module: nn.Module
    attributes: Mapping[str, str] | None
    wrapped: bool
    assigned: set[str]
    seen: Seen
    exported: torch.export.ExportedProgram | None
    error: Exception | None


def _is_strange(answer: Any) -> bool:
    """Whether a result holds a class that torch.export does not know, which `Traced` returns in another form."""
    return any(is_dataclass(leaf) for leaf in pytree.tree_leaves(answer))


def _taken(module: nn.Module) -> bool:
    """Whether a part or weight has a name that torch's own module of a graph has something else under (`code`)."""
    return any(hasattr(fx.GraphModule, name) for name in (*module._parameters, *module._buffers, *module._modules))


def _why(tried: _Tried, call: Call) -> str:
    """Why there is no export, where the member takes the example by itself."""
    assert tried.error is not None
    return explain(tried.error, tried.module, {symbol: guard_forms.text(expr) for symbol, expr in names_of(tried.seen, call.leaves).items()})


def _with_fixed(tried: _Tried, call: Call) -> tuple[Call, tuple[str, ...]]:
    """The call without the letters of those dims that the member's code fixes; a sentence for each, with the user's line."""
    exported, seen = tried.exported, tried.seen
    assert exported is not None
    by_name = {n.name: n for n in exported.graph.nodes}
    tensors = [s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    lines = {place: line for key, line in seen.fixed.items() if isinstance(key, str) and (place := place_of(key, seen))}
    leaves, fixed = [], []
    gone: set[str] = set()
    for leaf, name in zip(call.leaves, tensors):
        shape = by_name[name].meta["val"].shape
        gone |= {factor_of(text)[1] for axis, text in leaf.axes.items() if known(shape[axis]) is not None}
    for leaf in call.leaves:
        here = {axis: text for axis, text in leaf.axes.items() if factor_of(text)[1] in gone}
        for axis, named in here.items():
            size = leaf.example.shape[axis]
            line = lines.get((leaf.name, axis)) or seen.fixed.get(size, "")
            fixed.append(f"{leaf.name} has {size} at axis {axis} ({named}){f', fixed by {line}' if line else ''}")
        kept = {axis: text for axis, text in leaf.axes.items() if axis not in here}
        leaves.append(replace(leaf, axes=kept, type=leaf_type(leaf.example, kept, leaf.name, {})))
    sizes = {letter: size for letter, size in call.sizes.items() if letter not in gone}
    return replace(call, leaves=tuple(leaves), sizes=sizes), tuple(fixed)


def _ranges(
    exported: torch.export.ExportedProgram, call: Call, symbols: Mapping[Any, str], guards: Sequence[GuardSource], lines: Sequence[GuardSource]
) -> dict[str, tuple[int, int | None, str]]:
    """Each letter's bounds as far as export knows them, with the lines that they come from. lines: conditions as they came up.

    A lower bound of 2, or one out of conditions on small sizes, may be export's own, not the member's.
    """
    asked = {letter for g in guards if of_small_sizes(g.expr) for letter in letters(g.expr)}
    bounds: dict[str, tuple[int, int | None]] = dict.fromkeys(call.sizes, (1, None))
    for symbol, range_ in exported.range_constraints.items():
        letter = symbols.get(symbol, "")
        if letter in bounds:
            least, most = bounds[letter]
            low = int(range_.lower) if range_.lower.is_Integer and int(range_.lower) > 2 and letter not in asked else 1
            high = int(range_.upper) if range_.upper.is_Integer else None
            bounds[letter] = max(least, low), high if most is None else most if high is None else min(most, high)
    found = [*guards, *lines]
    ends = {
        letter: ((least, least - 1) if least > 1 else None, (most, most + 1) if most is not None else None)
        for letter, (least, most) in bounds.items()
    }
    sources = {letter: dict.fromkeys(bound_line(letter, *end, found) for end in both if end) for letter, both in ends.items()}
    return {letter: (*both, " and ".join(filter(None, sources[letter]))) for letter, both in bounds.items()}
