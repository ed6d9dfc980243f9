"""Lowering again at load: where device, pattern, members or strategies ask for programs that the artifact does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from widepack_artifacts.program import Kind, Program

from .lower import lower
from ..planning.plan import Plan
from ..registry.registry import Choice
from ..planning.heuristics import plans
from ..simplify.pipeline import simplify_all


@dataclass(frozen=True)
class Simple:
    """Member programs, simplified, with what lowering needs of them. signatures: each loaded member's index into programs. slots: kinds by value name."""

    programs: list[Program]
    signatures: list[int]
    slots: dict[str, Kind]


def simplified(
    programs: Sequence[Program],
    signatures: Sequence[int],
    weights: Mapping[str, Kind],
    own: Sequence[bool],
    sizes: Mapping[str, int],
    simplify: bool = True,
) -> Simple:
    """The programs of the loaded members, simplified, or as they were captured. weights: kinds by name. own: which inputs hold one value a member."""
    used = sorted(set(signatures))
    first = programs[used[0]]
    slots: dict[str, Kind] = {s.name: weights[s.source] for s in first.weights}
    slots.update({s.name: "stacked" if o else "shared" for s, o in zip(first.inputs, own)})
    captured = [programs[s] for s in used]
    return Simple(simplify_all(captured, slots, sizes) if simplify else captured, [used.index(s) for s in signatures], slots)


def relower(
    programs: Sequence[Program],
    signatures: Sequence[int],
    weights: Mapping[str, Kind],
    own: Sequence[bool],
    sizes: Mapping[str, int],
    batch: str,
    device: str,
    pattern: str,
    strategies: str | Sequence[str],
    simplify: bool = True,
    plain: bool = False,
) -> list[tuple[Program, Plan]]:
    """Wide programs, one a batch class, with their plans.

    programs, signatures: the member programs and each loaded member's index into them. weights: kinds by name. own: which inputs hold one value a member.
    simplify: False takes the programs as they were captured. plain: as the artifact's own plans are. Raises: LoweringError, UsageError.
    """
    simple = simplified(programs, signatures, weights, own, sizes, simplify)
    first, members = simple.programs[0], len(simple.signatures)
    made = plans(first, simple.slots, members, sizes, batch, device, pattern, replace(Choice.parse(strategies), plain=plain))
    return [(lower(simple.programs, simple.signatures, simple.slots, plan, sizes).program, plan) for plan in made]
