"""Kills builds, updates and appends at random times (SIGKILL), and checks that the artifact is complete and
that the next writer removes the remaining files.

Each run is a child of a warmed-up process, which has imported torch and run the operation once. The script
kills the child at a time drawn evenly over the run time. Afterwards the path must have the complete old or
the complete new artifact: it opens with verify="hashes", and its answers are equal to the expected ones, bit
for bit, for both patterns. Then another writer publishes, and every remaining file must be in its manifest.
With --steps, each operation is also killed before each step in the folder. A step is an audit event of
Python: a file is opened, renamed or removed, or a folder is made.

    python scripts/stress/kills.py                       # 200 kills; writes bench/results/kills.json
    python scripts/stress/kills.py --steps               # also kills at every step
"""

from __future__ import annotations

import argparse
import itertools
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
from widepack_bench.report.json_file import write_whole

OUT = Path(__file__).resolve().parents[2] / "bench" / "results" / "kills.json"
STAGES = ["", "read", "check", "capture", "lower", "write weights", "verify", "export", "publish"]
OPERATIONS = ("first build", "build", "update", "append")
Progress = Callable[[str, int, int], None]
STEPS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"}


class Net(nn.Module):
    """A trunk that all members share, and a different head for each member."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.trunk(x).relu())
        return answer


@dataclass
class Operation:
    """An operation that writes an artifact. answers: of the written artifact, for both patterns."""

    name: str
    run: Callable[[Path, Progress | None], object]
    answers: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Scene:
    """What operations write at `path`. kept: an unchanged copy of the old artifact, and what it answers."""

    path: Path
    kept: Path
    old: str
    answers: list[torch.Tensor]
    operations: list[Operation]


def checkpoints(folder: Path, count: int) -> list[Path]:
    """Writes checkpoints of members with one common trunk."""
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
    """Checks the hashes of an artifact and returns its answers to one shared input and to one input each."""
    ens = widepack.load(path, verify="hashes")
    x = torch.linspace(-2, 2, 32).reshape(2, 16)
    xs = torch.stack([x * (1 + i) for i in range(len(ens))])
    with torch.inference_mode():
        answers = [ens(x).clone(), ens.each(xs).clone()]
    ens.close()
    return answers


def scene(folder: Path, only: Sequence[str] = OPERATIONS, times: int = 3) -> Scene:
    """Makes the checkpoints and the old artifact, and measures the time of every operation."""
    paths = checkpoints(folder / "ckpts", 7)
    specs: dict[str, Any] = {"model": Net, "inputs": ["x=float32[B,16]"], "targets": ("cpu",)}
    kept, path = folder / "kept.wide", folder / "ens.wide"
    widepack.build(paths[:3], kept, **specs)
    writes: dict[str, Callable[[Path, Progress | None], object]] = {
        "first build": lambda p, show: widepack.build(paths[:3], p, progress=show, **specs),
        "build": lambda p, show: widepack.build(paths[2:6], p, force=True, progress=show, **specs),
        "update": lambda p, show: widepack.update(p, {1: paths[5]}, progress=show),
        "append": lambda p, show: widepack.append(p, [paths[6]], progress=show),
    }
    operations = [Operation(name, write) for name, write in writes.items() if name in only]
    prepared = Scene(path, kept, Reader(kept).manifest.digest, answers_of(kept), operations)
    for operation in operations:
        reset(prepared, operation)
        operation.run(path, None)  # in this process, so that the children inherit all imports
        durations = []
        for _ in range(times):
            reset(prepared, operation)
            start = time.perf_counter()
            child = fork(lambda: operation.run(path, None))  # noqa: B023  the function runs now
            status = os.waitpid(child, 0)[1]
            durations.append(time.perf_counter() - start)
            if status:
                raise SystemExit(f"{operation.name} failed without being killed")
        operation.seconds = statistics.median(durations)
        operation.answers = answers_of(path)
    return prepared


def reset(scene: Scene, operation: Operation) -> None:
    """Removes the artifact for a first build; else publishes the old one."""
    if operation.name == "first build":
        shutil.rmtree(scene.path, ignore_errors=True)
    else:
        publish_old(scene)


def publish_old(scene: Scene) -> None:
    """Publishes the old artifact at the path, as the next writer."""
    reader = Reader(scene.kept)
    with Writer(scene.path, force=True) as writer:
        writer.take(reader, reader.manifest.files)
        writer.publish(reader.manifest)


def fork(work: Callable[[], object]) -> int:
    """Forks a child that runs the work and ends without the cleanup of the parent."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as e:  # noqa: BLE001  no exception may reach the frames of the parent
        print(f"child: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)


def files(path: Path) -> set[str]:
    return {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}


def look(scene: Scene, operation: Operation) -> str:
    """Returns the state of the path after a kill: `old`, `new`, `nothing` (of a first build), or an error."""
    if not (scene.path / MANIFEST).exists():
        return "nothing" if operation.name == "first build" else "WRONG: the old artifact is gone"
    try:
        digest = Reader(scene.path).manifest.digest
        answers = answers_of(scene.path)
    except Exception as e:  # noqa: BLE001  any exception: the artifact does not open
        return f"WRONG: {type(e).__name__}: {e}"
    expected = scene.answers if digest == scene.old else operation.answers
    if len(answers) != len(expected) or not all(torch.equal(a, b) for a, b in zip(answers, expected)):
        return "WRONG: the answers differ"
    return "old" if digest == scene.old and operation.name != "first build" else "new"


def cleared(scene: Scene) -> str:
    """Publishes as the next writer and returns the files that remain outside the manifest."""
    publish_old(scene)
    reader = Reader(scene.path)
    reader.check_hashes()
    remaining = files(scene.path) - {MANIFEST, *reader.manifest.files}
    return ", ".join(sorted(remaining))


def kill_at(scene: Scene, operation: Operation, seconds: float, stage: mmap.mmap) -> dict[str, Any]:
    """Runs an operation, kills it after the given seconds, and checks the path."""
    reset(scene, operation)
    stage[0] = 0

    def progress(name: str, done: int, total: int) -> None:
        stage[0] = STAGES.index(name) if name in STAGES else 0

    child = fork(lambda: operation.run(scene.path, progress))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    row = {"at_s": round(seconds, 4), "stage": STAGES[stage[0]] or "before"}
    return after(scene, operation, {**row, "killed": os.WIFSIGNALED(status)})


def kill_before(scene: Scene, operation: Operation, step: int) -> dict[str, Any] | None:
    """Kills an operation before the given step in the folder. Returns None if the step does not exist."""
    reset(scene, operation)
    place = os.fspath(scene.path)

    def work() -> None:
        count = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            paths = [os.fspath(a) for a in args[:2] if isinstance(a, (str, os.PathLike))]
            if event in STEPS and any(str(path).startswith(place) for path in paths):
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        operation.run(scene.path, None)

    status = os.waitpid(fork(work), 0)[1]
    return after(scene, operation, {"step": step, "killed": True}) if os.WIFSIGNALED(status) else None


def after(scene: Scene, operation: Operation, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a kill: what is at the path, and what the next writer leaves."""
    there = (scene.path / MANIFEST).exists()
    named = {LOCK, MANIFEST, *(Reader(scene.path).manifest.files if there else ())}
    litter = len(files(scene.path) - named)
    found = look(scene, operation)
    return {"operation": operation.name, **row, "found": found, "litter": litter, "left": cleared(scene)}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the counts over all rows."""
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


def at_random(prepared: Scene, kills: int, seed: int) -> list[dict[str, Any]]:
    """Kills each operation at times drawn evenly over its run time: one in each part of it."""
    generator, stage = random.Random(seed), mmap.mmap(-1, 1)
    plan: list[tuple[Operation, float]] = []
    for number, operation in enumerate(prepared.operations):
        count = kills // len(prepared.operations) + (number < kills % len(prepared.operations))
        plan += [(operation, operation.seconds * (k + generator.random()) / count) for k in range(count)]
    generator.shuffle(plan)
    rows: list[dict[str, Any]] = []
    while plan:
        operation, seconds = plan.pop()
        rows.append(kill_at(prepared, operation, seconds, stage))
        if not rows[-1]["killed"]:  # the operation ended before the kill
            operation.seconds = (operation.seconds + seconds) / 2
            plan.insert(0, (operation, operation.seconds * generator.random()))
        if len(rows) % 20 == 0:
            wrong = sum(r["found"].startswith("WRONG") for r in rows)
            print(f"{len(rows)} runs, {len(plan)} to go: {wrong} wrong", flush=True)
    return rows


def at_steps(prepared: Scene) -> list[dict[str, Any]]:
    """Kills each operation before each of its steps."""
    rows: list[dict[str, Any]] = []
    for operation in prepared.operations:
        for step in itertools.count(1):
            row = kill_before(prepared, operation, step)
            if row is None:
                print(f"{operation.name}: {step - 1} steps")
                break
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="store_true", help="also kill at every step")
    parser.add_argument("--only", choices=OPERATIONS, action="append", help="this operation only; repeatable")
    parser.add_argument("--times", type=int, default=3, help="how often each operation is timed first")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        prepared = scene(Path(folder), args.only or OPERATIONS, args.times)
        seconds = {o.name: round(o.seconds, 3) for o in prepared.operations}
        rows = at_random(prepared, args.kills, args.seed)
        steps = at_steps(prepared) if args.steps else []
    document = {
        "what": (__doc__ or "").strip(),
        "environment": environment("cpu", 1),
        "took_s": round(time.monotonic() - start, 1),
        "kills": args.kills,
        "seed": args.seed,
        "seconds": seconds,
        "random": summary(rows),
        **({"steps": summary(steps)} if steps else {}),
        "rows": rows,
    }
    write_whole(args.out, document)
    wrong = sum(len(document[part]["wrong"]) for part in ("random", "steps") if part in document)
    print(f"{document['random']['killed']} kills, {wrong} wrong; wrote {args.out}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
