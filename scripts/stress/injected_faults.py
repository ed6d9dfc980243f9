"""Injects faults into wide programs and counts those that the comparison of a build accepts.

    python scripts/stress/injected_faults.py                     # writes bench/results/injected-faults.json
    python scripts/stress/injected_faults.py --seed 7 --seeds 1 --faults 50 --print

For every seed and network (tests/helpers/fault_networks.py) the wide program itself is compared: it has to
be accepted. Until `--faults` faults have counted, one fault of each kind (tests/helpers/faults.py) is
injected into it at a place that the seed chooses: it has to be refused. A fault counts if an output is off by
more than 8 times the member's own rms error, for inputs of the declared kind or for these with an offset of 3
or 10 times their spread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
OUT = ROOT / "bench" / "results" / "injected-faults.json"


class Counts:
    """What was found so far."""

    def __init__(self) -> None:
        self.right = 0
        self.networks: set[str] = set()
        self.refused_right: list[list[Any]] = []
        self.accepted_faults: list[list[Any]] = []
        self.kinds: Counter[str] = Counter()
        self.small: Counter[str] = Counter()

    def record(self, first: int, seeds: int, seconds: float) -> dict[str, Any]:
        return {
            "first_seed": first,
            "seeds": seeds,
            "networks": len(self.networks),
            "right_programs": self.right,
            "right_programs_refused": self.refused_right,
            "faults_that_count": self.kinds.total(),
            "faults_accepted": self.accepted_faults,
            "faults_by_kind": dict(sorted(self.kinds.items())),
            "faults_within_rounding": dict(sorted(self.small.items())),
            "minutes": round(seconds / 60, 1),
        }


def add(counts: Counts, network: str, seed: int, faults: int) -> None:
    """Compares the program of a network, and injects one fault of each kind while fewer have counted."""
    from faults import KINDS, Prepared, injected

    prepared = Prepared(network, seed)
    counts.right += 1
    counts.networks.add(network)
    if words := prepared.refused(prepared.program):
        counts.refused_right.append([network, seed, words])
        print(f"right program refused: {network}, seed {seed}: {words}", flush=True)
    for kind in KINDS if counts.kinds.total() < faults else ():
        outcome = injected(prepared, network, kind, seed)
        if outcome is None:
            continue
        (counts.kinds if outcome.counts else counts.small)[kind] += 1
        if outcome.counts and not outcome.refused:
            counts.accepted_faults.append([kind, network, seed, outcome.off])
            print(f"fault accepted: {kind}, {network}, seed {seed}, off by {outcome.off:.3g}", flush=True)


def main() -> int:
    """Runs the networks and writes the table. Returns 1 if a comparison decided wrongly."""
    import torch

    torch.set_num_threads(1)
    from fault_networks import NETWORKS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--faults", type=int, default=300, help="how many faults have to count")
    parser.add_argument("--minutes", type=float, default=1e9, help="writes what was found after so long")
    parser.add_argument("--print", action="store_true", help="prints the table and writes no file")
    args = parser.parse_args()
    start, counts = time.monotonic(), Counts()
    for seed in range(args.seed, args.seed + args.seeds):
        for network in NETWORKS:
            if time.monotonic() - start < 60 * args.minutes:
                add(counts, network, seed, args.faults)
    text = json.dumps(counts.record(args.seed, args.seeds, time.monotonic() - start), indent=1)
    print(text) if args.print else OUT.write_text(text + "\n")
    return 1 if counts.refused_right or counts.accepted_faults else 0


if __name__ == "__main__":
    sys.exit(main())
