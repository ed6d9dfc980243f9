"""Loads the changed artifacts in a worker process, and reports how each load ends."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_damage import damaged
from fuzz_files import Files, read, write
from fuzz_forge import rewritten

SECONDS = 10.0
BYTES = 1_000_000_000
FINE = ("refused", "same", "loaded")


class Audit:
    """Records the files and modules that a load opens and imports, from audit events of Python."""

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.seen: list[str] = []
        inside = [
            str(folder),
            os.environ["XDG_CACHE_HOME"],
            sys.prefix,
            sys.base_prefix,
            os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
            "/proc/",
            "/sys/",
            "/dev/",
        ]
        inside += [p for p in sys.path if p]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if not self.on:
                return
            if event == "open" and isinstance(args[0], (str, bytes)):
                path = os.path.abspath(os.fsdecode(args[0]))
                if not any(path.startswith(p) for p in inside):
                    self.seen.append(f"open {path}")
            elif event in (
                "os.system",
                "os.exec",
                "os.posix_spawn",
                "subprocess.Popen",
                "socket.connect",
                "ctypes.dlopen",
                "pickle.find_class",
                "os.fork",
            ):
                self.seen.append(f"{event} {args!r}"[:200])
            elif event == "import" and str(args[0]).partition(".")[0] not in sys.stdlib_module_names | {
                m.partition(".")[0] for m in sys.modules
            }:
                self.seen.append(f"import {args[0]}")

        sys.addaudithook(hook)


def answers(artifact: Path, **how: Any) -> dict[str, Any]:
    """Loads an artifact, and calls every entry with fixed inputs of the sizes of the example."""
    import torch

    import widepack
    from widepack.ir.tensor_type import parse_slot

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
    import torch
    import torch.utils._pytree as pytree

    digest = hashlib.sha256()
    for leaf in pytree.tree_leaves(value):
        digest.update(
            str(leaf).encode()
            if not isinstance(leaf, torch.Tensor)
            else f"{leaf.dtype}{list(leaf.shape)}".encode() + leaf.contiguous().numpy().tobytes()
        )
    return digest.hexdigest()


def work(mode: str, seed: int, folder: Path, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Runs one case after the other, and yields a row for each."""
    import widepack
    from widepack.errors import ArtifactError

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
            how, files = (
                damaged(draw, base[name], others) if mode == "hashes" else rewritten(draw, base[name], others)
            )
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
            if mode == "hashes":
                row["outcome"] = "same" if bits(answers(place, verify="hashes")) == right[name] else "wrong"
            else:
                widepack.load(place).warmup(("shared",) if "bare" in how else ("shared", "each"))
                row["outcome"] = "loaded"
        except ArtifactError as e:
            text = str(e)
            fine = (
                bool(text.strip())
                and not any(ord(c) < 32 and c not in "\n\t" for c in text)
                and len(text) < 100_000
            )
            row.update(outcome="refused" if fine else "no sentence", text=text[:300])
        except Exception as e:  # noqa: BLE001  every other exception is a finding
            row.update(
                outcome="exception",
                text=f"{type(e).__name__}: {str(e)[:300]}",
                trace=traceback.format_exc()[-1500:],
            )
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
            row["files"] = {
                n: base64.b64encode(d).decode() for n, d in files.items() if d != base[name].get(n)
            }
        yield row


def serve(mode: str, seed: str, folder: str, first: str, cases: str) -> None:
    """Runs the cases in a worker process, and prints one line for each row."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output does not mix with the rows
    for row in work(mode, int(seed), Path(folder), iter(range(int(first), int(first) + int(cases)))):
        out.write(json.dumps(row) + "\n")
