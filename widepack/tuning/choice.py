"""Chooses the plans of all batches of a pattern from what was measured.

All plans store each weight in one form beside the mapped one, because weights in two packed orders would be
in memory twice; small weights may be. The predicted plans do so, and are preferred: others must be faster by
`GAIN`, the loop by `LOOP_GAIN`, and by more than the noise of the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from widepack_artifacts.program import Program

from ..planning.plan import LOOP, Plan
from .candidate_pool import PREDICTED
from .search import MeasuredPlan, SearchResult

GAIN = 0.95  # a race is short: a plan that is a little faster may only be lucky
MOST_NOISE = 1.5  # with more noise than this the predicted plans stay
LOOP_GAIN = 0.98  # the loop is what users have without widepack: no plan may be slower

Plans = list[tuple[Program, Plan]]
May = Callable[[MeasuredPlan], bool]


def any_plan(_: MeasuredPlan) -> bool:
    """Returns True: any plan may be chosen."""
    return True


def on_eager(measured: MeasuredPlan) -> bool:
    """Returns whether a plan runs on `eager`, as on machines without another backend."""
    return measured.backend == "eager"


def chosen_plans(
    results: Mapping[int, SearchResult], may: May = any_plan, one_form: bool = True
) -> dict[int, str]:
    """Returns the name of the plan for each batch.

    may: which plans may be chosen. one_form: whether all plans store each weight in one form.
    """
    if not one_form:
        return {b: _fastest(r, [n for n, p in r.plans.items() if may(p)]) for b, r in results.items()}

    def total(names: Mapping[int, str]) -> float:
        return math.prod(_cost(results[b], n) for b, n in names.items())

    options = [dict.fromkeys(results, PREDICTED)]
    options += [{b: _best(r, form, may) for b, r in results.items()} for form in _forms(results, may)]
    return min((o for o in options if all(o.values())), key=total)


def conflicts(results: Mapping[int, SearchResult]) -> bool:
    """Returns whether the fastest plans of two batches store a weight in different forms."""
    forms = [r.plans[_fastest(r, [*r.plans])].forms for r in results.values()]
    return len({tuple(sorted(form.items())) for form in forms if form}) > 1


def _forms(results: Mapping[int, SearchResult], may: May) -> list[dict[str, str]]:
    every = [dict(p.forms) for r in results.values() for p in r.plans.values() if may(p)]
    return [form for i, form in enumerate(every) if form not in every[:i]]


def _best(result: SearchResult, form: Mapping[str, str], may: May) -> str:
    """Returns the fastest plan of one form of weights, or without copies of weights; "" if there is none."""
    return _fastest(result, [n for n, p in result.plans.items() if p.forms in ({}, form) and may(p)])


def _fastest(result: SearchResult, names: Sequence[str]) -> str:
    return min(names, key=partial(_cost, result), default="")


def _cost(result: SearchResult, name: str) -> float:
    """Returns how many times as long as the fastest plan this one takes, less what the choice allows it."""
    gain = min(GAIN, 1 / result.noise) if result.noise < MOST_NOISE else 1e-6
    allowed = {result.loop: gain / LOOP_GAIN, PREDICTED: gain}
    return allowed.get(name, 1.0) * result.plans[name].cost


def programs_by_class(
    results: Mapping[int, SearchResult],
    names: Mapping[int, str],
    classes: Mapping[int, tuple[int, int | None]],
    predicted: Sequence[tuple[Program, Plan]],
) -> Plans:
    """Returns the programs of a pattern with their plans, one batch class after the other.

    Beyond the last measured class there are the predicted plans, if they won at the last batch or all chosen
    plans keep no copies of weights. Else the loop serves the larger batches, or a plan with the same form of
    weights.

    Args:
        results: What was measured at each batch.
        names: The chosen plan of each batch.
        classes: The batch class of each batch.
        predicted: The predicted plans with their programs, smallest batch first.
    """
    last, found = max(results), Plans()
    for batch, name in names.items():
        measured, (least, most) = results[batch].plans[name], classes[batch]
        if batch == last and name.startswith(LOOP):
            most = None
        plan = replace(measured.plan, batch=(least, most), times_ms=results[batch].times_ms)
        found.append((measured.program, plan))
    end = found[-1][1].batch[1]
    if end is None:
        return found
    packed = next((f for b, n in names.items() if n != PREDICTED and (f := results[b].plans[n].forms)), None)
    if packed and names[last] != PREDICTED:
        # other predicted plans may pack the same weights in another order
        plans = results[last].plans
        fitting = [n for n in (LOOP, PREDICTED) if n in plans and plans[n].forms in ({}, packed)]
        beyond = plans[[*fitting, names[last]][0]]
        return [*found, (beyond.program, replace(beyond.plan, batch=(end + 1, None)))]
    for program, plan in predicted:
        least, most = plan.batch
        if most is None or most > end:
            found.append((program, replace(plan, batch=(max(least, end + 1), most))))
    return found
