"""A build's job: checkpoints aligned, members captured, the weights table, kinds; all that the later stages need to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.tree import Tree

from ..verification.same_program import Alike, difference, is_literal
from ..capture.attributes import differences, in_words
from ..capture.call import Call, arrange
from ..capture.capture import Captured, FixedSize, capture
from ..checkpoints.discovery import Checkpoint
from ..ir.encoding import dtype_name
from ..spec.dropout import switched_on
from ..spec.entries import FORWARD, method_of, of_entry
from ..errors import CaptureError, MemberMismatch, UsageError
from ..capture.pt2.factory import Programs
from ..checkpoints.alignment import Alignment, Factory, bit_equal
from ..capture.module_tensors import tensors_of
from ..simplify.canonical import plain
from ..spec.draws import Source
from ..capture.example import default_axes, example_sizes, from_specs, where_nothing_is_one
from ..simplify.member_programs import Simplified
from ..spec.input_spec import Bounds, InputSpec, parse_inputs
from ..spec.state import BUFFER, Asked, Carried


@dataclass(frozen=True)
class Row:
    """A row of the weights table in the making: values(i) is member i's tensor."""

    weight: form.Weight
    value: Callable[[int], torch.Tensor]


def fresh_member(factory: Factory, checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A fresh module for a checkpoint and its state dict; not filled yet."""
    return factory.of(checkpoint, state)


def filled_member(factory: Factory, aligned: Alignment, i: int) -> nn.Module:
    """Member i as the user would load it. Raises: MemberMismatch."""
    state = aligned.state_dict(i)
    module = fresh_member(factory, aligned.checkpoints[i], state)
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise MemberMismatch(f"member {aligned.names[i]}: the model does not take its checkpoint: {' '.join(str(e).split())[:600]}") from e
    return module.eval()


Specs = Sequence[str] | Mapping[str, Sequence[str]]


def specs_of(inputs: Specs, entry: str, entries: Sequence[str]) -> tuple[list[InputSpec], dict[str, Bounds]]:
    """The input specs and bounds of one entry. inputs: texts, or texts by entry. Raises: UsageError."""
    if not isinstance(inputs, Mapping):
        return parse_inputs(inputs, entry, entries)
    unknown = [k for k in inputs if k not in entries]
    if unknown:
        raise UsageError(f"inputs names the entry {', '.join(map(repr, unknown))}; the entries are {', '.join(entries)}")
    return parse_inputs(inputs.get(entry, ()), entry, entries)


def capture_members(
    factory: Factory,
    aligned: Alignment,
    inputs: Specs | None,
    sample: Any,
    sample_kwargs: Mapping[str, Any] | None,
    dynamic: Mapping[str, Any] | None,
    entry: str = FORWARD,
    entries: Sequence[str] = (FORWARD,),
    states: Sequence[Asked] = (),
    dropout: bool = False,
) -> Captures:
    """One capture a shape signature, from fresh members, of one entry. dropout: it stays on."""
    sample, sample_kwargs = of_entry(sample, entry, entries, "sample"), of_entry(sample_kwargs, entry, entries, "sample_kwargs")
    dynamic = of_entry(dynamic, entry, entries, "dynamic")
    signatures = aligned.signatures
    made: list[Captured] = []
    again: list[Callable[[int, nn.Module | None], Captured]] = []
    bounds: dict[str, tuple[int, int | None]] = {}
    low_high: dict[str, tuple[int | None, int | None]] = {}
    for number in sorted(set(signatures)):
        if isinstance(factory, Programs):
            if sample is not None or sample_kwargs is not None:
                raise UsageError(
                    "a sample is given, but the members are programs that bring their own; describe inputs with specs, or leave them out"
                )
            if dropout:
                raise UsageError(
                    "dropout is on, and the members are programs of torch.export, whose dropout is gone: name a --model and give state dicts"
                )
            if list(entries) != [FORWARD] or states:
                raise UsageError(
                    "the members are programs of torch.export: each is one entry, forward, and carries no state; leave --entry and --state out"
                )
            own_specs = inputs.get(entry) if isinstance(inputs, Mapping) else inputs
            specs, bounds = parse_inputs(own_specs or ())
            low_high = {s.name: (s.low, s.high) for s in specs}
            made.append(factory.captured([c for c, own in zip(aligned.checkpoints, signatures) if own == number], own_specs))
            continue
        module = filled_member(factory, aligned, signatures.index(number))
        if inputs:
            if sample is not None or sample_kwargs is not None:
                raise UsageError("inputs and sample are both given; one of them describes a call")
            specs, bounds = specs_of(inputs, entry, entries)
            sizes = example_sizes(specs, bounds)
            low_high = {s.name: (s.low, s.high) for s in specs}
            call = _example(module, specs, sizes, entry)
        elif sample is not None or sample_kwargs is not None:
            args, kwargs = (sample,) if isinstance(sample, torch.Tensor) else tuple(sample or ()), dict(sample_kwargs or {})
            parameters = inspect.signature(method_of(module, entry)).parameters
            unknown = sorted(set(dynamic or ()) - set(parameters) - set(kwargs))
            if unknown and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
                raise UsageError(f"dynamic names {', '.join(unknown)}, which {entry} does not take; it takes {', '.join(parameters)}")
            named = dynamic if dynamic is not None else default_axes(list(parameters), args, kwargs)
            call = arrange(module, args, kwargs, named, {}, entry)
        else:
            raise UsageError(
                f"no inputs: describe each input of {entry}, for example --input '{entry + ':' if len(entries) > 1 else ''}x=float32[B,3,32,32]' "
                f"(letters are dynamic dims), or give a sample"
            )
        exported = partial(capture, call=call, asked=bool(inputs) or dynamic is not None, entry=entry, states=states, dropout=dropout)
        filled = partial(_filled, factory, aligned, dropout, signatures.index(number))
        fresh = _fresh_first(switched_on(module) if dropout else module, filled)
        del module
        try:
            captured = exported(fresh)
        except FixedSize as e:
            larger = {d: 2 * n if d in e.letters and (bounds.get(d, (1, None))[1] or 2 * n) >= 2 * n else n for d, n in call.sizes.items()}
            if not inputs or larger == call.sizes:
                raise
            try:  # the size was widepack's choice: `view(4, -1)` meets a batch of 4 by chance
                exported = partial(capture, call=_example(filled(), specs, larger, entry), entry=entry, states=states, dropout=dropout)
                captured = exported(filled)
            except CaptureError:
                raise e from None
        beyond = where_nothing_is_one(call.sizes, [g.expr for g in captured.guards], bounds) if inputs else None
        if beyond is not None:
            with suppress(
                CaptureError
            ):  # the sizes were widepack's choice, and the program for larger ones holds for more; else the one that there is stays
                wider = partial(capture, call=_example(filled(), specs, beyond, entry), entry=entry, states=states, dropout=dropout)
                captured, exported = wider(filled), wider
        again.append(lambda i, module, exported=exported: exported(_fresh_first(module, partial(_filled, factory, aligned, dropout, i))))  # type: ignore[misc]
        made.append(captured)
    first = made[0]
    for other in made[1:]:
        _same_graph(first, other)
    dims = {d: _meet(found, bounds.get(d)) for d, found in first.dims.items()}
    for other in made[1:]:  # every condition that one member's export holds under binds all of them
        dims = {d: _meet(dims[d], other.dims[d][:2]) for d in dims}
    guards = {str(g.expr): g for c in made for g in c.guards}
    return Captures(tuple(made), signatures, replace(first, dims=dims, guards=tuple(guards.values())), low_high, tuple(again))


def _filled(factory: Factory, aligned: Alignment, dropout: bool, i: int) -> nn.Module:
    """Member i as it is captured."""
    module = filled_member(factory, aligned, i)
    return switched_on(module) if dropout else module


def _fresh_first(module: nn.Module | None, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Gives a module in which nothing has run yet, if there is one, then those that are made."""
    fresh = [module] if module is not None else []
    return lambda: fresh.pop() if fresh else make()


def _example(module: nn.Module, specs: Sequence[InputSpec], sizes: Mapping[str, int], entry: str) -> Call:
    """A call drawn from input specs, at these sizes."""
    values, axes = from_specs(specs, sizes)
    return arrange(module, (), values, axes, sizes, entry)


def _meet(found: tuple[int, int | None, str], asked: tuple[int, int | None] | None) -> tuple[int, int | None, str]:
    """The bounds that export found and those that the user gave, both."""
    if asked is None:
        return found
    highs = [h for h in (found[1], asked[1]) if h is not None]
    least, most = max(found[0], asked[0]), min(highs) if highs else None
    own = (least == found[0] and least > 1) or (most is not None and most == found[1])
    return least, most, found[2] if own else ""  # a bound that the user gave is tighter: no line of the member made it


def _same_graph(a: Captured, b: Captured) -> None:
    """Refuse members of other shapes whose programs differ in more than sizes."""
    for x, y in zip(a.program.nodes, b.program.nodes):
        if (x.name, x.op) != (y.name, y.op):
            where = x.source or y.source
            raise CaptureError(
                f"members of other shapes give other programs, from {where or x.name} on: {x.op} in one, {y.op} in another; only sizes may differ between them"
            )
    if len(a.program.nodes) != len(b.program.nodes):
        raise CaptureError(
            f"members of other shapes give programs of {len(a.program.nodes)} and {len(b.program.nodes)} ops; only sizes may differ between them"
        )
    if words := difference(a, b, sizes=True):
        apart = differences(a.attributes or {}, b.attributes or {})
        raise CaptureError(
            f"members of other shapes give other programs, and only sizes may differ between them: in one of them {words}"
            + (f". The modules differ in {in_words(apart, 'the captured one', 'this one')}" if apart else "")
        )
    for state in a.states:
        one, other = a.inputs[state.input].type, b.inputs[state.input].type
        if one != other:
            raise CaptureError(f"state {state.name} is {one} in one member and {other} in another; a state has one shape in all members")
    if a.returned != b.returned:
        raise CaptureError("members of other shapes return different numbers beside their tensors; return tensors, or leave such numbers out")


@dataclass(frozen=True)
class Captures:
    """captured: one a shape signature. first: the first, with the dims' final bounds. ranges: bounds of integer inputs by name. again: by shape signature, what
    captures another member (its number, a fresh module of it or None) as that one was."""

    captured: tuple[Captured, ...]
    signatures: tuple[int, ...]
    first: Captured
    ranges: dict[str, tuple[int | None, int | None]]
    again: tuple[Callable[[int, nn.Module | None], Captured], ...] = ()

    def alike(self, names: Sequence[str]) -> Alike | None:
        """What holds the members' own modules to what was captured; None for members that are programs, which are compared when they are read."""
        if not self.again:
            return None
        return Alike(names, self.signatures, self.captured, lambda i, module: self.again[self.signatures[i]](i, module))


class Table:
    """The weights of a build: a row for each, of whatever entry reads it. by_name: rows by every name. parameters: the names that are no buffers."""

    def __init__(self, factory: Factory, aligned: Alignment, captures: Sequence[Captures], parameters: Sequence[str]) -> None:
        self.factory, self.aligned, self.captures = factory, aligned, captures
        self.count = len(aligned.names)
        self.rows = self._table(parameters)
        self.by_name = {name: r for r in self.rows for name in (r.weight.name, *r.weight.aliases)}

    def _table(self, parameters: Sequence[str]) -> list[Row]:
        rows: list[Row] = []
        roles = {n: role for entry in self.captures for c in entry.captured for n, (role, _) in c.weights.items()}
        known = set()
        for w in self.aligned.weights:
            role = roles.get(w.name) or ("parameter" if w.name in parameters else "buffer")
            shape: list[Any] = [list(s) for s in w.shape] if w.kind == "ragged" else list(w.shape)  # type: ignore[arg-type]
            rows.append(Row(form.Weight(w.name, w.kind, w.dtype, shape, role, list(w.aliases)), lambda i, n=w.name: self.aligned.tensor(i, n)))  # type: ignore[misc]
            known |= {w.name, *w.aliases}
        return rows + self._constants({n: value for entry in self.captures for n, (_, value) in entry.first.weights.items() if n not in known})

    def _constants(self, lifted: Mapping[str, torch.Tensor]) -> list[Row]:
        """Buffers that are not saved and tensors in plain attributes: each member's own, read from the member itself; literals are the program's."""
        if not lifted:
            return []
        values: dict[str, list[torch.Tensor]] = {n: [] for n in lifted}
        for i in range(self.count):
            module = filled_member(self.factory, self.aligned, i)
            found = {**dict(tensors_of(module)), **dict(module.named_buffers(remove_duplicate=False))}
            for n in lifted:
                value = found.get(n, lifted[n] if is_literal(n) else None)
                if value is None:
                    raise CaptureError(
                        f"member {self.aligned.names[i]} has no tensor at {n}, which the captured member holds; members must be made alike"
                    )
                values[n].append(value.detach().clone())
        rows = []
        for n, vs in values.items():
            same = all(bit_equal(v, vs[0]) for v in vs)
            if any(v.shape != vs[0].shape or v.dtype != vs[0].dtype for v in vs):
                raise CaptureError(f"the constant {n} differs in shape or dtype between members; make it a buffer that is saved with the checkpoint")
            rows.append(Row(form.Weight(n, "shared" if same else "stacked", dtype_name(vs[0].dtype), list(vs[0].shape), "constant"), vs.__getitem__))
        return rows

    def kind(self, name: str) -> Kind:
        return self.by_name[name].weight.kind  # type: ignore[return-value]


class Job(Simplified):
    """All that the later stages need to know of one entry of a build."""

    def __init__(self, entry: str, table: Table, captures: Captures, dropout: bool = False) -> None:
        self.entry, self.table, self.captures = entry, table, captures
        self.dropout = dropout  # is on: programs draw, and are proved at rest
        self.factory, self.aligned = table.factory, table.aligned
        self.first = captures.first
        self.count = table.count
        super().__init__([self._canonical(c.program) for c in captures.captured], table.kind, captures.first.states, captures.first.sizes)
        leaves = self.first.inputs
        self.sources = [
            Source(x.name, x.type, *captures.ranges.get(x.name, (None, None)), example=None if x.name in captures.ranges else x.example)
            for x in leaves
        ]
        for state in self.states:
            if state.how == BUFFER and self.kind(state.name) == "ragged":
                raise CaptureError(f"state {state.name} differs in shape between the members; a state has one shape in all members")
        self.batch = self._batch()

    @property
    def bounds(self) -> dict[str, tuple[int, int | None]]:
        """Each dim's least and most size."""
        return {d: (least, most) for d, (least, most, _) in self.first.dims.items()}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Each dim's size in the example."""
        return self.first.sizes

    @property
    def signatures(self) -> Sequence[int]:
        """Each member's index into the programs."""
        return self.captures.signatures

    @property
    def signature(self) -> Sequence[form.Parameter]:
        """The parameters of the method, over the leaves of a call."""
        return self.first.signature

    @property
    def result(self) -> Tree:
        """The form of the answer, over the leaves of the outputs."""
        return self.first.result

    def at_least_two(self, letter: str, why: str) -> None:
        """Raise a dim's lower bound to 2: the program is not known to hold where it is 1. The line of an upper bound stays."""
        _, most, line = self.first.dims[letter]
        said = f"at {letter} = 1 the program is not known to hold: {why}" + (f"; {letter} <= {most} is from {line}" if line else "")
        self.first = replace(self.first, dims={**self.first.dims, letter: (2, most, said)})

    def _batch(self) -> str:
        """The dim that batch classes are made of: the first dynamic dim of the first input that has one."""
        for leaf in self.first.inputs:
            for axis in sorted(leaf.axes):
                return leaf.axes[axis].rpartition("*")[2]
        return ""

    def _canonical(self, program: Program) -> Program:
        """The program in plain ops, naming weights as the table does (tied weights have one name there)."""
        program = plain(program)
        return replace(program, weights=tuple(replace(s, source=self.table.by_name[s.source].weight.name) for s in program.weights))

    def initial(self, state: Carried) -> str:
        """The weight that a state begins as; "" for an input, which begins as zeros."""
        return self.table.by_name[state.name].weight.name if state.how == BUFFER else ""

    def weights_of(self, i: int, held: weight_files.Weights) -> dict[str, Any]:
        """Member i's weights by source name, from the file that was written."""
        out = {}
        for s in self.programs[self.captures.signatures[i]].weights:
            kind = self.kind(s.source)
            out[s.source] = held.get(s.source) if kind == "shared" else held.slice(s.source, i) if kind == "stacked" else held.get(f"{s.source}@{i}")
        return out


def all_weights(program: Program, held: weight_files.Weights, members: int, part: range | None = None) -> dict[str, Any]:
    """The weights of a wide program by source name, mapped. part: the members that it is for; all where None."""
    chosen = part if part is not None else range(members)
    found: dict[str, Any] = {}
    for s in program.weights:
        if s.kind == "ragged":
            found[s.source] = [held.get(f"{s.source}@{i}") for i in chosen]
        else:
            whole = held.get(s.source)
            found[s.source] = whole[chosen.start : chosen.stop] if s.kind == "stacked" else whole
    return found
