#!/usr/bin/env python3
"""Compares random calls of `ens.route` with each row's member alone in float64, over the twelve networks of
the tests.

    python scripts/stress/route_calls.py [--calls 10000] [--seed 0] [-o bench/results/route-calls.json]

Each call has 1 to 16 rows of random members: any, few, one, or in order. Before each fiftieth call of a
network a member is swapped. An answer is right if its error is at most 4 times the largest error of the
members alone in their own dtype, and 32 units in the last place of the largest number. After each twentieth
call a row is replaced by that of another draw, and by NaN: no bit of another row may change.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from support import double, leaves, run  # noqa: E402

import cases  # noqa: E402

LARGEST = 16
SWAP_EVERY = 50
CHANGE_EVERY = 20


@dataclass
class Found:
    """What the calls of one network gave. worst: the largest error over its bound."""

    network: str
    members: int
    calls: int = 0
    rows: int = 0
    swaps: int = 0
    changed_rows: int = 0
    nan_rows: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


def rows_of(value: Any, rows: list[int], batch: int) -> Any:
    """Returns some rows of arguments; what has no row for each answer stays."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {k: rows_of(v, rows, batch) for k, v in value.items()}
    return type(value)(rows_of(v, rows, batch) for v in value) if isinstance(value, (tuple, list)) else value


def with_row(call: Any, row: int, batch: int, other: Any) -> Any:
    """Returns a call with one row of another call, or of NaN if there is none.

    None if no input has floating numbers for each row.
    """
    changed = pytree.tree_map_only(Tensor, torch.clone, call)
    places = [t for t in pytree.tree_leaves(changed) if isinstance(t, Tensor)]
    values = places if other is None else [t for t in pytree.tree_leaves(other) if isinstance(t, Tensor)]
    done = False
    for place, value in zip(places, values, strict=True):
        if place.dim() and place.shape[0] == batch and (other is not None or place.is_floating_point()):
            place[row] = torch.nan if other is None else value[row]
            done = True
    return changed if done else None


def chosen(draw: random.Random, members: int, rows: int) -> list[int]:
    """Returns a member for each row."""
    kind = draw.choice(("any", "few", "one", "ordered"))
    if kind == "one":
        return [draw.randrange(members)] * rows
    among = draw.sample(range(members), min(2, members)) if kind == "few" else range(members)
    found = [draw.choice(list(among)) for _ in range(rows)]
    return sorted(found) if kind == "ordered" else found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


class Network:
    """One network with its members, in their own dtype and in float64."""

    def __init__(self, name: str, folder: Path, draw: random.Random) -> None:
        self.case, self.draw, self.folder = cases.load(name), draw, folder
        self.members: list[nn.Module] = [self.case.member(i) for i in range(self.case.N)]
        self.exact = [copy.deepcopy(m).double() for m in self.members]
        states = [m.state_dict() for m in self.members]
        self.own = {n for n, w in states[0].items() if not all(_equal(w, s[n]) for s in states)}
        paths = cases.write_checkpoints(name, folder)
        options: dict[str, Any] = {"pt2": False, "race": False, "force": True}
        widepack.build(paths, folder / "e.wide", model=self.case.model, inputs=self.case.INPUTS, **options)
        self.ens = widepack.load(folder / "e.wide")
        self.found = Found(name, len(self.members))

    def call(self, number: int) -> None:
        """Runs and checks one call."""
        if number % SWAP_EVERY == SWAP_EVERY - 1:
            self._swap()
        batch = self.draw.randint(1, LARGEST)
        args, kwargs = self.case.sample(batch, self.draw.randrange(10**6))
        ids = chosen(self.draw, len(self.members), batch)
        answer = self._leaves(self.ens.route(*args, member=ids, **kwargs))
        self._check(answer, args, kwargs, ids)
        self.found.calls += 1
        self.found.rows += batch
        if number % CHANGE_EVERY == 0 and batch > 1:
            self._check_isolation(answer, args, kwargs, ids)

    def _swap(self) -> None:
        """Replaces a member by another one with changed weights."""
        place = self.draw.randrange(len(self.members))
        new = copy.deepcopy(self.members[place])
        torch.manual_seed(self.draw.randrange(10**6))
        with torch.no_grad():
            for name, weight in new.named_parameters():
                if name in self.own:
                    weight.add_(0.01 * torch.randn_like(weight))
        torch.save(new.state_dict(), self.folder / "new.pt")
        self.ens.swap(place, self.folder / "new.pt")
        self.members[place], self.exact[place] = new, copy.deepcopy(new).double()
        self.found.swaps += 1

    def _check(self, answer: Sequence[Any], args: Any, kwargs: Any, ids: list[int]) -> None:
        """Compares every row with its member alone."""
        own, exact = [], []
        for row, i in enumerate(ids):
            one = rows_of(args, [row], len(ids)), rows_of(kwargs, [row], len(ids))
            own.append(leaves(run(self.members[i], *one)))
            exact.append(leaves(run(self.exact[i], double(one[0]), double(one[1]))))
        for k, leaf in enumerate(answer):
            truths = [e[k][0] for e in exact]
            if not truths[0].is_floating_point():
                continue  # near ties may have another index
            errors = [float((o[k][0].double() - t).abs().max()) for o, t in zip(own, truths)]
            scale = max(float(t.abs().max()) for t in truths)
            bound = 4 * max(errors) + 32 * torch.finfo(torch.float32).eps * scale
            for row, truth in enumerate(truths):
                error = float((leaf[row].double() - truth).abs().max())
                self.found.worst = max(self.found.worst, error / bound)
                if not error <= bound:
                    self.found.wrong.append(f"leaf {k}, row {row} of {ids}: {error:.3g} over {bound:.3g}")

    def _check_isolation(self, answer: Sequence[Any], args: Any, kwargs: Any, ids: list[int]) -> None:
        """Replaces a row by that of another draw and by NaN, and compares the bits of all other rows."""
        row, batch = self.draw.randrange(len(ids)), len(ids)
        other = self.case.sample(batch, self.draw.randrange(10**6))
        self._compare(answer, with_row((args, kwargs), row, batch, other), row, ids, "another draw")
        self.found.changed_rows += 1
        ill = with_row((args, kwargs), row, batch, None)
        if ill is not None:
            self._compare(answer, ill, row, ids, "NaN")
            self.found.nan_rows += 1

    def _compare(self, answer: Sequence[Any], call: Any, row: int, ids: list[int], what: str) -> None:
        """Compares the bits of all rows but one with those of a changed call."""
        found = self._leaves(self.ens.route(*call[0], member=ids, **call[1]))
        for k, (a, b) in enumerate(zip(answer, found, strict=True)):
            if any(not torch.equal(a[r], b[r]) for r in range(len(ids)) if r != row):
                self.found.wrong.append(f"leaf {k}: {what} in row {row} of {ids} changes another row")

    @staticmethod
    def _leaves(value: Any) -> list[Any]:
        """Returns the leaves; a leaf of ragged answers is a list of one tensor for each row."""
        return [value] if isinstance(value, list) else list(leaves(value))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/route-calls.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, found, began = random.Random(options.seed), [], time.perf_counter()
    for number, name in enumerate(cases.NAMES):
        calls = options.calls * (number + 1) // len(cases.NAMES) - options.calls * number // len(cases.NAMES)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            network = Network(name, Path(folder), draw)
            for k in range(calls):
                network.call(k)
        found.append(network.found)
        wrong = f"{len(network.found.wrong)} wrong"
        print(f"{name}: {calls} calls, worst {network.found.worst:.2f} of the bound, {wrong}", flush=True)
    document = {
        "what": "random calls of ens.route, each row against its member alone in float64",
        "environment": environment("cpu", 1),
        "seed": options.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "calls": sum(f.calls for f in found),
        "rows": sum(f.rows for f in found),
        "swaps": sum(f.swaps for f in found),
        "changed_rows": sum(f.changed_rows for f in found),
        "nan_rows": sum(f.nan_rows for f in found),
        "wrong": sum(len(f.wrong) for f in found),
        "networks": [{**asdict(f), "wrong": f.wrong[:20]} for f in found],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(f.wrong for f in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
