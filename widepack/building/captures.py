"""Makes the example call of an entry, and captures its members: one for each shape signature.

| the user gives | the source of the call is |
|---|---|
| input specs, for example `x=float32[B,3,32,32]` | `SpecCalls` |
| `sample`, `sample_kwargs`, `dynamic` | `SampleCalls` |
| members that are torch.export programs | `ExportedCalls` |

The captures of an entry are merged: dims and conditions of all members hold (`Captures`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..capture.attributes import differences, in_words
from ..capture.call import MemberCall, arrange
from ..capture.capture import Captured, FixedSize, capture, check_literals
from ..capture.example import dynamic_axes, example_sizes, from_specs, sizes_without_ones, without_ones
from ..capture.named_fields import as_annotated, sample_arguments
from ..capture.pt2.factory import ExportedProgramFactory
from ..checkpoints.alignment import Alignment
from ..checkpoints.factory import Factory
from ..checkpoints.loading import filled
from ..errors import CaptureError, UsageError
from ..spec.dropout import switched_on
from ..spec.entries import FORWARD, of_entry
from ..spec.input_spec import Bounds, InputSpec, parse_inputs
from ..spec.state import StateRequest
from ..verification.same_program import SameProgram, difference


def filled_member(factory: Factory, aligned: Alignment, i: int) -> nn.Module:
    """Returns member i with its weights, in eval mode. Raises: MemberMismatch."""
    return filled(factory, aligned.checkpoints[i], aligned.names[i])


@dataclass(frozen=True)
class EntryMembers:
    """Makes and captures the members of one entry.

    entries: all entries of the build. states: the states that were requested for this entry. dropout: whether
    dropout is on.
    """

    factory: Factory
    aligned: Alignment
    entry: str = FORWARD
    entries: Sequence[str] = (FORWARD,)
    states: Sequence[StateRequest] = ()
    dropout: bool = False

    def first_of(self, signature: int) -> int:
        """Returns the first member with this shape signature."""
        return self.aligned.signatures.index(signature)

    def module(self, i: int) -> nn.Module:
        """Returns a fresh member i in the mode that is captured."""
        module = filled_member(self.factory, self.aligned, i)
        return switched_on(module) if self.dropout else module

    def capture(
        self, i: int, call: MemberCall, named_dims: bool = True, fresh: list[nn.Module] | None = None
    ) -> Captured:
        """Captures member i.

        named_dims: as `capture.capture` takes it. fresh: modules of member i that exist and have not run.
        They are taken out of the list, so the list does not keep their weights in memory.
        """
        return capture(
            lambda: fresh.pop() if fresh else self.module(i),
            call,
            named_dims=named_dims,
            entry=self.entry,
            states=self.states,
            dropout=self.dropout,
        )


@dataclass(frozen=True)
class MemberCapture:
    """The capture of one member, and the call that it was captured with.

    named_dims: as `capture.capture` takes it.
    """

    captured: Captured
    members: EntryMembers
    call: MemberCall
    named_dims: bool = True

    def repeat(self, i: int, module: nn.Module | None) -> Captured:
        """Captures another member with the same call. module: a fresh member i, or None; it is used up."""
        return self.members.capture(i, self.call, self.named_dims, [] if module is None else [module])


Specs = Sequence[str] | Mapping[str, Sequence[str]]
Ranges = Mapping[str, tuple[int | None, int | None]]
T = TypeVar("T")


@dataclass(frozen=True)
class CallDescription:
    """What the user gave to describe the calls of all entries.

    The fields are the arguments of `widepack.build`.
    """

    inputs: Specs | None = None
    sample: Any = None
    sample_kwargs: Mapping[str, Any] | None = None
    dynamic: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = self.inputs.values() if isinstance(self.inputs, Mapping) else [self.inputs]
        for specs in given:
            texts = specs if isinstance(specs, (list, tuple)) else [specs]
            wrong = [type(t).__name__ for t in texts if t is not None and not isinstance(t, str)]
            if wrong:
                raise UsageError(
                    f"inputs has a {wrong[0]}; it is a list of texts such as"
                    ' ["x=float32[B,3,32,32]"]. Tensors of one call are given as sample'
                )

    @property
    def forward_inputs(self) -> Sequence[str] | None:
        """The input specs of `forward`."""
        return self.inputs.get(FORWARD) if isinstance(self.inputs, Mapping) else self.inputs


def call_source(calls: CallDescription, members: EntryMembers) -> SpecCalls | SampleCalls | ExportedCalls:
    """Returns the source of an entry's example call. Raises: UsageError."""
    entry, entries = members.entry, members.entries
    sample = of_entry(calls.sample, entry, entries, "sample")
    keywords = of_entry(calls.sample_kwargs, entry, entries, "sample_kwargs")
    dynamic = of_entry(calls.dynamic, entry, entries, "dynamic")
    sampled = sample is not None or keywords is not None
    if isinstance(members.factory, ExportedProgramFactory):
        _check_exported(members, sampled)
        return ExportedCalls(members.factory, calls.forward_inputs)
    if calls.inputs:
        if sampled:
            raise UsageError("inputs and sample are both given; give one of them to describe a call")
        specs, bounds = specs_of(calls.inputs, entry, entries)
        return SpecCalls(specs, bounds)
    if sampled:
        args = sample_arguments(sample)
        return SampleCalls(args, dict(keywords or {}), dynamic)
    prefix = f"{entry}:" if len(entries) > 1 else ""
    raise UsageError(
        f"no inputs: describe each input of {entry}, for example --input '{prefix}x=float32[B,3,32,32]'"
        " (letters are dynamic dims), or give a sample"
    )


def specs_of(inputs: Specs, entry: str, entries: Sequence[str]) -> tuple[list[InputSpec], dict[str, Bounds]]:
    """Returns the input specs and bounds of one entry. inputs: texts, or texts by entry.

    Raises: UsageError.
    """
    if not isinstance(inputs, Mapping):
        return parse_inputs(inputs, entry, entries)
    unknown = [k for k in inputs if k not in entries]
    if unknown:
        raise UsageError(
            f"inputs names the entry {', '.join(map(repr, unknown))}; the entries are {', '.join(entries)}"
        )
    return parse_inputs(inputs.get(entry, ()), entry, entries)


def captured_at(
    sizes: Mapping[str, int], bounds: Mapping[str, Bounds], capture: Callable[[Mapping[str, int]], T]
) -> T:
    """Captures a member at the example's sizes, or with those doubled that the member fixes.

    A member may fix an example size by accident: `view(4, -1)` fits a batch of 4. Raises the first error if
    the bounds allow no larger sizes, or the member cannot be captured there either.
    """
    try:
        return capture(sizes)
    except FixedSize as e:
        larger = {
            d: 2 * n if d in e.letters and (bounds.get(d, (1, None))[1] or 2 * n) >= 2 * n else n
            for d, n in sizes.items()
        }
        if larger == dict(sizes):
            raise
        try:
            return capture(larger)
        except CaptureError:
            raise e from None


def spec_call(
    module: nn.Module, specs: Sequence[InputSpec], sizes: Mapping[str, int], entry: str
) -> MemberCall:
    """Returns a call that is drawn from input specs, at these sizes."""
    values, axes = from_specs(specs, sizes)
    return arrange(module, (), values, axes, sizes, entry)


@dataclass(frozen=True)
class SpecCalls:
    """Draws the example call from input specs. widepack chooses the sizes of the dynamic dims."""

    specs: Sequence[InputSpec]
    bounds: Mapping[str, Bounds]

    @property
    def ranges(self) -> Ranges:
        """The bounds of integer inputs, by name."""
        return {s.name: (s.low, s.high) for s in self.specs}

    def capture(self, members: EntryMembers, signature: int) -> MemberCapture:
        """Captures the first member of a shape signature, at larger sizes where the program then covers more
        sizes.
        """
        first = members.first_of(signature)
        at = partial(self._at, members, first)
        sizes = example_sizes(self.specs, self.bounds)
        found = captured_at(sizes, self.bounds, at)
        # If the example made a size inside the member 1, larger sizes give a program that covers more.
        larger = sizes_without_ones(sizes, [g.expr for g in found.captured.guards], self.bounds)
        if larger is not None:
            with suppress(CaptureError):
                return at(larger)
        return found

    def _at(self, members: EntryMembers, first: int, sizes: Mapping[str, int]) -> MemberCapture:
        fresh = [members.module(first)]
        call = spec_call(fresh[0], self.specs, sizes, members.entry)
        return MemberCapture(members.capture(first, call, fresh=fresh), members, call)


@dataclass(frozen=True)
class SampleCalls:
    """Uses the user's sample as the example call.

    dynamic: `{input: {axis: letter}}`, or None: axis 0 of every input is "B".
    """

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    dynamic: Mapping[str, Any] | None
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    ranges: Ranges = field(default_factory=dict)

    def capture(self, members: EntryMembers, signature: int) -> MemberCapture:
        """Captures the first member of a shape signature. Raises: UsageError; CaptureError."""
        first = members.first_of(signature)
        fresh = [members.module(first)]
        args, keywords = as_annotated(fresh[0], members.entry, self.args, self.keywords)
        axes = dynamic_axes(self.dynamic, fresh[0], args, keywords, members.entry)
        call = arrange(fresh[0], args, keywords, axes, {}, members.entry)
        named_dims = self.dynamic is not None
        if not members.states:
            call = without_ones(call, lambda: members.module(first), named_dims, members.entry)
        return MemberCapture(members.capture(first, call, named_dims, fresh), members, call, named_dims)


@dataclass(frozen=True)
class ExportedCalls:
    """Reads members that are torch.export programs, which contain an example call.

    specs: the texts of the input specs that the user gave, or None.
    """

    factory: ExportedProgramFactory
    specs: Sequence[str] | None

    @property
    def bounds(self) -> Mapping[str, Bounds]:
        """The bounds of dims that the user gave."""
        return parse_inputs(self.specs or ())[1]

    @property
    def ranges(self) -> Ranges:
        """The bounds of integer inputs, by name."""
        return {s.name: (s.low, s.high) for s in parse_inputs(self.specs or ())[0]}

    def capture(self, members: EntryMembers, signature: int) -> Captured:
        """Reads the programs of all members with this shape signature, which must be the same."""
        aligned = members.aligned
        checkpoints = [c for c, other in zip(aligned.checkpoints, aligned.signatures) if other == signature]
        return self.factory.captured(checkpoints, self.specs)


def _check_exported(members: EntryMembers, sampled: bool) -> None:
    """Refuses options that members that are torch.export programs do not have. Raises: UsageError."""
    if sampled:
        raise UsageError(
            "a sample is given, but the members are torch.export programs, which contain example "
            "inputs; leave the sample out, or describe the inputs with specs"
        )
    if members.dropout:
        raise UsageError(
            "dropout is on, but the members are torch.export programs, whose dropout was removed by the"
            " export; name a --model and give state dicts"
        )
    if list(members.entries) != [FORWARD] or members.states:
        raise UsageError(
            "the members are torch.export programs: each has one entry, forward, and carries no state;"
            " leave --entry and --state out"
        )


Dim = tuple[int, int | None, str]


@dataclass(frozen=True)
class Captures:
    """The captured members of one entry.

    captured: one for each shape signature. signatures: for each member the index of its capture. first: the
    first capture, with the dims and conditions of all members. ranges: the bounds of integer inputs, by name.
    repeatable: by shape signature, what captures another member the same way; empty for torch.export
    programs.
    """

    captured: tuple[Captured, ...]
    signatures: tuple[int, ...]
    first: Captured
    ranges: Ranges
    repeatable: tuple[MemberCapture, ...] = ()

    def recapture(self, i: int, module: nn.Module | None) -> Captured:
        """Captures member i as the first member of its shapes was. module: a fresh member i, or None."""
        return self.repeatable[self.signatures[i]].repeat(i, module)

    def same_program(self, names: Sequence[str]) -> SameProgram | None:
        """Returns the comparison of the members' own modules with the captured ones.

        None for members that are torch.export programs: they are compared when they are read.
        """
        if not self.repeatable:
            return None
        return SameProgram(names, self.signatures, self.captured, self.recapture)


def capture_members(calls: CallDescription, members: EntryMembers) -> Captures:
    """Captures one member of an entry for each shape signature. Raises: UsageError; CaptureError."""
    source = call_source(calls, members)
    signatures = members.aligned.signatures
    found = [source.capture(members, number) for number in sorted(set(signatures))]
    captured = tuple(f.captured if isinstance(f, MemberCapture) else f for f in found)
    for number, one in enumerate(captured):
        alike = [i for i, other in enumerate(signatures) if other == number]
        check_literals(one, members.module, alike, members.aligned.names)
    return Captures(
        captured,
        signatures,
        _merged(captured, source.bounds),
        source.ranges,
        tuple(f for f in found if isinstance(f, MemberCapture)),
    )


def _merged(captured: Sequence[Captured], bounds: Mapping[str, Bounds]) -> Captured:
    """Returns the first capture with the dims and conditions of all. bounds: those that the user gave."""
    first = captured[0]
    for other in captured[1:]:
        _check_same_graph(first, other)
    dims = {d: _intersection(found, bounds.get(d)) for d, found in first.dims.items()}
    for other in captured[1:]:
        dims = {d: _intersection(dims[d], other.dims[d][:2]) for d in dims}
    guards = {str(g.expr): g for c in captured for g in c.guards}
    literals = {x.expression: x for c in captured for x in c.literals}
    return replace(first, dims=dims, guards=tuple(guards.values()), literals=tuple(literals.values()))


def _intersection(found: Dim, other: Bounds | None) -> Dim:
    """Returns the bounds that satisfy both sides.

    The source line is kept only where `found` is the tighter side: another bound has no line of the member.
    """
    if other is None:
        return found
    highs = [h for h in (found[1], other[1]) if h is not None]
    least, most = max(found[0], other[0]), min(highs) if highs else None
    has_line = (least == found[0] and least > 1) or (most is not None and most == found[1])
    return least, most, found[2] if has_line else ""


def _check_same_graph(a: Captured, b: Captured) -> None:
    """Refuses members of different shapes whose programs differ in more than sizes. Raises: CaptureError."""
    words = difference(a, b, sizes=True)
    if not words and [n.name for n in a.program.nodes] != [n.name for n in b.program.nodes]:
        words = "values have other names"  # lowering takes the values of all members by the names of one
    if words:
        attributes = differences(a.attributes or {}, b.attributes or {})
        cause = in_words(attributes, "the captured one", "this one") if attributes else ""
        raise CaptureError(
            "members of different shapes give different programs, but only sizes may differ: in one of them"
            f" {words}" + (f". The modules differ in {cause}" if cause else "")
        )
    for state in a.states:
        one, other = a.inputs[state.input].type, b.inputs[state.input].type
        if one != other:
            raise CaptureError(
                f"state {state.name} is {one} in one member and {other} in another; a state has one shape in"
                " all members"
            )
