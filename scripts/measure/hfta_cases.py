#!/usr/bin/env python3
"""Runs the cases of HFTA's operator and optimizer tests through widepack, and writes how each case ends.

    taskset -c 1 python scripts/measure/hfta_cases.py                   # all; writes the document
    python scripts/measure/hfta_cases.py --only Conv2d,StepLR --print   # cases by their first letters
    python scripts/measure/hfta_cases.py --lines outcomes.jsonl         # goes on where a run was cut off

HFTA (UofT-EcoSystem/hfta) fuses N models for training. Its tests compare its operators and optimizers with
those of torch, for a grid of options (scripts/measure/hfta_grids.py). Here each case of the grids is what it
means there: the same layer with the same options and sizes, for the same number of members, with weights and
inputs of each member's own; or the same optimizer with the same options for each member.

| cases | compared with each member alone |
|---|---|
| layers (scripts/measure/hfta_layers.py) | `widepack.fuse` with and without gradients, and the wide layer |
| Dropout2d (scripts/measure/hfta_dropout.py) | the distribution of the masks, gradients, seeds, eval mode |
| optimizers, StepLR (scripts/measure/hfta_optimizers.py) | weights and rates after a training, two dtypes |

The bound is that of `scripts/stress/database_check.py`, against the member in float64. A case is right if
all its ways are right. `apart` are the cases that are not run: those of the grids that need a CUDA device.
`beyond` are the cases with the gradient of a weight that is out of this bound, but within 32 ulp of its
largest number: a sum that the kernel of many members adds in another order than that of one member. In
float64, whose reference is no more exact, any gradient may be one. These cases do not count as right.
`mixed` counts random combinations of the values of a grid, which HFTA's tests do not have. `smaller` names
the cases whose batch or channels are reduced, to at most 2**18 numbers of input for each member.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "stress"))

import hfta_layers
import hfta_optimizers
import torch
from database_check import Outcome, outcome_of
from hfta_dropout import outcome_of_dropout
from hfta_grids import LAYERS, OPTIMIZERS, Options, cases

OUT = Path(__file__).resolve().parents[2] / "bench" / "results" / "hfta-cases.json"
FAMILIES = (*LAYERS, *OPTIMIZERS)
OUTCOMES = ("right", "beyond", "wrong", "refused", "crash", "apart")
ULPS = 32  # as in tests/helpers/oracle.py: sums in another order
SEVERITY = ("crash", "wrong", "refused", "beyond", "apart")


@dataclass(frozen=True)
class Entry:
    """One case.

    Attributes:
        key: Its name: the family, and the option that differs from the defaults.
        family: The layer or the optimizer.
        ways: The ways in which it runs.
        run: Runs it in one way.
        smaller: Which sizes were reduced, or "".
    """

    key: str
    family: str
    ways: tuple[str, ...]
    run: Callable[[str], Outcome]
    smaller: str = ""


def entries(family: str) -> Iterator[Entry]:
    """Yields the cases of a family."""
    if family in OPTIMIZERS:
        for key, training in hfta_optimizers.trainings(family):
            yield Entry(
                key,
                family,
                hfta_optimizers.WAYS,
                partial(hfta_optimizers.outcome_of_training, training),
            )
        return
    given = {f"{family}/{name}": options for name, options in cases(LAYERS[family])}
    for key, options in hfta_layers.layer_cases(family):
        before = given.get(key, options)
        changes = [f"{k} {options[k]} in place of {before[k]}" for k in options if options[k] != before[k]]
        run = partial(_outcome_of_layer, key, family, options)
        yield Entry(key, family, hfta_layers.WAYS, run, ", ".join(changes))


def _outcome_of_layer(key: str, family: str, options: Options, way: str) -> Outcome:
    if options["device"] != "cpu":
        return Outcome("apart", f"needs a device {options['device']}")
    if family == "Dropout2d":
        return outcome_of_dropout(options, way)
    through = partial(hfta_layers.through, way)
    outcome = outcome_of(partial(hfta_layers.make_case, key, family, options, way), through)
    if outcome.name == "wrong" and "gradient of " in outcome.why:
        accepted = outcome_of(partial(hfta_layers.make_case, key, family, options, way, ULPS), through)
        return Outcome("beyond", outcome.why) if accepted.name == "right" else accepted
    return outcome


def outcome_of_entry(entry: Entry) -> Outcome:
    """Runs a case in all its ways. The worst of the outcomes is the case's."""
    outcomes = {way: entry.run(way) for way in entry.ways}
    for name in SEVERITY:
        found = [f"{way}: {o.why}" for way, o in outcomes.items() if o.name == name]
        if found:
            return Outcome(name, "; ".join(found))
    return Outcome("right")


def table(found: Mapping[str, tuple[Entry, Outcome]]) -> dict[str, Any]:
    """Returns the counts and the exceptions of a run, as the document has them."""
    counts: dict[str, dict[str, dict[str, int]]] = {"counts": {}, "mixed": {}}
    for key, (entry, outcome) in found.items():
        group = "mixed" if key.startswith(f"{entry.family}/mixed ") else "counts"
        row = counts[group].setdefault(entry.family, {"cases": 0, **dict.fromkeys(OUTCOMES, 0)})
        row["cases"] += 1
        row[outcome.name] += 1
    exceptions: dict[str, dict[str, str]] = {name: {} for name in OUTCOMES[1:]}
    for key, (_, outcome) in found.items():
        if outcome.name != "right":
            exceptions[outcome.name][key] = outcome.why
    reduced = {key: entry.smaller for key, (entry, _) in found.items() if entry.smaller}
    return {**counts, **exceptions, "smaller": reduced}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases. Returns the exit code: 1 if a case is wrong or crashed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    parser.add_argument("--only", default="", help="beginnings of cases, separated by commas: Conv2d/stride")
    parser.add_argument("--lines", type=Path, help="a file of outcomes, which a later run continues")
    parser.add_argument("--print", action="store_true", help="print the outcomes and write no document")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, tuple[Entry, Outcome]] = {}
    done: dict[str, Outcome] = {}
    if given.lines and given.lines.exists():
        rows = map(json.loads, given.lines.read_text(encoding="utf-8").splitlines())
        done = {key: Outcome(*outcome) for key, *outcome in rows}
    for entry in (e for family in FAMILIES for e in entries(family)):
        if entry.key.startswith(tuple(given.only.split(","))):
            outcome = done.get(entry.key) or outcome_of_entry(entry)
            found[entry.key] = entry, outcome
            if given.lines and entry.key not in done:
                with given.lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([entry.key, outcome.name, outcome.why]) + "\n")
            if given.print or outcome.name not in ("right", "apart"):
                print(f"{entry.key}: {outcome.name}: {outcome.why}", flush=True)
    document = table(found)
    print(json.dumps({k: document[k] for k in ("counts", "mixed")}, indent=1))
    if not given.print:
        from widepack_bench.report.environment import environment

        what = {"what": __doc__, "environment": environment("cpu", 1)}
        given.out.write_text(json.dumps({**what, **document}, indent=1) + "\n", encoding="utf-8")
    return int(any(document[name] for name in ("wrong", "crash")))


if __name__ == "__main__":
    sys.exit(main())
