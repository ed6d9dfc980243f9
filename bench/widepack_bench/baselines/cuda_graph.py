"""Records calls as CUDA graphs: the eager loop for the baselines, and any other call for measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import Unavailable
from ..measure.answers import Run
from .members import loop

WARM_UP = 3  # Calls before the recording: libraries initialize in the first ones.


def cuda_graph_loop(modules: Sequence[nn.Module], each: bool) -> Run:
    """Records all N calls and the stacking as one graph, at the first call of each shape.

    Modules without parameters and buffers run where their inputs are.
    Raises: Unavailable for modules that are not on a CUDA device.
    """
    device = next((t.device for m in modules for t in (*m.parameters(), *m.buffers())), None)
    if device is not None:
        _check(device, "the members are")
    return recorded(loop(modules, each))


def recorded(run: Run) -> Run:
    """Records a call as one graph, at the first call of each shape.

    A call copies its inputs into the recorded inputs, replays the graph, and returns the recorded outputs.
    The next call overwrites them. Raises (at a call): Unavailable for inputs that are not on a CUDA device.
    """
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        key = tuple((v.shape, v.dtype) for v in tensors)
        if key not in graphs:
            for value in tensors[:1]:
                _check(value.device, "the inputs are")
            graphs[key] = _record(run, args, kwargs)
        graph, inputs, outputs = graphs[key]
        for target, value in zip(inputs, tensors, strict=True):
            target.copy_(value)
        graph.replay()
        return outputs

    return call


def _check(device: torch.device, what: str) -> None:
    if device.type != "cuda":
        raise Unavailable(f"a CUDA graph needs a CUDA device, and {what} on {device.type}")


def _record(
    run: Run, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Any]:
    values, shape = pytree.tree_flatten((args, dict(kwargs)))
    values = [v.clone() if isinstance(v, Tensor) else v for v in values]
    recorded_args, recorded_kwargs = pytree.tree_unflatten(values, shape)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run(*recorded_args, **recorded_kwargs)
    torch.cuda.current_stream().wait_stream(side)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(
            graph, capture_error_mode="thread_local"
        ):  # The default mode would break other threads of the process.
            outputs = run(*recorded_args, **recorded_kwargs)
    finally:
        torch.cuda.set_stream(stream)  # A capture that fails leaves its own stream as the current one.
    return graph, [v for v in values if isinstance(v, Tensor)], outputs
