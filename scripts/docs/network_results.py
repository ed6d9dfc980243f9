"""Writes the results of networks and layers: the suites, training, layers and blocks, predicted times."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from results import part, ratio, rows_of, table, where
from widepack_bench.layers import table as layer_table
from widepack_bench.models.factory import factory_of
from widepack_bench.suite import table as suite_table
from widepack_bench.suite.rows import ROWS, Form, SuiteRow
from widepack_bench.text import duration
from widepack_bench.training.table import summary as training_summary
from widepack_bench.training.table import training_table

TUNED_COLUMNS = (
    "network", "N", "batch", "default", "tuned", "fastest baseline", "over the loop", "default ratio",
    "tuned ratio", "roofline", "verdict",
)  # fmt: skip
TRAINING_COLUMNS = (
    "network", "N", "batch", "widepack", "compiled", "fastest baseline", "over the loop", "ratio",
    "compiled ratio",
)  # fmt: skip


def _lines_as_list(text: str) -> str:
    """Returns a table and the lines below it. The lines form a list, so Markdown does not join them."""
    rows, _, notes = text.partition("\n\n")
    return rows + "\n\n" + "\n".join(f"- {line}" for line in notes.splitlines() if line)


def _reference(rows: Any) -> str:
    return _lines_as_list(suite_table.reference_table(rows))


def _suite(document: Any, threads: int) -> str:
    ending = f", {threads} thread" + ("" if threads == 1 else "s")
    return _reference({k: row for k, row in document["rows"].items() if k.endswith(ending)})


@part("suite-sizes", "suite-cpu", place=False)
def suite_sizes(_: Any) -> str:
    """Returns the sizes of all networks of the suite, one row for each."""
    lines = {
        (
            row.title,
            _arguments(row, row.forms[0]),
            _input(row.forms[0]),
            f"{parameters(row, row.forms[0]):,}",
            f"{parameters(row, row.forms[1]):,}, {_input(row.forms[1])}",
        ): None
        for row in ROWS
    }
    return table("network | sizes for a CPU | input of one sample | parameters of a member | in full", lines)


def parameters(row: SuiteRow, form: Form) -> int:
    """Returns the number of parameters of one member."""
    with torch.device("meta"):
        return sum(p.numel() for p in factory_of(row.model)(**form.options).parameters())


def _arguments(row: SuiteRow, form: Form) -> str:
    """Returns all arguments of the factory with their values: width, depth, heads and others."""
    given = inspect.signature(factory_of(row.model)).parameters.items()
    values = {name: form.options.get(name, parameter.default) for name, parameter in given}
    return ", ".join(f"{name} {value}" for name, value in values.items() if not isinstance(value, bool))


def _input(form: Form) -> str:
    """Returns the sizes of a sample: `3x32x32` of `x=float32[B,3,32,32]`."""
    return "x".join(form.inputs[0].partition("[")[2].partition("]")[0].split(",")[1:])


def _tuned(document: Any) -> dict[str, Any]:
    """Returns the rows of one thread that were tuned, or skipped because the loop takes too long."""

    def is_tuned(row: Mapping[str, Any]) -> bool:
        return suite_table.TUNED in row["result"]["others"] if "result" in row else "skipped" in row

    rows = document["rows"].items()
    return {k: r for k, r in rows if r["threads"] == 1 and r["pattern"] == "shared" and is_tuned(r)}


def _with_notes(rows: Any, columns: tuple[str, ...]) -> str:
    notes = "\n".join(f"- {line}" for line in suite_table.notes(rows))
    return f"{suite_table.table(rows, columns)}\n\n{notes}"


@part("blocks", "blocks-cpu")
def blocks(document: Any) -> str:
    summary = document["summary"]
    rows = (
        (key.split(",")[0].removeprefix("block:"), ratio(row["ratio"]), row["verdict"])
        for key, row in document["rows"].items()
    )
    return (
        f"{summary['holds']} of {summary['measured']} blocks hold. The geometric mean of the ratios to the "
        f"fastest baseline is {summary['geometric_mean']:.2f}.\n\n{table('block | ratio | verdict', rows)}"
    )


@part("training", "training-cpu", place=False)
def training(document: Any) -> str:
    """Returns the rows of the suite `training`, and the summary."""
    totals = training_summary(document["rows"])
    fastest, plain, loop = (totals[name] for name in ("over_fastest", "over_uncompiled", "over_loop"))
    left_out = ", ".join(totals["not_measured"])
    noisy = f", without noisy ones ({left_out})" if left_out else ""
    place = where(next(r["environment"] for r in rows_of(document) if "environment" in r))
    return (
        f"{training_table(document['rows'], TRAINING_COLUMNS)}\n\n"
        f"{fastest['rows']} rows are counted{noisy}. Geometric means: the fused module is "
        f"{loop['geometric_mean']:.2f} times as fast as the loop, and {plain['geometric_mean']:.2f} times as "
        "fast as the fastest baseline without compilation. The faster of it and its compiled form is "
        f"{fastest['geometric_mean']:.2f} times as fast as the fastest of all baselines. Slower than that "
        f"baseline: {', '.join(fastest['below']) or 'none'}. {place}"
    )


SETS = {
    "all": "all",
    "suite": "rows of the suite",
    "known": "other configurations",
    "drawn": "configurations drawn afterwards",
}


@part("as-built", "as-built-cpu", "scripts/measure/as_built.py", place=False)
def as_built(document: Any) -> str:
    """Returns the rows of artifacts as built over the fastest alternative, and the summary."""
    rows = rows_of(document)
    lines = [
        (
            row["network"],
            row["members"],
            row["batch"],
            row["threads"],
            row["call"],
            duration(row["ms"]["widepack"]),
            f"{row['fastest']}, {duration(row['ms'][row['fastest']])}",
            ratio(row["ratio"], row["valid"]),
            ratio(row["over_loop"]),
        )
        for row in rows
    ]
    s, clocks = document["summary"]["all"], {row["clock"] for row in rows}
    head = "network | N | batch | threads | call | as built | fastest alternative | ratio | over the loop"
    by_processor = "The times are those of the processor. "
    unmeasured = sorted({n for r in rows for n, why in r["left_out"].items() if "option" in why})
    without = f"Not measured: {', '.join(unmeasured)}. " if unmeasured else ""
    counts = f"{s['at_least_0.97']:.0%} are at 0.97 or more, {s['below_0.92']} below 0.92"
    return (
        f"{table(head, lines)}\n\n{s['rows']} rows, of which {s['valid']} are valid. Geometric mean "
        f"{s['geometric_mean']:.2f}, least {s['least']:.2f}; {counts}; {s['over_loop_below_1']} are slower "
        "than the loop. Over the fastest alternative without ONNX Runtime the geometric mean is "
        f"{s['over_torch_geometric_mean']:.2f}. {by_processor if 'cpu' in clocks else ''}"
        f"{without}{where(document['environment'])}"
    )


@part("predictions", "predictions-cpu", "scripts/measure/predictions.py")
def predictions(document: Any) -> str:
    """Returns how well speed-ups over the members' modules are predicted."""
    keys = ("geometric_error", "largest_error", "noise_geometric_error", "time_geometric_error")
    rows = []
    for key, title in SETS.items():
        s = document["summary"][key]
        error, largest, noise, of_times = (f"{s[k]:.2f}x" for k in keys)
        start = (title, s["configurations"], f"{s['spearman']:.2f}")
        rows.append((*start, error, largest, s["within_1.5"], noise, of_times))
    return table(
        "networks | number | Spearman | error of speed-ups | most | within 1.5x | noise | error of times",
        rows,
    )


for name, document, write in (
    ("suite-one-thread", "suite-cpu", lambda found: _suite(found, 1)),
    ("suite-two-threads", "suite-cpu", lambda found: _suite(found, 2)),
    ("suite-bfloat16", "suite-bfloat16-cpu", lambda found: _reference(found["rows"])),
    ("suite-bfloat16-tuned", "suite-bfloat16-tuned-cpu", lambda found: _reference(found["rows"])),
    ("real-tuned", "real-cpu", lambda found: _with_notes(_tuned(found), TUNED_COLUMNS)),
    ("layers", "primitives-cpu", lambda found: _lines_as_list(layer_table.markdown(found))),
):
    part(name, document, place=False)(write)
