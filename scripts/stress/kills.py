"""Kills builds, updates and appends at random times (SIGKILL): is the artifact whole afterwards, and does the
next writer remove the remains?

Each run is a child that is forked off a warmed-up process (torch imported, the operation run once) and killed
at an instant out of an even spread over the whole run time. Afterwards the artifact at the path has to be the
old or the new one, whole: it opens with verify="hashes" and answers as it should, bit for bit, for both
patterns. Then another writer publishes, and no file may be left that its manifest does not name. With --steps
each operation is also killed before each single step that it takes in the folder (every file opened, renamed,
removed, every folder made), as Python's audit events tell them.

    python scripts/stress/kills.py                       # 200 kills, into bench/results/kills.json
    python scripts/stress/kills.py --steps               # and the kills at every step
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack_artifacts.folder import LOCK, MANIFEST
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer
from widepack_bench.report.environment import environment

OUT = Path(__file__).resolve().parents[2] / "bench" / "results" / "kills.json"
STAGES = ["", "read", "check", "capture", "lower", "write weights", "verify", "export", "publish"]
OPERATIONS = ("first build", "build", "update", "append")
STEPS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"}


class Net(nn.Module):
    """A trunk that all members share and a head of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.trunk(x).relu())
        return made


@dataclass
class Operation:
    """One way to write. run: does it at a path. answers: what the artifact that it makes answers, both
    patterns. seconds: how long it takes.
    """

    name: str
    run: Callable[[Path, Callable[[str, int, int], None] | None], object]
    answers: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Scene:
    """What a run starts with. home: the folder of one artifact per name. kept: the old artifact, pristine.
    old: its digest and answers.
    """

    path: Path
    kept: Path
    old: str
    answers: list[torch.Tensor]
    operations: list[Operation]


def checkpoints(folder: Path, count: int) -> list[Path]:
    """Members of one trunk."""
    folder.mkdir(parents=True)
    paths = []
    for i in range(count):
        torch.manual_seed(0)
        net = Net()
        torch.manual_seed(1 + i)
        nn.init.normal_(net.head.weight)
        nn.init.normal_(net.head.bias)
        paths.append(folder / f"m{i}.pt")
        torch.save(net.state_dict(), paths[-1])
    return paths


def answers_of(path: Path) -> list[torch.Tensor]:
    """What an artifact answers, its files held to their hashes: one input for all members, and one each."""
    ens = widepack.load(path, verify="hashes")
    x = torch.linspace(-2, 2, 32).reshape(2, 16)
    xs = torch.stack([x * (1 + i) for i in range(len(ens))])
    with torch.inference_mode():
        found = [ens(x).clone(), ens.each(xs).clone()]
    ens.close()
    return found


def scene(folder: Path, only: Sequence[str] = OPERATIONS, times: int = 3) -> Scene:
    """Checkpoints, the old artifact, and every operation run a few times, for how long it takes."""
    paths = checkpoints(folder / "ckpts", 7)
    specs: dict[str, Any] = {"model": Net, "inputs": ["x=float32[B,16]"], "targets": ("cpu",)}
    kept, path = folder / "kept.wide", folder / "ens.wide"
    widepack.build(paths[:3], kept, **specs)
    made = [
        Operation(
            "first build", lambda p, progress: widepack.build(paths[:3], p, progress=progress, **specs)
        ),
        Operation(
            "build", lambda p, progress: widepack.build(paths[2:6], p, force=True, progress=progress, **specs)
        ),
        Operation("update", lambda p, progress: widepack.update(p, {1: paths[5]}, progress=progress)),
        Operation("append", lambda p, progress: widepack.append(p, [paths[6]], progress=progress)),
    ]
    made = [o for o in made if o.name in only]
    found = Scene(path, kept, Reader(kept).manifest.digest, answers_of(kept), made)
    for operation in made:
        reset(found, operation)
        operation.run(path, None)  # here, so that the children have imported all that it takes
        took = []
        for _ in range(times):
            reset(found, operation)
            start = time.perf_counter()
            child = fork(lambda: operation.run(path, None))  # noqa: B023  it runs now
            status = os.waitpid(child, 0)[1]
            took.append(time.perf_counter() - start)
            if status:
                raise SystemExit(f"{operation.name} failed without being killed")
        operation.seconds = statistics.median(took)
        operation.answers = answers_of(path)
    return found


def reset(scene: Scene, operation: Operation) -> None:
    """The path as the operation finds it: nothing, or the old artifact, which a writer publishes."""
    if operation.name == "first build":
        shutil.rmtree(scene.path, ignore_errors=True)
    else:
        publish_old(scene)


def publish_old(scene: Scene) -> None:
    """The next writer: it publishes the old artifact at the path."""
    reader = Reader(scene.kept)
    with Writer(scene.path, force=True) as writer:
        writer.take(reader, reader.manifest.files)
        writer.publish(reader.manifest)


def fork(work: Callable[[], object]) -> int:
    """A child that does this and ends, whatever happens, without the parent's cleaning up."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as e:  # noqa: BLE001  nothing may go up into the parent's frames
        print(f"child: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)


def files(path: Path) -> set[str]:
    return (
        {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} if path.is_dir() else set()
    )


def look(scene: Scene, operation: Operation) -> str:
    """What is at the path after a kill: `old`, `new`, `nothing` (of a first build), or what is wrong."""
    if not (scene.path / MANIFEST).exists():
        return "nothing" if operation.name == "first build" else "WRONG: there is no artifact where one was"
    try:
        digest = Reader(scene.path).manifest.digest
        found = answers_of(scene.path)
    except Exception as e:  # noqa: BLE001  whatever it is, the artifact does not open
        return f"WRONG: {type(e).__name__}: {e}"
    wanted = scene.answers if digest == scene.old else operation.answers
    if len(found) != len(wanted) or not all(torch.equal(a, b) for a, b in zip(found, wanted)):
        return "WRONG: it answers otherwise"
    return "old" if digest == scene.old and operation.name != "first build" else "new"


def cleared(scene: Scene) -> str:
    """What is left once the next writer has published; empty where nothing is."""
    publish_old(scene)
    reader = Reader(scene.path)
    reader.check_hashes()
    left = files(scene.path) - {MANIFEST, *reader.manifest.files}
    return ", ".join(sorted(left))


def kill_at(scene: Scene, operation: Operation, seconds: float, stage: mmap.mmap) -> dict[str, Any]:
    """Run an operation, kill it after so many seconds, and look."""
    reset(scene, operation)
    stage[0] = 0

    def progress(name: str, done: int, total: int) -> None:
        stage[0] = STAGES.index(name) if name in STAGES else 0

    child = fork(lambda: operation.run(scene.path, progress))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return after(
        scene,
        operation,
        {"at_s": round(seconds, 4), "stage": STAGES[stage[0]] or "before", "killed": os.WIFSIGNALED(status)},
    )


def kill_before(scene: Scene, operation: Operation, step: int) -> dict[str, Any] | None:
    """The same, killed before its k-th step in the folder; None where it takes fewer."""
    reset(scene, operation)
    place = os.fspath(scene.path)

    def work() -> None:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in STEPS and any(
                isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(place) for a in args[:2]
            ):
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        operation.run(scene.path, None)

    status = os.waitpid(fork(work), 0)[1]
    return after(scene, operation, {"step": step, "killed": True}) if os.WIFSIGNALED(status) else None


def after(scene: Scene, operation: Operation, row: dict[str, Any]) -> dict[str, Any]:
    named = set()
    if (scene.path / MANIFEST).exists():
        named = {MANIFEST, *Reader(scene.path).manifest.files}
    litter = sorted(files(scene.path) - named)
    found = look(scene, operation)
    return {
        "operation": operation.name,
        **row,
        "found": found,
        "litter": len([n for n in litter if n != LOCK]),
        "left": cleared(scene),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts."""
    wrong = [r for r in rows if r["found"].startswith("WRONG") or r["left"]]
    return {
        "runs": len(rows),
        "killed": sum(r["killed"] for r in rows),
        "ended_before": sum(not r["killed"] for r in rows),
        "damaged_or_missing": sum(r["found"].startswith("WRONG") for r in rows),
        "litter_left_by_the_next_writer": sum(bool(r["left"]) for r in rows),
        "with_litter": sum(r["litter"] > 0 for r in rows),
        "found": {
            op: dict(Counter(r["found"] for r in rows if r["operation"] == op))
            for op in dict.fromkeys(r["operation"] for r in rows)
        },
        **({"stage": dict(Counter(r["stage"] for r in rows))} if rows and "stage" in rows[0] else {}),
        "wrong": wrong,
    }


def run(
    kills: int, seed: int, steps: bool, folder: Path, only: Sequence[str] = OPERATIONS, times: int = 3
) -> dict[str, Any]:
    """All kills. Returns: the document. steps: at every step too. only: these operations. times: how often
    each is timed before.
    """
    torch.set_num_threads(1)
    made = scene(folder, only, times)
    timed = {o.name: round(o.seconds, 3) for o in made.operations}
    dice = random.Random(seed)
    stage = mmap.mmap(-1, 1)
    plan: list[tuple[Operation, float]] = []
    for number, operation in enumerate(made.operations):
        count = kills // len(made.operations) + (number < kills % len(made.operations))
        plan += [
            (operation, operation.seconds * (k + dice.random()) / count) for k in range(count)
        ]  # one instant in each part of the run time
    dice.shuffle(plan)
    rows: list[dict[str, Any]] = []
    while plan:
        operation, seconds = plan.pop()
        rows.append(kill_at(made, operation, seconds, stage))
        if not rows[-1]["killed"]:  # it was quicker than before
            operation.seconds = (operation.seconds + seconds) / 2
            plan.insert(0, (operation, operation.seconds * dice.random()))
        if len(rows) % 20 == 0:
            print(
                f"{len(rows)} runs, {len(plan)} to go: "
                f"{sum(r['found'].startswith('WRONG') for r in rows)} wrong",
                flush=True,
            )
    document = {
        "kills": kills,
        "seed": seed,
        "seconds": timed,
        "random": summary(rows),
        "rows": rows,
    }
    if steps:
        at_steps = []
        for operation in made.operations:
            step = 1
            while (row := kill_before(made, operation, step)) is not None:
                at_steps.append(row)
                step += 1
            print(f"{operation.name}: {step - 1} steps")
        document["steps"] = summary(at_steps)
    return document


def text(document: dict[str, Any]) -> str:
    """The document, a run a line."""
    rows = ",\n".join("  " + json.dumps(row) for row in document["rows"])
    return (
        json.dumps({**document, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument(
        "--only", choices=OPERATIONS, action="append", help="Of these operations alone. Repeatable."
    )
    parser.add_argument("--times", type=int, default=3, help="How often an operation is timed before.")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        found = run(args.kills, args.seed, args.steps, Path(folder), args.only or OPERATIONS, args.times)
    command = "kills.py" + f" --kills {args.kills}" + " --steps" * args.steps
    document = {
        "what": (__doc__ or "").strip(),
        "environment": environment("cpu", 1) | {"command": command},
        "took_s": round(time.monotonic() - start, 1),
        **found,
    }
    args.out.write_text(text(document))
    wrong = sum(len(document[part]["wrong"]) for part in ("random", "steps") if part in document)
    print(f"{document['random']['killed']} kills, {wrong} wrong; wrote {args.out}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
