"""Makes the example call of an entry and captures one member with it.

| the user gives | the source is |
|---|---|
| input specs, for example `x=float32[B,3,32,32]` | `SpecCalls` |
| `sample`, `sample_kwargs`, `dynamic` | `SampleCalls` |
| members that are torch.export programs | `ExportedCalls` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ..capture.call import MemberCall, arrange
from ..capture.capture import Captured, FixedSize
from ..capture.example import dynamic_axes, example_sizes, from_specs, sizes_without_ones, without_ones
from ..capture.named_fields import as_annotated, sample_arguments
from ..capture.pt2.factory import ExportedProgramFactory
from ..errors import CaptureError, UsageError
from ..spec.entries import FORWARD, of_entry
from ..spec.input_spec import Bounds, InputSpec, parse_inputs
from .members import EntryMembers, MemberCapture

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
