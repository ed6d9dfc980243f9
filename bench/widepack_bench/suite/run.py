"""The suite: reference networks with random weights, each row built, loaded and compared with the baselines in a process of its own.

One JSON document, written after every row, so that a run that was stopped goes on: a row that is there, and was not refused as noisy, is not run again.
Nothing is trained.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from widepack.errors import UsageError

from ..processes.fresh import in_fresh_process
from .rows import SuiteRow, chosen
from .table import BY_HAND, one_line, summary, table, wanted

FORMAT = "widepack.suite/1"
AGAIN_S = 1800.0  # of measuring a plan again
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
        found = in_fresh_process(f"{__name__}:run_named", {"name": row.name, "size": size, **options}, threads=options.get("threads", 1))
        document["rows"][key] = {"title": row.title, "members": row.members, "batch": row.batch, **found}
        document["summary"] = summary(document["rows"])
        write_whole(out, document)
        if said:
            said(f"{key}: {one_line(document['rows'][key])}")
    if progress:
        progress("suite", len(rows), len(rows))
    document["summary"] = summary(document["rows"])
    if said:
        said("\n" + table(document))
    return document


def key_of(row: SuiteRow, threads: int) -> str:
    """What a row is called in the document: `mlp-b1, 1 thread`."""
    return f"{row.name}, {threads} thread{'' if threads == 1 else 's'}"


def run_named(name: str, size: str, **options: Any) -> dict[str, Any]:
    """`run_row` of the row with a name, as its own process is asked."""
    (row,) = chosen([name])
    return run_row(row, size, **options)


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
    chosen plan costs when another process measures all candidates again (regret.py).
    """
    from importlib import import_module

    import torch

    import widepack

    from ..baselines.table import BASELINES
    from ..models.weights import states
    from ..measure.race import quiet
    from .compare import bench

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
            rows = json.loads(
                json.dumps(found.to_json()["rows"]).replace(f"{folder}/", "")
            )  # why a candidate was dropped may name a file of the artifact
            tuned = {"tune": {"seconds": time.perf_counter() - begin, "rows": rows}}
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
            asked = {"artifact": artifact, "batch": row.batch, "backends": found.backends, "budget_s": budget_s, "threads": threads, "pin": pin}
            tuned["again"] = in_fresh_process("widepack_bench.suite.regret:regret", asked, limit_s=AGAIN_S)
        weights = sum(os.path.getsize(f) for f in Path(artifact).glob("weights-*"))
    document = {**report.to_json(), "name": row.name}
    return {"build_s": built_s, "weights_bytes": weights, **tuned, "report": document}


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


def write_whole(out: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all: what was measured before is never lost."""
    temporary = out.with_name(f".{out.name}.new")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, out)
