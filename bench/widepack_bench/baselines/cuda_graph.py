"""Records the eager loop as one CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import Unavailable
from ..measure.answers import Run
from .loop import loop

WARM_UP = 3  # Calls before the recording: libraries initialize in the first ones.


def cuda_graph_loop(modules: Sequence[nn.Module], each: bool) -> Run:
    """Records all N calls and the stacking as one graph, at the first call of each shape.

    A call copies its inputs into the recorded inputs, replays the graph, and returns the recorded outputs.
    The next call overwrites them. Raises: Unavailable for modules that are not on a CUDA device.
    """
    device = next((t.device for m in modules for t in (*m.parameters(), *m.buffers())), torch.device("cpu"))
    if device.type != "cuda":
        raise Unavailable(f"a CUDA graph needs a CUDA device, and the members are on {device.type}")
    eager = loop(modules, each)
    recorded: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        key = tuple((v.shape, v.dtype) for v in tensors)
        if key not in recorded:
            recorded[key] = _record(eager, args, kwargs)
        graph, inputs, outputs = recorded[key]
        for target, value in zip(inputs, tensors, strict=True):
            target.copy_(value)
        graph.replay()
        return outputs

    return run


def _record(
    eager: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
    values, shape = pytree.tree_flatten((args, dict(kwargs)))
    values = [v.clone() if isinstance(v, Tensor) else v for v in values]
    recorded_args, recorded_kwargs = pytree.tree_unflatten(values, shape)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            eager(*recorded_args, **recorded_kwargs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(
        graph, capture_error_mode="thread_local"
    ):  # The default mode would break other threads of the process.
        outputs = eager(*recorded_args, **recorded_kwargs)
    return graph, [v for v in values if isinstance(v, Tensor)], outputs
