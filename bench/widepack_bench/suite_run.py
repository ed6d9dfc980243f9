"""The suite: reference networks with random weights, each row built, loaded and compared with the baselines in a process of its own.

One JSON document, written after every row, so that a run that was stopped goes on: a row that is there, and was not refused as noisy, is not run again.
Nothing is trained. `python -m widepack_bench.suite_run` is what a row's process runs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from widepack.errors import UsageError, WidepackError

from .suite_rows import SuiteRow, chosen
from .text import duration

FORMAT = "widepack.suite/1"
BY_HAND = "trunk shared by hand"
AGAIN_S = 1800.0  # of measuring a plan again
BELOW = 0.9  # a row under it is no near miss
Progress = Callable[[str, int, int], None]


def run_suite(
    size: str,
    out: Path,
    *,
    names: Sequence[str] = (),
    progress: Progress | None = None,
    said: Callable[[str], object] | None = print,
    **options: Any,
) -> dict[str, Any]:
    """Run the rows that `out` does not hold yet, each in a process of its own, and say the table.

    size: `cpu` or `full`. out: the document, gone on with where it exists. options: of `run_row`. Returns: the document. Raises: UsageError.
    """
    rows = chosen(names)
    document = _read(out, size)
    for number, row in enumerate(rows):
        key = key_of(row, options.get("threads", 1))
        if not wanted(document["rows"].get(key)):
            continue
        if progress:
            progress(f"{row.title}, N={row.members}, batch {row.batch}", number, len(rows))
        document["rows"][key] = _in_process(row, size, options)
        document["summary"] = summary(document["rows"])
        _write(out, document)
        if said:
            said(f"{key}: {_one(document['rows'][key])}")
    if progress:
        progress("suite", len(rows), len(rows))
    document["summary"] = summary(document["rows"])
    if said:
        said("\n" + table(document))
    return document


def key_of(row: SuiteRow, threads: int) -> str:
    """What a row is called in the document: `mlp-b1, 1 thread`."""
    return f"{row.name}, {threads} thread{'' if threads == 1 else 's'}"


def wanted(found: Mapping[str, Any] | None) -> bool:
    """Whether a row has to be run: it is missing, ended with an error, or was refused as noisy."""
    return found is None or "error" in found or any(r["verdict"] == "noisy" for r in found["report"]["rows"])


def run_row(
    row: SuiteRow,
    size: str,
    *,
    baselines: Sequence[str] = (),
    backends: Sequence[str] = ("auto",),
    budget_s: float = 20.0,
    compile_limit_s: float = 120.0,
    threads: int = 1,
    pin: bool = False,
    alone: bool = False,
    tune: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """One row: checkpoints with random weights, an artifact in a temporary folder, the comparison. The rest is as in `bench`.

    tune: measure the artifact's plan for the row's batch first, and write it into the artifact; what was measured stands in the result, and beside it what the
    chosen plan costs when another process measures all candidates again (again.py).
    """
    from importlib import import_module

    import torch

    import widepack

    from .baselines import BASELINES
    from .models.weights import states
    from .noise import quiet
    from .suite import bench

    form = row.form(size)
    where, _, function = row.model.partition(":")
    make = getattr(import_module(where), function)
    tuned: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="widepack-suite-") as folder:
        paths = []
        for i, state in enumerate(states(lambda: make(**form.options), row.members, row.shared)):
            paths.append(f"{folder}/{i:03}.pt")
            torch.save(state, paths[-1])
        begin = time.perf_counter()
        artifact = f"{folder}/{row.name}.wide"
        target = torch.device(device).type
        torch.set_num_threads(threads)
        widepack.build(paths, artifact, model=row.model, model_args=dict(form.options), inputs=list(form.inputs), targets=(target,), pt2=False)
        built_s = time.perf_counter() - begin
        if tune:
            begin = time.perf_counter()
            with quiet(threads, pin):
                found = widepack.tune(artifact, batches=(row.batch,), patterns=("shared",), budget_s=budget_s, device=device, write=True)
            tuned = {"tune": {"seconds": time.perf_counter() - begin, "rows": found.to_json()["rows"]}}
        beside = {BY_HAND: by_hand([_filled(make(**form.options), p) for p in paths], device)} if row.by_hand else {}
        report = bench(
            artifact,
            device=device,
            batches=(row.batch,),
            backends=backends,
            baselines=baselines or tuple(BASELINES),
            beside=beside,
            budget_s=budget_s,
            compile_limit_s=compile_limit_s,
            threads=threads,
            factory=row.model,
            factory_args=form.options,
            pin=pin,
            roofline=True,
            alone=alone,
        )
        if tune:
            tuned["again"] = again(artifact, row.batch, found.backends, budget_s, threads, pin)
        weights = sum(os.path.getsize(f) for f in Path(artifact).glob("weights-*"))
    document = {**report.to_json(), "name": row.name}
    return {"title": row.title, "members": row.members, "batch": row.batch, "build_s": built_s, "weights_bytes": weights, **tuned, "report": document}


def again(artifact: str, batch: int, backends: Sequence[str], budget_s: float, threads: int, pin: bool) -> dict[str, Any]:
    """What the chosen plan costs against the best candidate, in a process that has chosen nothing."""
    spec = json.dumps({"artifact": artifact, "batch": batch, "backends": list(backends), "budget_s": budget_s, "threads": threads, "pin": pin})
    try:
        done = subprocess.run([sys.executable, "-m", "widepack_bench.again", spec], capture_output=True, text=True, check=False, timeout=AGAIN_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {AGAIN_S:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:1000] if lines else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _filled(module: Any, path: str) -> Any:
    import torch

    module.load_state_dict(torch.load(path, mmap=True, weights_only=True))
    return module.eval()


def by_hand(modules: Sequence[Any], device: str) -> Callable[..., Any]:
    """What a careful person writes for a frozen trunk: the first member's trunk once, every head over it, outputs stacked."""
    import torch

    trunk, heads = modules[0].trunk.to(device), [m.head.to(device) for m in modules]

    def run(*args: Any, **kwargs: Any) -> Any:
        h = trunk(*args, **kwargs)[:, 0]
        return torch.stack([head(h) for head in heads])

    return run


def _in_process(row: SuiteRow, size: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A row's result, or its error in words."""
    spec = json.dumps({"row": row.name, "size": size, "options": dict(options)})
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.get("threads", 1)), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-m", "widepack_bench.suite_run", spec], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {
            "title": row.title,
            "members": row.members,
            "batch": row.batch,
            "error": lines[-1][:1000] if lines else f"exit code {done.returncode}",
        }
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over the rows that were measured: how many hold, the geometric mean of the ratios to the fastest baseline, what is below 0.9."""
    ratios = {key: r["ratio"]["value"] for key, r in _measured(rows)}
    held = [key for key, r in _measured(rows) if r["verdict"] == "holds"]
    return {
        "rows": len(rows),
        "measured": len(ratios),
        "holds": len(held),
        "share_holds": len(held) / len(ratios) if ratios else None,
        "geometric_mean": math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else None,
        **_regret(rows),
        "below": sorted(key for key, ratio in ratios.items() if ratio < BELOW),
        "not_measured": sorted(set(rows) - set(ratios)),
    }


def _regret(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over the rows that were measured again: how much longer the chosen plan takes than the best candidate."""
    found = {key: row["again"]["regret"] for key, row in rows.items() if "regret" in row.get("again", {})}
    if not found:
        return {}
    worst = max(found, key=lambda key: found[key])
    return {
        "regret": {
            "rows": len(found),
            "geometric_mean": math.exp(sum(map(math.log, found.values())) / len(found)),
            "worst": [worst, found[worst]],
        }
    }


def _measured(rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(key, row["report"]["rows"][0]) for key, row in rows.items() if not wanted(row) and row["report"]["rows"]]
    return [(key, row) for key, row in found if row["ratio"]["value"] is not None]


def table(document: Mapping[str, Any]) -> str:
    """The document as a table in Markdown, with what it was measured on."""
    reports = [row["report"] for row in document["rows"].values() if "error" not in row]
    head = ["network", "N", "batch", "threads", "widepack", "fastest baseline", "ratio", "over the eager loop", "roofline", "verdict"]
    body = [_cells(row) for row in document["rows"].values()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(cells) + " |" for cells in body)]
    found = document["summary"]
    said = []
    if reports:
        env = reports[0]["environment"]
        versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
        said.append(f"{', '.join(sorted({r['environment']['date'] for r in reports}))}, {env['device']}, {versions}; sizes: {document['size']}.")
    if found.get("measured"):
        said.append(
            f"{found['holds']} of {found['measured']} measured rows hold ({found['share_holds']:.0%}); geometric mean of the ratios to the fastest baseline "
            f"{found['geometric_mean']:.2f}; below {BELOW}: {', '.join(found['below']) or 'none'}."
        )
    if regret := found.get("regret"):
        worst, times = regret["worst"]
        said.append(
            f"The chosen plans take {regret['geometric_mean']:.3f} times as long as the best candidate (geometric mean of {regret['rows']} rows, measured again in "
            f"processes of their own); the worst {times:.2f}, {worst}."
        )
    said += [f"Not measured: {', '.join(found['not_measured'])}."] if found.get("not_measured") else []
    for key, row in document["rows"].items():
        said += _notes(key, row)
    return "\n".join([*lines, "", *said])


def _cells(row: Mapping[str, Any]) -> list[str]:
    start = [row["title"], str(row["members"]), str(row["batch"])]
    if "error" in row:
        return [*start, "", "", "", "", "", "", f"error: {row['error'][:120]}"]
    report = row["report"]
    if not report["rows"]:
        return [*start, str(report["environment"]["threads"]), "", "", "", "", "", "not measured"]
    (found,) = report["rows"]
    fastest, looped = found["baselines"][found["fastest"]], found["baselines"].get("loop")
    return [
        *start,
        str(report["environment"]["threads"]),
        duration(found["median_ms"]),
        f"{found['fastest']}, {duration(fastest['median_ms'])}",
        _interval(found["ratio"]),
        f"{looped['ratio']['value']:.2f}" if looped and looped["ratio"]["value"] is not None else "",
        f"{found['roofline']['share']:.0%}" if found["roofline"] else "",
        found["verdict"],
    ]


def _notes(key: str, row: Mapping[str, Any]) -> list[str]:
    """What stands beside a row: the streaming floor of the MLP at batch 1, the trunk that was shared by hand."""
    if "error" in row or not row["report"]["rows"]:
        return []
    (found,) = row["report"]["rows"]
    said = []
    if key.startswith("mlp-b1,") and found["roofline"]:
        roof = found["roofline"]
        said.append(
            f"{key}: the streaming floor is {duration(roof['stream_ms'])} ({roof['least_bytes'] / 1e6:.2f} MB at {roof['stream_bytes_per_s'] / 1e9:.1f} GB/s)."
        )
    other = found["others"].get(BY_HAND)
    if other:
        times = "" if other["over_ours"]["value"] is None else f", {_interval(other['over_ours'])} times as long as widepack"
        said.append(f"{key}: the {BY_HAND} takes {duration(other['median_ms'])}{times}.")
    return said


def _one(row: Mapping[str, Any]) -> str:
    return " | ".join(cell for cell in _cells(row)[4:] if cell)


def _interval(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return "too few rounds"
    high = "open" if row["high"] is None else f"{row['high']:.2f}"
    return f"{row['value']:.2f} [{row['low']:.2f}, {high}]"


def _read(out: Path, size: str) -> dict[str, Any]:
    """The document that is there, or a new one. Raises: UsageError for a file that is something else."""
    if not out.exists():
        return {"format": FORMAT, "size": size, "rows": {}, "summary": {}}
    try:
        document: Any = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{out} cannot be read as JSON ({error}); give another path, or remove it") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{out} is no document of the suite ({FORMAT}); give another path")
    if document["size"] != size:
        raise UsageError(f"{out} holds rows in size {document['size']!r}, this run is for {size!r}; give each its own file")
    return document


def _write(out: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all: what was measured before is never lost."""
    temporary = out.with_name(f".{out.name}.new")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)


def main() -> None:
    """One row: its result as one line of JSON on standard output, an error as one line on standard error."""
    spec = json.loads(sys.argv[1])
    written, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no result
    try:
        (row,) = chosen([spec["row"]])
        result = run_row(row, spec["size"], **spec["options"])
    except WidepackError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    print(json.dumps(result), file=written)


if __name__ == "__main__":
    main()
