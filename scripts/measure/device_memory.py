"""Measures the peak memory of a wide call on a device, beside weights and N times one member's activations.

`peer_networks.py` runs `measured` in a process of its own.

| figure | what it is |
|---|---|
| `weights_bytes` | what `widepack.load` keeps: weights after the prologue, before the first call |
| `member_bytes` | what one call of one member allocated at most, beyond the member's weights and the inputs |
| `peak_bytes` | what was allocated at most during wide calls, the first one too, with weights and inputs |
| `allowed_bytes` | `weights_bytes` + inputs + N x `member_bytes` + `pieces_bytes` |
| `part` | `peak_bytes` over `allowed_bytes` |

The memory of a CUDA graph stays taken between calls, and nothing is allocated when it runs. So with `--graph`
the bytes of weights and of the peak are those that the allocator took from the device since the load: the
runs before the capture count, and so does what they leave. The allocator takes whole pieces, so
`pieces_bytes` is one piece of each size then; else it is 0. `reserved_bytes` is all that the allocator held
at most. On a CPU, where torch has no such counters, the system's peak of the process stands in; its figures
only show that the script runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import widepack
from widepack_bench.baselines.members import call_inputs, named_factory, own_module

CALLS = 3
PIECES = (2 + 20) * 2**20
"""The bytes of torch's pieces for allocations of up to 1 MiB, and for those of up to 10 MiB."""


class Peak:
    """Reads how many bytes are allocated on a device, now and at most. device: its name."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def start(self) -> int:
        """Starts a new peak. Returns the bytes that are allocated now."""
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return _status("VmRSS")

    def most(self) -> int:
        """Returns the most bytes that were allocated since the start."""
        if self._cuda:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        return _status("VmHWM")

    def reserved(self) -> int:
        """Returns the bytes that the allocator holds of the device now."""
        return torch.cuda.memory_reserved() if self._cuda else _status("VmRSS")

    def most_reserved(self) -> int:
        """Returns the most bytes that the allocator held of the device since the start."""
        return torch.cuda.max_memory_reserved() if self._cuda else self.most()


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def of_calls(peak: Peak, load: Callable[[], Callable[[], object]], graph: bool) -> tuple[int, int]:
    """Returns the bytes that a load keeps, and the most during its calls, beyond those before the load.

    Args:
        peak: Reads the bytes.
        load: Loads an artifact, and returns what calls it.
        graph: Whether calls run by CUDA graphs: then the bytes are those that the allocator holds.
    """
    empty = peak.start()
    if graph:
        empty = peak.reserved()
    call = load()
    kept = peak.start()  # a new peak: what only the load needed is no memory of calls
    if graph:
        kept = peak.reserved()
    for _ in range(1 + CALLS):  # the first call captures the graph
        call()
    return kept - empty, (peak.most_reserved() if graph else peak.most()) - empty


def measured(
    artifact: str,
    factory: str,
    factory_args: Mapping[str, Any],
    batch: int,
    device: str,
    backend: str = "auto",
    graph: bool = False,
) -> dict[str, Any]:
    """Returns the figures of an artifact for one batch. It must run in a process of its own.

    factory: the name of the members' factory. graph: whether calls run by CUDA graphs.
    """
    peak = Peak(device)
    described = widepack.load(artifact, device="cpu", warmup=False)
    entry, count = described.manifest.entries["forward"], len(described)
    args, kwargs, _ = call_inputs(entry, None, batch, 0, device)
    member = own_module(named_factory(factory, factory_args, described), described.state_dict(0), "member 0")
    member = member.to(device).eval()
    del described
    with torch.inference_mode():
        member(*args, **kwargs)  # libraries allocate their workspaces in the first call
        before = peak.start()
        for _ in range(CALLS):
            member(*args, **kwargs)
        member_bytes = peak.most() - before
        del member

        def load() -> Callable[[], object]:
            return partial(
                widepack.load(artifact, device=device, backend=backend, graph=graph), *args, **kwargs
            )

        weights_bytes, most = of_calls(peak, load, graph)
    inputs = sum(v.nbytes for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor))
    pieces = PIECES if graph else 0
    allowed = weights_bytes + inputs + count * member_bytes + pieces
    most += inputs
    return {
        "members": count,
        "batch": batch,
        "form": backend + ("+graph" if graph else ""),
        "weights_bytes": weights_bytes,
        "member_bytes": member_bytes,
        "inputs_bytes": inputs,
        "pieces_bytes": pieces,
        "peak_bytes": most,
        "reserved_bytes": peak.most_reserved(),
        "allowed_bytes": allowed,
        "part": most / allowed if allowed > 0 else None,
    }
