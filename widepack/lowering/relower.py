"""Lowers programs at load, if the artifact has none for the device, pattern, members or strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from widepack_artifacts.program import Kind, Program

from ..planning.heuristics import plans
from ..planning.plan import Plan
from ..planning.request import StrategyRequest
from ..simplify.factored_weights import FactorNames
from ..simplify.pipeline import simplified
from .lower import lower


def relower(
    programs: Sequence[Program],
    signatures: Sequence[int],
    weights: Mapping[str, Kind],
    stacked: Sequence[bool],
    sizes: Mapping[str, int],
    batch: str,
    device: str,
    pattern: str,
    strategies: str | Sequence[str],
    simplify: bool = True,
    plain: bool = False,
    factors: Mapping[str, FactorNames] | None = None,
) -> list[tuple[Program, Plan]]:
    """Returns the wide programs and plans, one pair for each batch class.

    Args:
        programs: The member programs.
        signatures: For each loaded member its index into the programs.
        weights: The kinds of weights by name.
        stacked: For each input whether it has one value for each member.
        sizes: An example size of each dim.
        batch: The dim of the batch, or "".
        device: The kind of device.
        pattern: The pattern of inputs.
        strategies: The strategies that the user requests.
        simplify: False takes the programs as they were captured.
        plain: No packed convolutions, as in the artifact's plans.
        factors: The weights that are stored as factors, by name.

    Raises:
        LoweringError: A node cannot run for all members.
        UsageError: A strategy is unknown.
    """
    simple = simplified(programs, signatures, weights, stacked, sizes, simplify, factors)
    request = replace(StrategyRequest.parse(strategies), plain=plain)
    members = len(simple.signatures)
    chosen = plans(simple.programs[0], simple.slots, members, sizes, batch, device, pattern, request)
    return [
        (lower(simple.programs, simple.signatures, simple.slots, plan, sizes).program, plan)
        for plan in chosen
    ]


def relowered(
    programs: Sequence[Program],
    signatures: Sequence[int],
    weights: Mapping[str, Kind],
    stacked: Sequence[bool],
    sizes: Mapping[str, int],
    chosen: Sequence[Plan],
    factors: Mapping[str, FactorNames] | None = None,
) -> list[Program]:
    """Returns the wide program of each plan, for a comparison with programs that an artifact has.

    chosen: the plans. The other arguments are those of `relower`.

    Raises:
        LoweringError: A node cannot run for all members.
    """
    simple = simplified(programs, signatures, weights, stacked, sizes, True, factors)
    return [lower(simple.programs, simple.signatures, simple.slots, plan, sizes).program for plan in chosen]
