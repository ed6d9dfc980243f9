"""Loads changed artifacts in a monitored process, one after the other: damaged ones, and forged ones.

    python scripts/stress/fuzz_artifacts.py --hashes on --cases 100000 -o fuzz.json
    python scripts/stress/fuzz_artifacts.py --fixed-up --seconds 600 -o fuzz.json

With `--hashes on`, files are damaged: bits, ends, parts, JSON. With `--fixed-up`, manifest, programs and
tensors are rewritten, and hashes, names and digest are correct again.

A damaged artifact must raise an ArtifactError with one sentence, or give the same answers as before, bit for
bit. A forged artifact may load. Neither may raise another exception, crash, use more than 10 s of a core or
more than 1 GB, open a file outside the folder, or import a module that the load of a valid artifact does not
import.

`-o` appends the run to the list of runs in the file. A case depends only on the seed, the mode and its
number: `--case 123 --seed 0` runs one case again.
`fuzz_changes.py` makes the changes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import widepack
from widepack.errors import ArtifactError
from widepack.ir.tensor_type import parse_slot

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from fuzz_changes import Files, damaged, rewritten  # noqa: E402

from make_golden import GOLDEN, Golden, Mlp  # noqa: E402
from make_golden import write as write_golden  # noqa: E402

SECONDS = 10.0  # of a core, for one load
BYTES = 1_000_000_000
BATCH = 10_000  # cases of one worker; then a new worker replaces it
FINE = ("refused", "same", "loaded")
EVENTS = (
    "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "ctypes.dlopen",
    "pickle.find_class", "os.fork",
)  # fmt: skip
"""Events of Python that no load may cause."""

# ---------------------------------------------------------------- artifacts


class Tokens(nn.Module):
    """An encoder of tokens, with an answer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids: Any) -> Any:
        return {"logits": self.head(self.layer(self.table(ids)).mean(1)), "seen": (ids > 3).sum(1)}


class Steps(nn.Module):
    """A recurrent layer, and two entries."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.GRU(6, 3, batch_first=True)

    def encode(self, x: Any) -> Any:
        return self.up(x).relu()

    def forward(self, x: Any) -> Any:
        return self.down(self.encode(x))[0]


GIVEN = ("mlp", "conv", "conv-loop", "ragged", "fleet", "state")
"""Artifacts of `artifacts/golden` of which the corpus has new ones."""


def corpus(folder: Path) -> None:
    """Builds small artifacts of several forms."""
    steps = ["forward:x=float32[B,3,4]", "encode:x=float32[B,4]"]
    torch.manual_seed(0)
    artifacts = {
        **{name: GOLDEN[name] for name in GIVEN},
        "mlp-pt2": Golden([Mlp] * 2, ["x=float32[B,6]"], Mlp, {"pt2": True}),
        "tokens": Golden(
            [Tokens] * 2, ["ids=int64[B,T]:0..10"], Tokens, {}, numbers=tuple(Tokens().state_dict())
        ),
        "entries": Golden(
            [Steps] * 2, steps, Steps, {"entries": ["forward", "encode"]}, numbers=tuple(Steps().state_dict())
        ),
    }
    back = Path.cwd()
    os.chdir(folder)  # checkpoints are written there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, golden in artifacts.items():
            write_golden(name, golden, folder / f"{name}.wide")
    os.chdir(back)


def read(artifact: Path) -> Files:
    """Returns the files of an artifact."""
    found = sorted(p for p in artifact.rglob("*") if p.is_file())
    return {p.relative_to(artifact).as_posix(): p.read_bytes() for p in found}


def write(folder: Path, files: Files, old: Files) -> None:
    """Replaces the old files of a folder by these files. A file is replaced and never written in place,
    because it may be mapped.
    """
    for name in old.keys() - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        if old.get(name) != data:
            place = folder / name
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            place.write_bytes(data)


# ---------------------------------------------------------------- the worker


class Audit:
    """Records the files and modules that a load opens and imports, from audit events of Python."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        inside = [str(folder), os.environ["XDG_CACHE_HOME"], sys.prefix, sys.base_prefix, str(ROOT)]
        inside += ["/proc/", "/sys/", "/dev/", *(p for p in sys.path if p)]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if not self.on:
                return
            if event == "open" and isinstance(args[0], (str, bytes)):
                path = os.path.abspath(os.fsdecode(args[0]))
                if not any(path.startswith(p) for p in inside):
                    self.seen.append(f"open {path}")
            elif event in EVENTS:
                self.seen.append(f"{event} {args!r}"[:200])
            elif event == "import" and str(args[0]).partition(".")[0] not in sys.stdlib_module_names | {
                m.partition(".")[0] for m in sys.modules
            }:
                self.seen.append(f"import {args[0]}")

        sys.addaudithook(hook)


def answers(artifact: Path, **how: Any) -> dict[str, Any]:
    """Loads an artifact, and calls every entry with fixed inputs of the sizes of the example."""
    ens = widepack.load(artifact, **how)
    found: dict[str, Any] = {}
    for name, entry in ens.manifest.entries.items():
        torch.manual_seed(0)
        carried = {s.input for s in entry.state}
        inputs = []
        for k, leaf in enumerate(entry.inputs):
            type_ = parse_slot(leaf.type)
            shape = [d if isinstance(d, int) else d.factor * 2 for d in type_.dims]
            if k not in carried:
                inputs.append(torch.randint(0, 9, shape) if type_.dtype == "int64" else torch.randn(shape))
        found[name] = ens.entry(name)(*inputs, **({"state": ens.entry(name).state()} if carried else {}))
    return found


def bits(value: Any) -> str:
    """Returns a digest of the numbers of a result."""
    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{list(leaf.shape)}".encode() + leaf.contiguous().numpy().tobytes())
        else:
            digest.update(str(leaf).encode())
    return digest.hexdigest()


def ended(mode: str, how: str, place: Path, right: str) -> dict[str, Any]:
    """Loads a changed artifact. Returns how that ended."""
    try:
        if mode == "hashes":
            return {"outcome": "same" if bits(answers(place, verify="hashes")) == right else "wrong"}
        widepack.load(place).warmup(("shared",) if "bare" in how else ("shared", "each"))
        return {"outcome": "loaded"}
    except ArtifactError as e:
        text = str(e)
        fine = bool(text.strip()) and not any(ord(c) < 32 and c not in "\n\t" for c in text)
        return {"outcome": "refused" if fine and len(text) < 100_000 else "no sentence", "text": text[:300]}
    except Exception as e:  # noqa: BLE001  every other exception is a finding
        trace = traceback.format_exc()[-1500:]
        return {"outcome": "exception", "text": f"{type(e).__name__}: {str(e)[:300]}", "trace": trace}


def work(mode: str, seed: int, folder: Path, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Runs one case after the other, and yields a row for each."""
    warnings.simplefilter("ignore")
    names = sorted(p.name for p in folder.glob("*.wide"))
    base = {n: read(folder / n) for n in names}
    right = {n: bits(answers(folder / n)) for n in names}
    answers(folder / names[0], strategies="auto")  # imports the modules that lowering needs
    place = folder / f"at-work-{os.getpid()}"
    audit = Audit(place)
    at: Files = {}
    place.mkdir()
    for number in numbers:
        draw = random.Random(f"{mode} {seed} {number}")
        name = draw.choice(names)
        others = [base[n] for n in names]
        try:
            how, files = (damaged if mode == "hashes" else rewritten)(draw, base[name], others)
        except (TypeError, KeyError, AttributeError, IndexError, ValueError, RecursionError):
            yield {"case": number, "outcome": "none", "how": "no mutation"}
            continue
        write(place, files, at)
        at = files
        row: dict[str, Any] = {"case": number, "artifact": name, "how": how}
        audit.seen.clear()
        start = time.process_time()
        audit.on = True
        try:
            row |= ended(mode, how, place, right[name])
        finally:
            audit.on = False
        row["seconds"] = round(time.process_time() - start, 3)  # of this process only
        row["bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if row["outcome"] in FINE and row["seconds"] > SECONDS:
            row["outcome"] = "slow"
        if row["outcome"] in FINE and row["bytes"] > BYTES:
            row["outcome"] = "memory"
        if audit.seen:
            row.update(outcome="outside", text="; ".join(audit.seen[:5]))
        if row["outcome"] not in FINE:
            changed = {n: d for n, d in files.items() if d != base[name].get(n)}
            row["files"] = {n: base64.b64encode(d).decode() for n, d in changed.items()}
        yield row


def serve(mode: str, seed: str, folder: str, first: str, cases: str) -> None:
    """Runs the cases in a worker process, and prints one line for each row."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output does not mix with the rows
    for row in work(mode, int(seed), Path(folder), iter(range(int(first), int(first) + int(cases)))):
        out.write(json.dumps(row) + "\n")


# ---------------------------------------------------------------- the monitor


def watched(
    mode: str, seed: int, folder: Path, first: int, cases: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all cases. A worker that ends, hangs or uses too much memory is replaced."""
    number, end, until = first, first + cases, time.monotonic() + seconds
    while number < end and time.monotonic() < until:
        count = min(BATCH, end - number)
        words = ["--work", mode, *map(str, (seed, folder, number, count))]
        command = [sys.executable, __file__, *words]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as worker,
        ):
            assert worker.stdout is not None
            began, used, buffer, ready = time.monotonic(), 0.0, b"", False
            while time.monotonic() < until:
                if select.select([worker.stdout], [], [], 0.2)[0]:
                    chunk = os.read(worker.stdout.fileno(), 1 << 20)
                    if not chunk:
                        break
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        began, used, ready = time.monotonic(), _used(worker.pid), True
                        if line == b"ready":
                            continue
                        row = json.loads(line)
                        number = row["case"] + 1
                        yield row
                        if row["outcome"] == "memory":
                            worker.kill()  # the next case needs a new worker
                elif (
                    ready and _used(worker.pid) - used > 2 * SECONDS
                ) or time.monotonic() - began > 30 * SECONDS:
                    yield {"case": number, "outcome": "hang"}
                    number += 1
                    break
                elif ready and _resident(worker.pid) > 2 * BYTES:
                    yield {"case": number, "outcome": "memory"}
                    number += 1
                    break
            stopped = time.monotonic() >= until
            worker.kill()
            code = worker.wait()
            if not stopped and code not in (0, -9):
                errors.seek(0)
                text = errors.read()[-600:].decode(errors="replace")
                yield {"case": number, "outcome": "crash", "code": code, "text": text}
                number += 1


def _used(pid: int) -> float:
    """Returns the CPU seconds of a process, because other processes may use the cores too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _resident(pid: int) -> int:
    """Returns the resident bytes of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Load mutated artifacts.")
    parser.add_argument("--hashes", choices=["on"], help="damage files; every load checks all hashes")
    words = "rewrite manifest, programs and tensors, and correct hashes, names and digest"
    parser.add_argument("--fixed-up", action="store_true", help=words)
    parser.add_argument("--cases", type=int, default=10**9, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run only this case, and print its row")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, help="a folder of artifacts; an empty folder is filled")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row without the changed files."""
    return {k: v for k, v in row.items() if k != "files"}


class Run:
    """Collects the rows of a run: counts, failures and maxima."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.failed: list[dict[str, Any]] = []
        self.longest, self.largest = 0.0, 0

    def add(self, row: dict[str, Any]) -> None:
        """Counts a row, and prints it if the case failed."""
        self.outcomes[row["outcome"]] += 1
        self.ways[f"{row.get('how', '?')}: {row['outcome']}"] += 1
        self.longest = max(self.longest, row.get("seconds", 0.0))
        self.largest = max(self.largest, row.get("bytes", 0))
        if row["outcome"] not in (*FINE, "none"):
            self.failed.append(row)
            print(json.dumps(shown(row))[:1500], file=sys.stderr, flush=True)

    def document(self, mode: str, seed: int, first: int, seconds: float) -> dict[str, Any]:
        """Returns the document of the run."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "mode": mode,
            "seed": seed,
            "first": first,
            "cases": sum(self.outcomes.values()),
            "seconds": round(seconds, 1),
            "seconds_of_a_core": round(used.ru_utime + used.ru_stime, 1),
            "outcomes": dict(self.outcomes.most_common()),
            "longest_s": self.longest,
            "largest_rss_bytes": self.largest,
            "failed": self.failed,
            "ways": dict(sorted(self.ways.items())),
        }


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        serve(*sys.argv[2:])
        return
    given = arguments()
    mode = "fixed-up" if given.fixed_up else "hashes"
    run = Run()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as temporary:
        folder = given.corpus or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not list(folder.glob("*.wide")):
            corpus(folder.resolve())
        start = time.monotonic()
        first, cases = (given.case, 1) if given.case is not None else (given.first, given.cases)
        for row in watched(mode, given.seed, folder, first, cases, given.seconds):
            run.add(row)
            if given.case is not None:
                print(json.dumps(shown(row), indent=1))
        for left in [*folder.glob("at-work-*"), *folder.glob("tmp*")]:
            shutil.rmtree(left, ignore_errors=True)
    document = run.document(mode, given.seed, first, time.monotonic() - start)
    print(json.dumps({k: v for k, v in document.items() if k not in ("failed", "ways")}, indent=1))
    if given.output:
        runs = json.loads(given.output.read_text()) if given.output.exists() else []
        given.output.write_text(json.dumps([*runs, document], indent=1) + "\n")


if __name__ == "__main__":
    main()
