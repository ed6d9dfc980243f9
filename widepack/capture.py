"""Capture: one member -> its program, guards, constants and calling convention.

requires: a fresh member in eval mode. ensures: a functional program of allowed ops whose weights are named as in the state dict; every condition under which
the export holds as arithmetic over named dims; no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.export.graph_signature import InputKind, TensorArgument

from widepack_artifacts import guards as guard_forms
from widepack_artifacts.guards import letters, of_small_sizes
from widepack_artifacts.manifest import Parameter
from widepack_artifacts.program import Program
from widepack_artifacts.tree import Tree

from .attributes import attributes_of
from .calling import Call, leaf_type
from .carrying import MEMBER, Traced, Wanted, assignments, carried_by, wanted_of
from .conditions import GuardSource, Leaf, bound_line, factor_of, guards_of, lines_of, names_of, place_of
from .effects import drop_first_changes, refuse_changes, refuse_shared_memory
from .entries import FORWARD
from .errors import CaptureError
from .explain import explain, is_specialized, way_out
from .exporting import export, run_once
from .member_program import member_program, outputs_of, symbols_of
from .state import Asked, Carried, without
from .trial import Trial, why_not
from .values import known
from .watching import Seen, watched


@dataclass(frozen=True)
class Captured:
    """A member as data.

    weights: program weight name in the table -> (role, tensor of the captured member). inputs: the leaves of a call, then the buffers that are states.
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


def capture(make: Callable[[], nn.Module], call: Call, *, asked: bool = True, entry: str = FORWARD, states: Sequence[Asked] = ()) -> Captured:
    """Export a fresh member.

    make: gives a fresh member in eval mode, every time. asked: the dims were named by the user, so that one which the member's code fixes is an error; else
    the size is kept, and said in `fixed`. entry: the method to export. states: what the caller shall carry, where the entry has it.
    Raises: CaptureError in one paragraph with the user's own source line.
    """
    wanted = Wanted((), (), {})
    module = make()
    if states:
        wanted = wanted_of(module, call.leaves, call.signature, entry, states)
        refuse_shared_memory(module, wanted.buffers)

    def traced(module: nn.Module) -> nn.Module:
        direct = entry == FORWARD and not wanted.buffers and not wanted.leaves
        return module if direct else Traced(module, entry, wanted.buffers, wanted.leaves)

    run_once(make(), call, entry)  # another one: the module that is captured is the one whose attributes are known
    attributes = attributes_of(module)
    fixed: tuple[str, ...] = ()
    with assignments(module) as assigned:
        root = traced(module)
        with watched() as seen:
            try:
                exported = export(root, call, Dim.DYNAMIC)
            except Exception as e:
                if not is_specialized(e):
                    raise CaptureError(_why(e, make(), call, entry, seen)) from e
                error: Exception | None = e
            else:
                error = None
    if error is not None:
        module = make()  # a failed export leaves marks on the module too
        attributes = attributes_of(module)
        with assignments(module) as assigned:
            root = traced(module)
            exported, kept, fixed, seen = _with_fixed(module, root, call, error)
        if asked:
            lost = sorted(set(call.sizes) - set(kept.sizes))
            raise FixedSize(
                f"{type(module).__name__} fixes a size that the inputs name as a dynamic dim: {'; '.join(fixed)}. Give that size as a number, or change the "
                f"member's code{next(filter(None, map(way_out, fixed)), '')}",
                lost,
            ) from error
        call = kept
    prefix = MEMBER if isinstance(root, Traced) else ""
    changed = drop_first_changes(exported, make, call, entry, prefix, assigned - set(wanted.buffers))
    refuse_changes(exported, module, call, entry, prefix, changed)
    exported.graph.eliminate_dead_code()
    symbols = symbols_of(exported, call)
    outputs, returned, news = outputs_of(exported, symbols, len(wanted.buffers) + len(wanted.leaves))
    found = carried_by(exported, module, call.leaves, entry, wanted, states, outputs, news, prefix)
    weights, program = member_program(exported, module, call, entry, prefix, found, symbols)
    guards = guards_of(exported, call.leaves, type(module).__name__, seen)
    dims = _ranges(exported, call, symbols, guards, lines_of(seen, call.leaves))
    carried = {s.output for s in found.states}
    return Captured(
        program,
        weights,
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
        attributes,
    )


class FixedSize(CaptureError):
    """A member that fixes sizes which the inputs name as dynamic dims. letters: those dims."""

    def __init__(self, message: str, letters: Sequence[str]) -> None:
        super().__init__(message)
        self.letters = tuple(letters)


def _why(error: Exception, module: nn.Module, call: Call, entry: str, seen: Seen) -> str:
    """Why an export failed: the member does not take the example by itself, or torch cannot follow it. module: a fresh member."""
    own = why_not(Trial(module, entry, call.args, call.kwargs, call.leaves, call.sizes))
    return own or explain(error, module, {symbol: guard_forms.text(expr) for symbol, expr in names_of(seen, call.leaves).items()})


def _with_fixed(
    module: nn.Module, traced: nn.Module, call: Call, error: Exception
) -> tuple[torch.export.ExportedProgram, Call, tuple[str, ...], Seen]:
    """The export with those dims static that the member's code fixes; the call without their letters; a sentence for each, with the user's line."""
    try:
        with watched() as seen:
            exported = export(traced, call, Dim.AUTO)
    except Exception as e:  # noqa: BLE001  # whatever torch raises is explained
        raise CaptureError(explain(e, module, {symbol: guard_forms.text(expr) for symbol, expr in names_of(seen, call.leaves).items()})) from error
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
    return exported, replace(call, leaves=tuple(leaves), sizes=sizes), tuple(fixed), seen


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
