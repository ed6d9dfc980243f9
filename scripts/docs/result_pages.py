"""Writes the numbers of README.md and docs/ from the measurements in bench/results/*.json.

    python scripts/docs/result_pages.py            # writes them into the pages
    python scripts/docs/result_pages.py --check    # exit code 1 if a page is not up to date

A page marks the place of a generated part with its name:

    <!-- generated: suite -->
    ...
    <!-- end of generated -->

`PARTS` has one function for each name. Nobody types a measured number into a page.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import advice_results
import backend_results
import cascade_results
import database_results
import device_results
import fleet_results
import flop_results
import hfta_results
import int8_results
import layer_results
import predict_results
import real_results
import reduce_results
import route_results
import serve_results
import suite_sizes
import training_results
import version_results
import zoo_results

from results import ROOT, read, where
from widepack_bench.layers import table as layer_table
from widepack_bench.suite import table as suite_table

PAGES = (
    "docs/how-to/select-and-cascade.md",
    "docs/how-to/reduce.md",
    "docs/how-to/load-in-another-dtype.md",
    "docs/how-to/predict.md",
    "README.md",
    "docs/results/networks.md",
    "docs/results/layers.md",
    "docs/results/architectures.md",
    "docs/results/service.md",
    "docs/results/fleets.md",
    "docs/results/costs.md",
    "docs/results/training.md",
    "docs/results/devices.md",
    "docs/explanation/publishing.md",
    "docs/how-to/migrate.md",
)
MARK = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end of generated -->)", re.DOTALL)


def filled(text: str) -> str:
    """Returns the text of a page with all generated parts updated."""
    return MARK.sub(lambda m: f"{m[1]}{PARTS[m[2]]().rstrip()}\n{m[4]}", text)


def _suite(threads: int) -> str:
    document = read("suite-cpu")
    ending = f", {threads} thread" + ("" if threads == 1 else "s")
    rows = {key: row for key, row in document["rows"].items() if key.endswith(ending)}
    return suite_table.table({**document, "rows": rows, "summary": suite_table.summary(rows)})


def _lines_as_list(text: str) -> str:
    """Returns a table and the lines below it. The lines form a list, so Markdown does not join them."""
    rows, _, notes = text.partition("\n\n")
    return rows + "\n\n" + "\n".join(f"- {line}" for line in notes.splitlines() if line)


def suite_one_thread() -> str:
    return _lines_as_list(_suite(1))


def suite_two_threads() -> str:
    return _lines_as_list(_suite(2))


def suite_bfloat16() -> str:
    return _lines_as_list(suite_table.table(read("suite-bfloat16-cpu")))


def suite_bfloat16_tuned() -> str:
    return _lines_as_list(suite_table.table(read("suite-bfloat16-tuned-cpu")))


def layers() -> str:
    return _lines_as_list(layer_table.markdown(read("primitives-cpu")))


def blocks() -> str:
    document = read("blocks-cpu")
    summary = document["summary"]
    lines = [
        f"{summary['holds']} of {summary['measured']} blocks hold. The geometric mean of the "
        "ratios to the fastest "
        f"baseline is {summary['geometric_mean']:.2f}.",
        "",
        "| block | ratio | verdict |",
        "|---|---|---|",
    ]
    for key, row in document["rows"].items():
        ratio = row["ratio"]
        lines.append(
            f"| {key.split(',')[0].removeprefix('block:')} | {ratio['value']:.2f} "
            f"[{ratio['low']:.2f}, {ratio['high']:.2f}] | {row['verdict']} |"
        )
    return "\n".join([*lines, "", where(document["environment"])])


def _value(interval: Mapping[str, Any], unit: float = 1.0, form: str = ".2f") -> str:
    value, low, high = (interval[key] / unit for key in ("value", "low", "high"))
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def call_overhead() -> str:
    document = read("call-overhead-cpu")
    lines = ["| call | beyond the bare graph, us |", "|---|---|"]
    lines += [
        f"| `{name}` | {_value(row['over_us'], form='.1f')} |" for name, row in document["rows"].items()
    ]
    return "\n".join([*lines, "", where(document["environment"])])


def first_answer() -> str:
    document = read("first-answer-cpu")
    lines = ["| process | to its first answer, beyond `import torch`, s |", "|---|---|"]
    lines += [
        f"| {name} | {_value(row['beyond_torch_ms'], 1000)} |" for name, row in document["rows"].items()
    ]
    size = document["weights_bytes"] / 1e6
    return "\n".join([*lines, "", f"{size:.0f} MB of weights. {where(document['environment'])}"])


def load_1gb() -> str:
    document = read("load-1gb-cpu")
    loads = [row for row in document["loads"] if row["prologue"] == "on"]
    first = [row["load_s"] for row in loads if row["probe"] == "run"]
    later = [row["load_s"] for row in loads if row["probe"] != "run"]
    share = max(row["anon_share_of_weights"] for row in document["loads"])
    return "\n".join(
        [
            f"- An artifact of {document['weights_bytes'] / 1e9:.2f} GB loads in "
            f"{statistics.median(later):.2f} s beyond "
            f"`import torch`, and in {statistics.median(first):.2f} s the first time, when it "
            "runs the probe.",
            f"- The load takes {share:.1%} of the weights' size in private memory: the "
            "weights stay in the mapped file.",
            f"- `widepack --help` takes {statistics.median(document['help_s']):.2f} s, `widepack inspect` "
            f"{statistics.median(document['inspect_s']):.2f} s.",
            "",
            where(document["environment"]),
        ]
    )


def build_memory() -> str:
    lines = [
        "| members | MB each | limit, MB | private memory above the start, MB | all "
        "stages, s | stacking over `cp` |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in read("build-memory-cpu")["rows"].items():
        speed = f"{row['stacking_of_cp_speed']:.2f}" if "stacking_of_cp_speed" in row else ""
        lines.append(
            f"| {row['members']} ({name.split(',')[0]}) | {row['member_mb']} | {row['limit_mb'] or ''} "
            f"| {row['private_above_base_mb']['peak']:.0f} | {sum(row['seconds'].values()):.0f} | {speed} |"
        )
    return "\n".join(lines)


def subset() -> str:
    document = read("subset-cpu")
    lines = [
        f"| members of {document['members']} | their share | read from the disk |",
        "|---|---|---|",
    ]
    for row in document["rows"]:
        names = (
            ", ".join(map(str, row["members"]))
            if len(row["members"]) < 4
            else f"{len(row['members'])} members, spread"
        )
        lines.append(f"| {names} | {row['expected']:.2%} | {row['part']:.2%} |")
    return "\n".join([*lines, "", where(document["environment"])])


def swaps() -> str:
    document = read("swap-cpu")
    calls, pause, copy, wait = (document[key] for key in ("calls_ms", "pause_ms", "copy_ms", "wait_ms"))
    return "\n".join(
        [
            f"{document['members']} members of a residual MLP of {document['layers']} layers; "
            f"{document['calls']:,} calls of "
            f"{document['threads']} threads during {document['swaps']} swaps, on "
            f"{document['environment']['cpus']} cores.",
            "",
            f"- Answers that were not completely of one version of each member: {document['torn']}.",
            f"- p99 of the calls: {calls['with']['p99']:.0f} ms; without swaps "
            f"{calls['without']['p99']:.0f} ms.",
            f"- The pause: {pause['p50']:.1f} ms in the median, of which {copy['p50']:.1f} ms is for writing "
            f"{document['bytes_a_swap'] / 1e6:.1f} MB.",
            f"- The longest pause: {pause['most']:.1f} ms; in the longest wait, running calls "
            f"took {wait['most']:.1f} ms to end.",
            "",
            where(document["environment"]),
        ]
    )


def kills() -> str:
    document = read("kills")
    random, steps = document["random"], document["steps"]
    bad = random["damaged_or_missing"] + steps["damaged_or_missing"]
    left = random["litter_left_by_the_next_writer"] + steps["litter_left_by_the_next_writer"]
    return "\n".join(
        [
            f"This was tested with {random['killed']} SIGKILLs at random moments of first "
            "builds, builds, updates and appends,",
            f"and with {steps['killed']} more, one before each step that these take in the "
            "folder. Artifacts that were damaged or",
            f"missing afterwards: {bad}. Files that the next writer did not remove: {left}.",
        ]
    )


def fuzz() -> str:
    runs = read("fuzz")
    lines = ["| mode | damaged artifacts | refused | loaded | other outcomes |", "|---|---|---|---|---|"]
    for run in runs:
        outcomes: dict[str, int] = dict(run["outcomes"])
        refused = outcomes.pop("refused", 0)
        loaded = outcomes.pop("loaded", 0) + outcomes.pop("same", 0)
        rest = ", ".join(f"{name} {count}" for name, count in outcomes.items())
        lines.append(
            f"| {run['mode']}, seed {run['seed']} | {run['cases']:,} | {refused:,} | "
            f"{loaded:,} | {rest or 'none'} |"
        )
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "real-rows": real_results.readme,
    "real-default": real_results.default,
    "real-tuned": real_results.tuned,
    "cascade": cascade_results.table,
    "reduce": reduce_results.table,
    "int8": int8_results.table,
    "predict": predict_results.predict,
    "suite-sizes": suite_sizes.table,
    "suite-one-thread": suite_one_thread,
    "suite-two-threads": suite_two_threads,
    "suite-bfloat16": suite_bfloat16,
    "suite-bfloat16-tuned": suite_bfloat16_tuned,
    "layers": layers,
    "blocks": blocks,
    "zoo": zoo_results.zoo,
    "backends": backend_results.table,
    "unseen": zoo_results.unseen,
    "zoo-onnx": zoo_results.zoo_onnx,
    "torch-databases": database_results.table,
    "hfta-cases": hfta_results.table,
    "versions": version_results.table,
    "zoo-default": zoo_results.zoo_default,
    "zoo-rows": zoo_results.zoo_rows,
    "call-overhead": call_overhead,
    "first-answer": first_answer,
    "load-1gb": load_1gb,
    "build-memory": build_memory,
    "subset": subset,
    "route": route_results.route,
    "route-suite": route_results.suite,
    "served": serve_results.served,
    "serve-peers": serve_results.peers,
    "serve-limits": serve_results.limits,
    "swaps": swaps,
    **fleet_results.PARTS,
    **device_results.PARTS,
    **flop_results.PARTS,
    **advice_results.PARTS,
    **layer_results.PARTS,
    **training_results.PARTS,
    "kills": kills,
    "fuzz": fuzz,
}


def stale() -> list[str]:
    """Returns the pages whose generated parts differ from bench/results."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    return [page for page, text in texts.items() if filled(text) != text]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page is not up to date"
    )
    check = parser.parse_args(arguments).check
    pages = stale()
    for page in pages:
        print(f"{page}: {'not up to date; run scripts/docs/result_pages.py' if check else 'written'}")
        if not check:
            path = ROOT / page
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    return int(check and bool(pages))


if __name__ == "__main__":
    sys.exit(main())
