"""Lowering again at load: where device, pattern, members or strategies ask for programs that the artifact does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from widepack_artifacts.program import Kind, Program

from .lower import lower
from .plan import Plan
from .registry import Choice
from .rules_of_thumb import plans
from .simplify import simplify_all


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
) -> list[tuple[Program, Plan]]:
    """Wide programs, one a batch class, with their plans.

    programs, signatures: the member programs and each loaded member's index into them. weights: kinds by name. own: which inputs hold one value a member.
    Raises: LoweringError, UsageError.
    """
    used = sorted(set(signatures))
    programs = [programs[s] for s in used]
    signatures = [used.index(s) for s in signatures]
    first = programs[0]
    slots: dict[str, Kind] = {s.name: weights[s.source] for s in first.weights}
    slots.update({s.name: "stacked" if o else "shared" for s, o in zip(first.inputs, own)})
    simple = simplify_all(programs, slots, sizes)
    made = []
    for plan in plans(simple[0], slots, len(signatures), sizes, batch, device, pattern, Choice.parse(strategies)):
        made.append((lower(simple, signatures, slots, plan, sizes).program, plan))
    return made
