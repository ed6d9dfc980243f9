"""Captures the members of one entry, one for each shape signature, and merges their dims and conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..capture.attributes import differences, in_words
from ..capture.capture import Captured, check_literals
from ..errors import CaptureError
from ..spec.input_spec import Bounds
from ..verification.program_difference import difference
from ..verification.same_program import SameProgram
from .call_source import CallDescription, Ranges, call_source
from .members import EntryMembers, MemberCapture

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
