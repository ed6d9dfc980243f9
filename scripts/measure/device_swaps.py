"""Counts answers that mix two versions of a member, while members are swapped on a device.

    python scripts/measure/device_swaps.py -o bench/results/device/swaps.json
    python scripts/measure/device_swaps.py --device cpu --answers 400 --forms eager

A row is one form of a model: `eager`, `graph` or `compile`. The members and the swaps are those of
`swap_under_load.py`. Threads with a stream each call the model. Each member's part of each answer must be
equal, bit by bit, to what the member answered with one of its two checkpoints before. `captures` counts the
graphs that were captured after the first calls.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from row_file import RowFile, build_threads, device_parser, say
from swap_load import Load
from swap_under_load import MEMBERS, built, checkpoints, swapping
from torch import Tensor

import widepack

FORMAT = "widepack.device-swaps/1"
THREADS, SWAPS, ROWS, WIDTH = 4, 50, 16, 128
FORMS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph": {"graph": True},
    "compile": {"backend": "compile", "compile": "now"},
}


def stream(device: str) -> AbstractContextManager[object]:
    """Returns a new stream of a CUDA device as a context."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.startswith("cuda") else nullcontext()  # type: ignore[no-untyped-call]


def on_own_streams(model: Callable[[Tensor], Tensor], device: str) -> Callable[[Tensor], Tensor]:
    """Returns the call of a model in which each thread has its own stream. The answers are on the CPU."""
    local = threading.local()

    def call(x: Tensor) -> Tensor:
        if not hasattr(local, "stream"):
            local.stream = stream(device)
        with local.stream:
            return model(x).cpu()

    return call


def counted(ens: Any, paths: dict[str, list[Path]], device: str, answers: int) -> dict[str, Any]:
    """Calls a model while its members are swapped. Returns the figures of its row."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    known = []
    for version in "BA":
        for i in range(MEMBERS):
            ens.swap(i, paths[version][i])
        known.append([ens(x).cpu()])
    load = Load(on_own_streams(ens, device), [x], known[::-1], THREADS, at_once=True)
    load.run(THREADS)
    captured = sum(len(use.captured) for use in ens.graph_use())
    swaps: list[Any] = []
    ended, begin = threading.Event(), time.perf_counter()
    swapper = threading.Thread(
        target=lambda: swaps.extend(swapping(ens, paths, SWAPS, load, answers, ended.is_set))
    )
    swapper.start()
    found = len(load.run(answers))
    ended.set()
    swapper.join()
    row = {
        "answers": found,
        "mixed": load.torn,
        "versions_seen": len(load.mixtures),
        "swaps": len(swaps),
        "captures": sum(len(use.captured) for use in ens.graph_use()) - captured,
        "seconds": time.perf_counter() - begin,
    }
    return row if found == answers else {**row, "error": f"{found} of {answers} calls answered"}


def main() -> None:
    """Measures the forms that the file does not have yet."""
    parser = device_parser(__doc__, "device/swaps.json")
    parser.add_argument("--answers", type=int, default=10_000, help="for each form (default: 10000)")
    parser.add_argument("--forms", default=",".join(FORMS), help="forms, separated by commas")
    given = parser.parse_args()
    file = RowFile(given.out, FORMAT, "swaps during calls", given.device)
    waiting = [form for form in given.forms.split(",") if file.must_run(form)]
    if not waiting:
        return
    with tempfile.TemporaryDirectory(prefix="widepack-swaps-") as name:
        folder = Path(name)
        torch.set_num_threads(build_threads(given.device))
        paths = checkpoints(folder, WIDTH)
        path = built(folder, "A", paths["A"], WIDTH, given.device)
        for form in waiting:
            ens = widepack.load(path, device=given.device, cache=folder / "cache", **FORMS[form])
            row = counted(ens, paths, given.device, given.answers)
            file.add(form, row)
            say(form, row)


if __name__ == "__main__":
    main()
