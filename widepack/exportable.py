"""What an export cannot follow although the answer hangs on no value: put in another way of the same meaning, while an export runs or before it is functional.

| what | why | instead |
|---|---|---|
| nn.Transformer looks whether a mask is causal | branches on the mask's values, for speed alone | the mask is used as it is |
| take_along_dim | torch's own code fixes the sizes | broadcast, then gather |
| max_pool1d | torch's own code fixes the length that it pools | where that is dynamic, max_pool2d of one row |
| an embedding with max_norm | writes into its weight at every call | the weight's rows are bounded before the look-up: a row that is bounded already stays |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import transformer


def _causal_if_told(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None, **more: Any) -> Tensor:
    """The same by gather: every dim but one broadcasts."""
    if dim is None or more or x.ndim != indices.ndim or not -x.ndim <= dim < x.ndim:
        return _ORIGINAL(x, indices, dim, **more)
    dim %= x.ndim
    shape = [
        max(a, b) if isinstance(a, int) and isinstance(b, int) else b if isinstance(a, int) and a == 1 else a for a, b in zip(x.shape, indices.shape)
    ]
    of = [-1 if d == dim else s for d, s in enumerate(shape)]
    return x.expand(of).gather(dim, indices.expand(of))


def _max_pool1d(x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> Tensor:
    """The same over one row."""
    length: Any = x.shape[-1]
    if isinstance(length, int):
        return _POOL(x, kernel_size, stride, padding, dilation, ceil_mode)

    def row(v: Any, other: int) -> list[int]:
        return [other, *(v if isinstance(v, (tuple, list)) else (v,))]

    steps = row(kernel_size if stride is None or stride == [] else stride, 1)
    return torch.max_pool2d(x.unsqueeze(-2), row(kernel_size, 1), steps, row(padding, 0), row(dilation, 1), ceil_mode).squeeze(-2)


_ORIGINAL = torch.take_along_dim
_POOL = torch.max_pool1d
_ALIASES = {"detach", "alias", "contiguous", "lift_fresh_copy"}


@contextmanager
def exportable() -> Iterator[None]:
    """While an export runs: torch's own functions that it cannot follow are replaced."""
    detect, method = transformer._detect_is_causal_mask, Tensor.take_along_dim
    transformer._detect_is_causal_mask = _causal_if_told
    torch.take_along_dim = _take_along_dim  # type: ignore[assignment]
    Tensor.take_along_dim = _take_along_dim  # type: ignore[method-assign, assignment]
    torch.max_pool1d = _max_pool1d  # type: ignore[assignment]
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        torch.take_along_dim = _ORIGINAL
        torch.max_pool1d = _POOL
        Tensor.take_along_dim = method  # type: ignore[method-assign]


def bound_embeddings(exported: torch.export.ExportedProgram) -> None:
    """Replace `embedding_renorm_(w, ids); embedding(w, ids)` by `embedding(renorm(w), ids)`, in the graph as exported."""
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "_opname", "") != "embedding_renorm_":
            continue
        held, ids, most, p = node.args
        weight = held
        while weight.op == "call_function" and getattr(weight.target, "_opname", "") in _ALIASES:
            weight = weight.args[0]
        with graph.inserting_before(node):
            bounded = graph.call_function(torch.ops.aten.renorm.default, (weight, p, 0, most))
            bounded.meta.update(weight.meta | {"stack_trace": node.meta.get("stack_trace", "")})
        for user in list(weight.users):
            if getattr(user.target, "_opname", "") == "embedding" and _origin(user.args[1]) is _origin(ids):
                user.replace_input_with(weight, bounded)
        node.replace_all_uses_with(bounded)
        graph.erase_node(node)
    exported.graph_module.recompile()


def _origin(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and getattr(node.target, "_opname", "") in _ALIASES:
        node = node.args[0]
    return node
