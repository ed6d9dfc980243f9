"""Counts answers that mix the old and the new weights of a member, while members are swapped on a device.

    python scripts/measure/device_swaps.py -o bench/results/device/swaps.json
    python scripts/measure/device_swaps.py --device cpu --answers 500 --forms eager

A row is one form of a model: `eager`, `graph` or `compile`. Threads with a stream each call it, while another
thread swaps its members between two checkpoints. Before and after, each member's answer to the same input is
recorded for both checkpoints; each member's part of each answer must be equal to one of the two, bit by bit.
`captures` counts the graphs that were captured after the first call of each thread.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from row_file import RowFile, build_threads, device_parser, say
from torch import Tensor, nn

import widepack

FORMAT = "widepack.device-swaps/1"
MEMBERS, THREADS, ROWS = 8, 4, 16
FORMS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph": {"graph": True},
    "compile": {"backend": "compile", "compile": "now"},
}


def net() -> nn.Module:
    """Returns a member."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 256),
        nn.GELU(),
        nn.Linear(256, 10),
    )


def built(folder: Path, device: str) -> Path:
    """Builds the artifact. Each member `i` has the two checkpoints `a{i}.pt` and `b{i}.pt`."""
    torch.set_num_threads(build_threads(device))
    for k, kind in enumerate("ab"):
        for i in range(MEMBERS):
            torch.manual_seed(100 * k + i)
            torch.save(net().state_dict(), folder / f"{kind}{i}.pt")
    widepack.build(
        [folder / f"a{i}.pt" for i in range(MEMBERS)],
        folder / "e.wide",
        model=lambda: net().eval(),
        inputs=["input=float32[B,3,8,8]"],
        targets=(torch.device(device).type,),
        pt2=False,
        race=False,
    )
    return folder / "e.wide"


def stream(device: str) -> AbstractContextManager[object]:
    """Returns a stream of its own for a thread."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.startswith("cuda") else nullcontext()  # type: ignore[no-untyped-call]


def counted(ens: Any, folder: Path, device: str, least: int, limit_s: float) -> dict[str, Any]:
    """Calls the model until there are enough answers. Returns how many were mixed, and of how many kinds."""
    x = torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    known: dict[str, Tensor] = {}
    for kind in "ba":
        for i in range(MEMBERS):
            ens.swap(i, folder / f"{kind}{i}.pt")
        known[kind] = ens(x).clone()
    captured = sum(len(use.captured) for use in ens.graph_use())
    stop, begin = threading.Event(), time.perf_counter()
    answers, mixed, seen = [0] * THREADS, [0] * THREADS, set()
    errors: list[str] = []

    def call(number: int) -> None:
        with stream(device), torch.inference_mode():
            while not stop.is_set():
                y = ens(x)
                is_old = (y == known["a"]).flatten(1).all(1)
                is_new = (y == known["b"]).flatten(1).all(1)
                which = torch.stack([is_old, is_new]).cpu()
                answers[number] += 1
                mixed[number] += int(not bool(which.any(0).all()))
                seen.add(tuple(which[1].tolist()))

    def guarded(number: int) -> None:
        try:
            call(number)
        except Exception as error:  # noqa: BLE001  a row says what came
            errors.append(f"{type(error).__name__}: {error}"[:300])
            stop.set()

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(THREADS)]
    for t in threads:
        t.start()
    swaps = 0
    while not stop.is_set() and sum(answers) < least and time.perf_counter() - begin < limit_s:
        ens.swap(swaps % MEMBERS, folder / f"{'ba'[swaps // MEMBERS % 2]}{swaps % MEMBERS}.pt")
        swaps += 1
    stop.set()
    for t in threads:
        t.join()
    return {
        "answers": sum(answers),
        "mixed": sum(mixed),
        "versions_seen": len(seen),
        "swaps": swaps,
        "captures": sum(len(use.captured) for use in ens.graph_use()) - captured,
        "seconds": time.perf_counter() - begin,
        **({"error": "; ".join(errors)} if errors else {}),
    }


def main() -> None:
    """Measures the forms that the file does not have yet."""
    parser = device_parser(__doc__, "device/swaps.json")
    parser.add_argument("--answers", type=int, default=10_000, help="for each form (default: 10000)")
    parser.add_argument("--forms", default=",".join(FORMS), help="forms, separated by commas")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each form (default: 30)")
    given = parser.parse_args()
    file = RowFile(given.out, FORMAT, "swaps during calls", given.device)
    waiting = [form for form in given.forms.split(",") if file.must_run(form)]
    if not waiting:
        return
    with tempfile.TemporaryDirectory(prefix="widepack-swaps-") as name:
        folder = Path(name)
        path = built(folder, given.device)
        for form in waiting:
            options = {"cache": folder / "cache", **FORMS[form]}
            ens = widepack.load(path, device=given.device, **options)
            row = counted(ens, folder, given.device, given.answers, given.limit)
            file.add(form, row)
            say(form, row)


if __name__ == "__main__":
    main()
