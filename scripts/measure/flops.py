"""Compares the FLOP formulas of `widepack analyze` with torch's counter, for networks of a registry.

    python scripts/measure/flops.py --zoo ZOO --sample 60 -o bench/results/flops-zoo.json

ZOO is a folder that flop_networks.py can read. A formula is derived from a capture with a dynamic batch. It
is compared with `FlopCounterMode` at three batches that were not captured, on meta tensors, or on the CPU
where a network needs values. For ops that the counter does not see, flop_counts.py has formulas by hand. It
also finds the ops whose results reach no output, which the captured program does not have. Networks are taken
in the order of the sample until `--sample` of them are compared.

The costs of N members are compared with `shared + N * member`, where `shared` is what torch counts in ops
that read nothing of a weight. The costs of the wide program are compared with a count of the program that is
lowered for N members. N is 1, 3 and 100.

Every network runs in a process of its own. `--lines` names a file of rows, which a later run continues.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
from flop_counts import Count, counted
from flop_networks import Network, network, registry, sample
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from widepack import primitives as primitives  # fills the registry
from widepack.building.costs_file import facts_of
from widepack.building.model_costs import model_costs, model_preview
from widepack.costs.derive import derive_wide
from widepack_artifacts.costs import Costs
from widepack_bench.measure.roofline import work
from widepack_bench.report.environment import environment

MEMBERS = (1, 3, 100)
BATCHES = (1, 3, 7, 2, 5, 9)
"""Batches to try until three are in the domain of the formulas. No capture has one of them."""
WIDE = 8
"""The number of members that the wide program is planned for."""
COMMAND = "python scripts/measure/flops.py --zoo ZOO --sample {} -o bench/results/flops-zoo.json"
Row = dict[str, Any]
Emit = Callable[[Row], None]


def work_on(folder: Path, name: str, out: TextIO) -> None:
    """Compares one network in this process. Writes parts of its row as JSON lines."""
    begin = time.monotonic()

    def emit(part: Row) -> None:
        out.write(json.dumps({**part, "seconds": round(time.monotonic() - begin, 1)}) + "\n")
        out.flush()

    zoo = registry(folder)
    package = zoo.ENTRIES[name].package
    emit({"package": package, "version": metadata.version(package)})
    found = network(zoo, name)
    emit({"inputs": list(found.specs), "flattened": found.flattened})
    try:
        costs = model_costs(found.make, found.specs)
    except Exception as e:  # noqa: BLE001  # any reason is a result
        emit({"error": _text(e)})
        return
    emit({"formula": _formula(costs), "uncounted": dict(costs.uncounted), "domain": costs.domain()})
    at, refused = _compared(found, costs, zoo, name)
    emit({"at": at, "refused": refused})
    _compare_wide(found, costs, at, emit)


def _compared(found: Network, costs: Costs, zoo: Any, name: str) -> tuple[list[Row], dict[str, str]]:
    """Returns the FLOP at three batches, and why other batches were refused."""
    rows: list[Row] = []
    refused: dict[str, str] = {}
    module = found.member()
    for batch in BATCHES:
        if len(rows) == 3:
            break
        call = zoo.inputs(name, batch, 1)
        sizes = found.sizes(call)
        if reason := costs.outside(sizes):
            refused[str(batch)] = reason
            continue
        try:
            cpu = counted(module, call, "cpu")
        except Exception as e:  # noqa: BLE001  # the network itself refuses this batch
            refused[str(batch)] = _text(e)
            continue
        rows.append({"sizes": sizes, "ours": _flop(costs, sizes), "cpu": _count(cpu), "by_op": cpu.by_op})
        rows[-1]["batch"] = batch
    for row in rows:
        try:
            row["meta"] = _count(counted(module, zoo.inputs(name, row["batch"], 1), "meta"))
        except Exception as e:  # noqa: BLE001  # the network needs values
            row["meta"], row["no_meta"] = None, _text(e)
    return rows, refused


def _compare_wide(found: Network, costs: Costs, at: Sequence[Row], emit: Emit) -> None:
    """Emits the costs of N members, and of the wide program."""
    sizes = [row["sizes"] for row in at]
    table: list[Row] = [{"N": n, "members": [_flop(costs, s, n) for s in sizes]} for n in MEMBERS]
    emit({"wide": table})
    try:
        wide = model_costs(found.make, found.specs, wide=WIDE)
        emit({"wide_formula": _formula(wide)})
        preview, name = model_preview(found.make, found.specs)
        plan = preview.of(WIDE).plan()
        facts = facts_of(preview.captured, name)
        for row in table:
            program = preview.of(row["N"]).lowered(plan).program
            row["wide"] = [_flop(wide, s, row["N"]) for s in sizes]
            try:
                row["counted"] = [work(program, s).flop for s in sizes]
            except DynamicOutputShapeException:  # of sizes that are values, which need symbols
                same = derive_wide({1: program, 2: program}, facts)
                row["counted"] = [_flop(same, s) for s in sizes]
            emit({"wide": table})
    except Exception as e:  # noqa: BLE001  # any reason is a result
        emit({"wide_error": _text(e)})


def _flop(costs: Costs, sizes: Mapping[str, int], members: int = 1) -> int:
    return int(costs.at(costs.values(sizes, members=members))["flops"])


def _formula(costs: Costs) -> list[str]:
    return list(costs.totals.get("flops", ("0", "0")))


def _count(count: Count) -> Row:
    return {
        "torch": count.torch, "unseen": count.unseen, "unread": count.unread,
        "by_hand": count.by_hand, "shared": count.shared,
    }  # fmt: skip  # what torch counts, what it should not, the sum


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def outcome(row: Row) -> str:
    """Returns how a comparison ended.

    `torch`: equal to torch's counter. `hand`: equal with the ops by hand, and without those that no output
    reads. `differs`. `no`: not compared.
    """
    at = row.get("at") or []
    if len(at) < 3:
        return "no"
    for end, measure in (("torch", "torch"), ("hand", "by_hand")):
        if all(a["ours"] == (a["meta"] or a["cpu"])[measure] for a in at):
            return end
    return "differs"


def _why(row: Row) -> str:
    """Returns why torch's counter is not equal to the count by hand."""
    counts = [at["meta"] or at["cpu"] for at in row["at"]]
    ways = {"unseen": "ops that the counter does not see", "unread": "ops that no output reads"}
    return " and ".join(text for key, text in ways.items() if any(c[key] for c in counts))


def members_hold(row: Row) -> bool:
    """Whether the costs of N members are `shared + N * member` by torch's count. Raises: KeyError."""
    for line in row["wide"]:
        for at, ours in zip(row["at"], line["members"], strict=True):
            count = at["meta"] or at["cpu"]
            if ours != count["shared"] + line["N"] * (count["by_hand"] - count["shared"]):
                return False
    return True


def wide_holds(row: Row) -> bool | None:
    """Whether the formula of the wide program equals the count at all N; None if it was not compared."""
    table = row.get("wide") or [{}]
    if not all("counted" in line for line in table):
        return None
    return all(line["wide"] == line["counted"] for line in table)


def run(folder: Path, name: str, seconds: float) -> Row:
    """Compares one network in a child process. What it printed before a crash is kept."""
    words = [sys.executable, "-W", "ignore", __file__, "--zoo", str(folder), "--work", name]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    row: Row = {"name": name}
    try:
        child = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=seconds)
        text, code, last = child.stdout, child.returncode, child.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired as e:
        text, code, last = (e.stdout or b"").decode(), -1, [f"no end after {seconds:.0f} s"]
    for line in text.splitlines():
        row |= json.loads(line)
    if code:
        row["ended"] = last[0][:400] if last else f"the process ended with code {code}"
    return row


def summary(rows: Sequence[Row]) -> Row:
    """Returns the counts of a run."""
    ends = {row["name"]: outcome(row) for row in rows}
    compared = [row for row in rows if ends[row["name"]] != "no"]
    wide = {row["name"]: wide_holds(row) for row in compared}
    return {
        "tried": len(rows),
        "compared": len(compared),
        "calls": sum(len(row["at"]) for row in compared),
        "equal_to_torch": list(ends.values()).count("torch"),
        "equal_by_hand": {row["name"]: _why(row) for row in compared if ends[row["name"]] == "hand"},
        "differ": [name for name, end in ends.items() if end == "differs"],
        "on_meta": sum(all(at["meta"] for at in row["at"]) for row in compared),
        "lower_bounds": {row["name"]: row["uncounted"] for row in compared if row["uncounted"]},
        "members_equal": sum(map(members_hold, compared)),
        "members_differ": [row["name"] for row in compared if not members_hold(row)],
        "wide_equal": list(wide.values()).count(True),
        "wide_differ": [name for name, holds in wide.items() if holds is False],
        "wide_not_compared": {
            row["name"]: row.get("wide_error") or row.get("ended", "")
            for row in compared
            if wide[row["name"]] is None
        },
        "not_compared": {
            row["name"]: row.get("error") or row.get("ended") or "; ".join(row["refused"].values())
            for row in rows
            if ends[row["name"]] == "no"
        },
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--zoo", type=Path, required=True, help="the folder of a registry")
    parser.add_argument("--sample", type=int, default=60, help="the number of networks to compare")
    parser.add_argument("-o", "--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--lines", type=Path, help="a file of rows, which a later run continues")
    parser.add_argument("--only", default="", help="names of networks, separated by commas")
    parser.add_argument("--minutes", type=float, help="the time limit of this run; it then exits with 2")
    parser.add_argument("--seconds", type=float, default=300.0, help="the time limit of a network")
    parser.add_argument("--note", help="how the rows were made, where that was not in one run")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Compares the networks and writes the results. Returns the exit code: 1 if a count differs."""
    given = _options()
    if given.work:
        torch.set_num_threads(1)
        with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
            os.dup2(2, 1)  # packages print too
            work_on(given.zoo, given.work, out)
        return 0
    known: dict[str, Row] = {}
    if given.lines and given.lines.exists():
        lines = given.lines.read_text(encoding="utf-8").splitlines()
        known = {row["name"]: row for row in map(json.loads, lines)}
    rows: list[Row] = []
    begin = time.monotonic()
    for name in given.only.split(",") if given.only else sample(given.zoo):
        if sum(outcome(row) != "no" for row in rows) == given.sample:
            break
        if name not in known:
            if given.minutes and time.monotonic() - begin > 60 * given.minutes:
                return 2
            row = known[name] = run(given.zoo, name, given.seconds)
            print(f"{len(rows) + 1}: {name}: {outcome(row)}, wide {wide_holds(row)}", flush=True)
            if given.lines:
                with given.lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(known[name])
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if given.out:
        where = {**environment("cpu", 1), "command": COMMAND.format(given.sample)}
        note = {"note": given.note} if given.note else {}
        document = {"environment": where, **note, "summary": found, "rows": rows}
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(found["differ"] or found["members_differ"] or found["wide_differ"]))


if __name__ == "__main__":
    sys.exit(main())
