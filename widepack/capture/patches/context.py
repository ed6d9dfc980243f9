"""Replaces functions of torch that torch.export cannot follow, while a member is exported.

The answers of these functions depend on no value, but torch's own code reads values or fixes sizes. The
replacements give the same answers. Some work during the export; others rewrite the exported graph before it
is made functional.

| what | why torch.export cannot follow | replacement |
|---|---|---|
| `nn.Transformer`'s check for a causal mask | branches on values for speed | the mask is used as it is |
| `take_along_dim` | torch's code fixes the sizes | broadcast, then gather |
| `cdist` | torch chooses a kernel by the number of rows | the op below it, which chooses at run time |
| `max_pool1d` | torch's code fixes the pooled length | if that is dynamic, `max_pool2d` of one row |
| `linspace` with a size as its number of steps | torch fixes the number | the same numbers from `arange` |
| `div` of two sizes with rounding | makes a tensor whose value is a size again | the sizes divided |
| `as_strided` | reads memory, whose layout differs for several members | look-ups by place |
| `x[:, k] = v` with a number in a tensor | branches on its value | `tensor_index.py` |
| a batch norm that trains with `momentum=None` | reads a number from a tensor | the number as a tensor |
| an embedding with `max_norm` | writes into its weight | rows are bounded before the look-up |
| a part whose name is a keyword of Python | fx writes `self.class` | `getattr(self, "class")` |
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...ir.torch_internals import aten_packet, keywords_in_names, op_base_name, replaced_causal_mask_check
from .tensor_index import SET_ITEM, set_item


def _declared_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller declared the mask as causal."""
    return is_causal is True


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None, **more: Any) -> Tensor:
    """`take_along_dim` by gather: all dims but one broadcast."""
    if dim is None or more or x.ndim != indices.ndim or not -x.ndim <= dim < x.ndim:
        return _TAKE_ALONG_DIM(x, indices, dim, **more)
    dim %= x.ndim
    shape = [
        max(a, b) if isinstance(a, int) and isinstance(b, int) else b if isinstance(a, int) and a == 1 else a
        for a, b in zip(x.shape, indices.shape)
    ]
    expanded = [-1 if d == dim else s for d, s in enumerate(shape)]
    return x.expand(expanded).gather(dim, indices.expand(expanded))


def _cdist(
    x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> Tensor:
    """`cdist` without its choice between two kernels, which differ only in their derivatives.

    The op below it makes the same choice again when it runs.
    """
    if compute_mode not in _MODES:
        return _CDIST(x1, x2, p, compute_mode)
    distances: Tensor = aten_packet("_cdist_forward").default(x1, x2, p, _MODES[compute_mode])
    return distances


def _max_pool1d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """`max_pool1d` as `max_pool2d` of one row, where the length is dynamic."""
    length: Any = x.shape[-1]
    if isinstance(length, int):
        return _POOL(x, kernel_size, stride, padding, dilation, ceil_mode)

    def row(v: Any, other: int) -> list[int]:
        return [other, *(v if isinstance(v, (tuple, list)) else (v,))]

    steps = row(kernel_size if stride is None or stride == [] else stride, 1)
    return torch.max_pool2d(
        x.unsqueeze(-2), row(kernel_size, 1), steps, row(padding, 0), row(dilation, 1), ceil_mode
    ).squeeze(-2)


def _linspace(
    start: Any, end: Any, steps: Any, *args: Any, dtype: torch.dtype | None = None, **more: Any
) -> Tensor:
    """`linspace` by arange, where the number of steps is a dynamic size.

    As in torch, the first half counts from the start and the second half from the end.
    """
    dtype = dtype or torch.get_default_dtype()
    plain = not args and set(more) <= {"device"} and dtype in (torch.float32, torch.float64)
    if (
        not isinstance(steps, torch.SymInt)
        or not plain
        or isinstance(start, Tensor)
        or isinstance(end, Tensor)
    ):
        return _LINSPACE(start, end, steps, *args, dtype=dtype, **more)
    a, b = (_rounded(v, dtype) for v in (start, end))
    i = torch.arange(steps, dtype=torch.float64, device=more.get("device"))  # type: ignore[call-overload]  # a size is a number to export
    last = i[-1:].clamp(min=1)
    step = ((b - a) / last).to(dtype).double()
    return torch.where(2 * i + 1 <= last, a + step * i, b - step * (last - i)).to(dtype)


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    """Returns a number rounded to the precision of this dtype."""
    return (
        struct.unpack("f", struct.pack("f", number))[0]
        if isinstance(number, (int, float)) and dtype == torch.float32
        else number
    )


def _div(x: Any, y: Any, *args: Any, rounding_mode: str | None = None, **more: Any) -> Any:
    """`div` that gives a size where it divides sizes with rounding. Torch's tensor would be data.

    Sizes are positive, so `trunc` and `floor` are the same.
    """
    whole = all(isinstance(v, (int, torch.SymInt)) for v in (x, y)) and any(
        isinstance(v, torch.SymInt) for v in (x, y)
    )
    if whole and rounding_mode in ("trunc", "floor") and not args and not more:
        return x // y
    return _DIV(x, y, *args, rounding_mode=rounding_mode, **more)


def _batch_norm(self: _BatchNorm, input: Tensor) -> Tensor:  # a call may use the parameter's name
    """Forward of batch norm, where running statistics are the mean of all batches (`momentum=None`)."""
    if (
        not torch.compiler.is_exporting()
        or self.momentum is not None
        or not self.training
        or self.num_batches_tracked is None
    ):
        return _BATCH_NORM(self, input)
    self._check_input_dim(input)  # type: ignore[no-untyped-call]
    self.num_batches_tracked.add_(1)
    assert self.running_mean is not None and self.running_var is not None
    batch = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    y = torch.nn.functional.batch_norm(input, *batch, self.weight, self.bias, True, 1.0, self.eps)
    for running, new in zip((self.running_mean, self.running_var), batch):
        running.add_((new - running) / self.num_batches_tracked.to(running.dtype))
    return y


def by_places(x: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> Tensor:
    """`x.as_strided(size, stride, offset)` as a look-up, where the memory is in the value's own order.

    A place outside the value is refused by the look-up when it runs.
    Raises: NotImplementedError for memory in another order.
    """
    return x.reshape(-1)[_places(x, size, stride, offset)]


def scattered_by_places(
    x: Tensor, src: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> Tensor:
    """`x.as_strided_scatter(src, size, stride, offset)` by places, as `by_places` reads them."""
    places = _places(x, size, stride, offset)
    return x.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1)).reshape(x.shape)


def _places(x: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> Tensor:
    """Returns the places in the flat value that a strided view shows. Raises: NotImplementedError."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        raise NotImplementedError(
            "as_strided of a view reads memory that the view does not show; call .contiguous() before it, or "
            "write it as unfold or indexing"
        )
    places: Any = offset or 0
    for d, (n, step) in enumerate(zip(size, stride)):
        places = places + (torch.arange(n, device=x.device) * step).reshape(
            [-1 if k == d else 1 for k in range(len(size))]
        )
    if isinstance(places, Tensor):
        return places
    return torch.full((), places, dtype=torch.int64, device=x.device)


_TAKE_ALONG_DIM = torch.take_along_dim
_BATCH_NORM = _BatchNorm.forward
_POOL, _LINSPACE, _DIV, _CDIST = torch.max_pool1d, torch.linspace, torch.div, torch.cdist
_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}
_ALIASES = {"detach", "alias", "contiguous", "lift_fresh_copy"}


@contextmanager
def exportable() -> Iterator[None]:
    """Replaces the functions of torch in this module's table, inside a with block."""
    method = Tensor.take_along_dim
    torch.take_along_dim = _take_along_dim  # type: ignore[assignment]
    Tensor.take_along_dim = _take_along_dim  # type: ignore[method-assign, assignment]
    torch.max_pool1d = _max_pool1d  # type: ignore[assignment]
    torch.linspace = _linspace  # type: ignore[assignment]
    torch.div = _div  # type: ignore[assignment]
    torch.cdist = torch.functional.cdist = _cdist
    Tensor.__setitem__ = set_item  # type: ignore[method-assign, assignment]
    _BatchNorm.forward = _batch_norm  # type: ignore[method-assign]
    try:
        with replaced_causal_mask_check(_declared_causal), keywords_in_names():
            yield
    finally:
        _BatchNorm.forward = _BATCH_NORM  # type: ignore[method-assign]
        torch.take_along_dim = _TAKE_ALONG_DIM
        torch.max_pool1d = _POOL
        torch.linspace, torch.div = _LINSPACE, _DIV
        torch.cdist = torch.functional.cdist = _CDIST
        Tensor.take_along_dim = method  # type: ignore[method-assign]
        Tensor.__setitem__ = SET_ITEM  # type: ignore[method-assign]


def bound_embeddings(exported: torch.export.ExportedProgram) -> None:
    """Replaces `embedding_renorm_(w, ids); embedding(w, ids)` by `embedding(renorm(w), ids)` in an exported
    graph.

    Embedding bags are rewritten too. The graph must not be functional yet.
    """
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or op_base_name(node.target) != "embedding_renorm_":
            continue
        written, ids, most, p = node.args
        weight = _origin(written)
        with graph.inserting_before(node):
            bounded = graph.call_function(torch.ops.aten.renorm.default, (weight, p, 0, most))
            bounded.meta.update(weight.meta | {"stack_trace": node.meta.get("stack_trace", "")})
        for user in list(weight.users):
            is_lookup = op_base_name(user.target) in ("embedding", "embedding_bag")
            if is_lookup and _origin(user.args[1]) is _origin(ids):
                user.replace_input_with(weight, bounded)
        node.replace_all_uses_with(bounded)
        graph.erase_node(node)
    exported.graph_module.recompile()


def _origin(node: Any) -> Any:
    """Returns the node whose value a chain of aliases passes on."""
    while isinstance(node, torch.fx.Node) and op_base_name(node.target) in _ALIASES:
        node = node.args[0]
    return node
