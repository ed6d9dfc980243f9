"""A build's job: checkpoints aligned, members captured, the weights table, kinds; all that the later stages need to know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from widepack_artifacts import manifest as form
from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Kind, Program

from .capture import Captured, arrange, capture, tensors_of
from .codec import dtype_name
from .errors import CaptureError, MemberMismatch, UsageError
from .members import Alignment, Factory, bit_equal
from .samples import Source
from .sampling import default_axes, example_sizes, from_specs
from .simplify import simplify_all
from .specs import parse_inputs


@dataclass(frozen=True)
class Row:
    """A row of the weights table in the making: values(i) is member i's tensor."""

    weight: form.Weight
    value: Callable[[int], torch.Tensor]


def fresh_member(factory: Factory, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A fresh module for a state dict; not filled yet."""
    return factory(state_dict=state)


def filled_member(factory: Factory, aligned: Alignment, i: int) -> nn.Module:
    """Member i as the user would load it. Raises: MemberMismatch."""
    state = aligned.state_dict(i)
    module = fresh_member(factory, state)
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise MemberMismatch(f"member {aligned.names[i]}: the model does not take its checkpoint: {' '.join(str(e).split())[:600]}") from e
    return module.eval()


def capture_members(
    factory: Factory,
    aligned: Alignment,
    inputs: Sequence[str] | None,
    sample: Sequence[Any] | None,
    sample_kwargs: Mapping[str, Any] | None,
    dynamic: Mapping[str, Any] | None,
) -> Captures:
    """One capture a shape signature, from fresh members."""
    signatures = aligned.signatures
    made: list[Captured] = []
    bounds: dict[str, tuple[int, int | None]] = {}
    low_high: dict[str, tuple[int | None, int | None]] = {}
    for number in sorted(set(signatures)):
        module = filled_member(factory, aligned, signatures.index(number))
        if inputs:
            if sample is not None or sample_kwargs is not None:
                raise UsageError("inputs and sample are both given; one of them describes a call")
            specs, bounds = parse_inputs(inputs)
            sizes = example_sizes(specs, bounds)
            values, axes = from_specs(specs, sizes)
            low_high = {s.name: (s.low, s.high) for s in specs}
            call = arrange(module, (), values, axes, sizes)
        elif sample is not None or sample_kwargs is not None:
            args, kwargs = (sample,) if isinstance(sample, torch.Tensor) else tuple(sample or ()), dict(sample_kwargs or {})
            unknown = sorted(set(dynamic or ()) - set(inspect.signature(module.forward).parameters) - set(kwargs))
            if unknown and not any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values()):
                raise UsageError(
                    f"dynamic names {', '.join(unknown)}, which forward does not take; it takes {', '.join(inspect.signature(module.forward).parameters)}"
                )
            names = list(inspect.signature(module.forward).parameters)
            call = arrange(module, args, kwargs, dynamic if dynamic is not None else default_axes(names, args, kwargs), {})
        else:
            raise UsageError(
                "no inputs: describe each input of forward, for example --input 'x=float32[B,3,32,32]' (letters are dynamic dims), or give a sample"
            )
        made.append(capture(partial(filled_member, factory, aligned, signatures.index(number)), call, asked=bool(inputs) or dynamic is not None))
    first = made[0]
    for other in made[1:]:
        _same_graph(first, other)
    dims = {d: _meet(found, bounds.get(d)) for d, found in first.dims.items()}
    for other in made[1:]:  # every condition that one member's export holds under binds all of them
        dims = {d: _meet(dims[d], other.dims[d][:2]) for d in dims}
    guards = {str(g.expr): g for c in made for g in c.guards}
    return Captures(tuple(made), signatures, replace(first, dims=dims, guards=tuple(guards.values())), low_high)


def _meet(found: tuple[int, int | None, str], asked: tuple[int, int | None] | None) -> tuple[int, int | None, str]:
    """The bounds that export found and those that the user gave, both."""
    if asked is None:
        return found
    highs = [h for h in (found[1], asked[1]) if h is not None]
    return max(found[0], asked[0]), min(highs) if highs else None, found[2]


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
    if a.result != b.result:
        raise CaptureError("members of other shapes return different numbers beside their tensors; return tensors, or leave such numbers out")


@dataclass(frozen=True)
class Captures:
    """captured: one a shape signature. first: the first, with the dims' final bounds. ranges: bounds of integer inputs by name."""

    captured: tuple[Captured, ...]
    signatures: tuple[int, ...]
    first: Captured
    ranges: dict[str, tuple[int | None, int | None]]


class Job:
    """All that the later stages need to know of a build."""

    def __init__(self, factory: Factory, aligned: Alignment, captures: Captures, share: str) -> None:
        self.factory, self.aligned, self.captures, self.share = factory, aligned, captures, share
        self.first = captures.first
        self.count = len(aligned.names)
        self.rows = self._table()
        self.by_name = {name: r for r in self.rows for name in (r.weight.name, *r.weight.aliases)}
        self.programs = [self._canonical(c.program) for c in captures.captured]
        leaves = self.first.inputs
        self.sources = [
            Source(x.name, x.type, *captures.ranges.get(x.name, (None, None)), example=None if x.name in captures.ranges else x.example)
            for x in leaves
        ]
        self.batch = self._batch()
        self._simple: dict[str, list[Program]] = {}

    @property
    def bounds(self) -> dict[str, tuple[int, int | None]]:
        """Each dim's least and most size."""
        return {d: (least, most) for d, (least, most, _) in self.first.dims.items()}

    def at_least_two(self, letter: str, why: str) -> None:
        """Raise a dim's lower bound to 2: the program does not hold where it is 1."""
        _, most, _ = self.first.dims[letter]
        self.first = replace(self.first, dims={**self.first.dims, letter: (2, most, f"at {letter} = 1 the program does not hold: {why}")})

    def _batch(self) -> str:
        """The dim that batch classes are made of: the first dynamic dim of the first input that has one."""
        for leaf in self.first.inputs:
            for axis in sorted(leaf.axes):
                return leaf.axes[axis].rpartition("*")[2]
        return ""

    def _table(self) -> list[Row]:
        rows: list[Row] = []
        roles = {n: role for c in self.captures.captured for n, (role, _) in c.weights.items()}
        parameters = {n for n, _ in fresh_member(self.factory, self.aligned.state_dict(0)).named_parameters(remove_duplicate=False)}
        known = set()
        for w in self.aligned.weights:
            role = roles.get(w.name) or ("parameter" if w.name in parameters else "buffer")
            shape: list[Any] = [list(s) for s in w.shape] if w.kind == "ragged" else list(w.shape)  # type: ignore[arg-type]
            rows.append(Row(form.Weight(w.name, w.kind, w.dtype, shape, role, list(w.aliases)), lambda i, n=w.name: self.aligned.tensor(i, n)))  # type: ignore[misc]
            known |= {w.name, *w.aliases}
        lifted = [n for n in self.first.weights if n not in known]
        return rows + self._constants(lifted)

    def _constants(self, names: Sequence[str]) -> list[Row]:
        """Buffers that are not saved and tensors in plain attributes: each member's own, read from the member itself; literals are the program's."""
        if not names:
            return []
        values: dict[str, list[torch.Tensor]] = {n: [] for n in names}
        for i in range(self.count):
            module = filled_member(self.factory, self.aligned, i)
            found = {**dict(tensors_of(module)), **dict(module.named_buffers(remove_duplicate=False))}
            for n in names:
                literal = self.first.weights[n][1] if n.startswith("lifted_tensor") else None
                value = found.get(n, literal)
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

    def _canonical(self, program: Program) -> Program:
        """The program naming weights as the table does (tied weights have one name there)."""
        return replace(program, weights=tuple(replace(s, source=self.by_name[s.source].weight.name) for s in program.weights))

    def kind(self, name: str) -> Kind:
        return self.by_name[name].weight.kind  # type: ignore[return-value]

    def slots(self, pattern: str) -> dict[str, Kind]:
        """The kind of every weight and input of the member program, by value name."""
        program = self.programs[0]
        return {
            **{s.name: self.kind(s.source) for s in program.weights},
            **{s.name: "shared" if pattern == "shared" else "stacked" for s in program.inputs},
        }

    def simple(self, pattern: str) -> list[Program]:
        """The member programs simplified for a pattern."""
        if pattern not in self._simple:
            self._simple[pattern] = simplify_all(self.programs, self.slots(pattern), self.first.sizes)
        return self._simple[pattern]

    def weights_of(self, i: int, held: weight_files.Weights) -> dict[str, Any]:
        """Member i's weights by source name, from the file that was written."""
        out = {}
        for s in self.programs[self.captures.signatures[i]].weights:
            kind = self.kind(s.source)
            out[s.source] = held.get(s.source) if kind == "shared" else held.slice(s.source, i) if kind == "stacked" else held.get(f"{s.source}@{i}")
        return out


def all_weights(program: Program, held: weight_files.Weights, members: int) -> dict[str, Any]:
    """The weights of a wide program by source name, mapped."""
    return {s.source: [held.get(f"{s.source}@{i}") for i in range(members)] if s.kind == "ragged" else held.get(s.source) for s in program.weights}
