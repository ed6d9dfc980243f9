"""Makes the programs of a load with int8 weights: `load(weights="int8")`.

Calls of few rows read the weights, and little else takes time; int8 weights are a quarter of the bytes. Calls
of many rows multiply, and there float32 is faster. So programs over int8 weights serve batches up to `ROWS`
rows of a member, on average over the layers. Larger batches run the artifact's own programs, which are bound
when a call first needs one. A layer keeps its float weights if those of all members are fewer than `LEAST`
numbers. Both limits were measured on one CPU (AMD EPYC, one thread).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..planning.plan import NodeChoice
from .bound_program import StoredProgram
from .program_source import ProgramSource

ROWS = 4
LEAST = 1 << 18
_LOWERED_AS = ("bmm",)
"""The strategy of linear layers whose nodes `Int8Program` replaces."""
_BECAUSE = "int8 weights are a quarter of the bytes of float32"


def int8_programs(source: ProgramSource, pattern: str) -> list[StoredProgram]:
    """Returns the programs over int8 weights, one for each batch class, smallest batch first.

    There are none if no linear layer has enough weights, or if one row of the batch is more than `ROWS` rows.
    Raises: LoweringError; UsageError.
    """
    from ..lowering.int8_weights import Int8Program  # imports the registry of ops

    inputs, found = source.inputs, list[StoredProgram]()
    for program, plan in source.lower(pattern, _LOWERED_AS):
        made = Int8Program(program, LEAST)
        if not made.layers:
            continue
        rows = made.largest_batch(inputs.example, inputs.letter, ROWS)
        least, most = plan.batch
        most = rows if most is None or (rows is not None and rows < most) else most
        if most is not None and most < least:
            continue
        choices = {**plan.choices, **{n: NodeChoice("int8", _BECAUSE, True) for n in made.layers}}
        plan = replace(plan, batch=(least, most), choices=choices)
        found.append(StoredProgram(made.program, plan, int8=True))
    return found


def above(programs: Sequence[StoredProgram], small: Sequence[StoredProgram]) -> list[StoredProgram]:
    """Returns programs for the batches above those that others serve. small: the others."""
    if not small:
        return list(programs)
    limits = [s.plan.batch[1] for s in small]
    if None in limits:
        return []
    largest = max(most for most in limits if most is not None)
    found = []
    for stored in programs:
        least, most = stored.plan.batch
        if most is None or most > largest:
            plan = replace(stored.plan, batch=(max(least, largest + 1), most))
            found.append(replace(stored, plan=plan))
    return found
