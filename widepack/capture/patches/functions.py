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
| `cov`, `corrcoef` | look whether weights are 0 or less | (x - m) diag(w) (x - m)^H / norm, m: mean |
| `gradient` with even spacing | fixes the size of the dim | central differences, one-sided at both ends |
| `linalg.multi_dot`, `chain_matmul` | branch on sizes | the product, in an order that suits large sizes |
| `linalg.tensorinv` | asserts on values | the inverse of a matrix of all rows and columns |
| `triu_indices`, `tril_indices` | fix the size | rows repeated as often as they have columns |
| `torch.tensor` of a list of tensors | reads their values | their stack |
| `torch.normal` of a size | an op of torch.export alone | `normal_` of a new tensor |
| `math.sqrt` of a size | fixes the size | n ** 0.5 |
| `math.floor`, `math.ceil` of a quotient of sizes | a condition that is no arithmetic | n // d, -(-n // d) |
| `torch.sym_int` of a part of a size, in `interpolate` | a condition that is no arithmetic | n * a // b |
"""

from __future__ import annotations

import functools
import keyword
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch._decomp import decompositions
from torch.fx import graph as fx_graph
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm

from ...ir.guards import ratio_of
from ...ir.torch_internals import (
    aten_packet,
    check_while_exporting,
    op_base_name,
    same_size,
    surely_larger,
    traced_tensor,
)
from .tensor_index import set_item

_MODES = {
    "use_mm_for_euclid_dist_if_necessary": None,
    "use_mm_for_euclid_dist": 1,
    "donot_use_mm_for_euclid_dist": 2,
}
_ALIASES = {"detach", "alias", "contiguous", "lift_fresh_copy"}
_LARGE = 4096  # stands for a dynamic size in the choice of the order of products


def _declared_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller declared the mask as causal."""
    return is_causal is True


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None, **more: Any) -> Any:
    """`take_along_dim` by gather: all dims but one broadcast."""
    if dim is None or more or x.ndim != indices.ndim or not -x.ndim <= dim < x.ndim:
        return _ORIGINALS[torch, "take_along_dim"](x, indices, dim, **more)
    dim %= x.ndim
    shape = [
        max(a, b) if isinstance(a, int) and isinstance(b, int) else b if isinstance(a, int) and a == 1 else a
        for a, b in zip(x.shape, indices.shape)
    ]
    expanded = [-1 if d == dim else s for d, s in enumerate(shape)]
    return x.expand(expanded).gather(dim, indices.expand(expanded))


def _cdist(
    x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> Any:
    """`cdist` without its choice between two kernels, which differ only in their derivatives.

    The op below it makes the same choice again when it runs.
    """
    if compute_mode not in _MODES:
        return _ORIGINALS[torch, "cdist"](x1, x2, p, compute_mode)
    distances: Tensor = aten_packet("_cdist_forward").default(x1, x2, p, _MODES[compute_mode])
    return distances


def _max_pool1d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    """`max_pool1d` as `max_pool2d` of one row, where the length is dynamic."""
    length: Any = x.shape[-1]
    if isinstance(length, int):
        return _ORIGINALS[torch, "max_pool1d"](x, kernel_size, stride, padding, dilation, ceil_mode)

    def row(v: Any, other: int) -> list[int]:
        return [other, *(v if isinstance(v, (tuple, list)) else (v,))]

    steps = row(kernel_size if stride is None or stride == [] else stride, 1)
    return torch.max_pool2d(
        x.unsqueeze(-2), row(kernel_size, 1), steps, row(padding, 0), row(dilation, 1), ceil_mode
    ).squeeze(-2)


def _linspace(
    start: Any, end: Any, steps: Any, *args: Any, dtype: torch.dtype | None = None, **more: Any
) -> Any:
    """`linspace` by arange, where the number of steps is a dynamic size.

    As in torch, the first half counts from the start and the second half from the end.
    """
    dtype = dtype or torch.get_default_dtype()
    plain = not args and set(more) <= {"device"} and dtype in (torch.float32, torch.float64)
    plain = plain and not isinstance(start, Tensor) and not isinstance(end, Tensor)
    if not plain or not isinstance(steps, torch.SymInt):
        return _ORIGINALS[torch, "linspace"](start, end, steps, *args, dtype=dtype, **more)
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
    sizes = all(isinstance(v, (int, torch.SymInt)) for v in (x, y))
    whole = sizes and any(isinstance(v, torch.SymInt) for v in (x, y))
    if whole and rounding_mode in ("trunc", "floor") and not args and not more:
        return x // y
    return _ORIGINALS[torch, "div"](x, y, *args, rounding_mode=rounding_mode, **more)


def _batch_norm(self: _BatchNorm, input: Tensor) -> Any:  # a call may use the parameter's name
    """Forward of batch norm, where running statistics are the mean of all batches (`momentum=None`)."""
    averages = self.training and self.momentum is None and self.num_batches_tracked is not None
    if not averages or not torch.compiler.is_exporting():
        return _ORIGINALS[_BatchNorm, "forward"](self, input)
    self._check_input_dim(input)  # type: ignore[no-untyped-call]
    assert self.running_mean is not None and self.running_var is not None
    assert self.num_batches_tracked is not None
    self.num_batches_tracked.add_(1)
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
        shape = [-1 if k == d else 1 for k in range(len(size))]
        places = places + (torch.arange(n, device=x.device) * step).reshape(shape)
    if isinstance(places, Tensor):
        return places
    return torch.full((), places, dtype=torch.int64, device=x.device)


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Any:
    """Covariance: rows are variables, `[V, S]` -> `[V, V]`; a vector is one variable, -> `[]`."""
    if input.ndim > 2 or any(w is not None and w.ndim > 1 for w in (fweights, aweights)):
        options: Any = {"correction": correction, "fweights": fweights, "aweights": aweights}
        return _ORIGINALS[torch, "cov"](input, **options)  # raises torch's error
    x = input if input.ndim == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any = x.shape[1] if weights is None else weights.sum()
    weighted = x if weights is None else x * weights
    mean = weighted.sum(1, keepdim=True) / total
    x = x - mean
    norm = total
    if correction and weights is not None and aweights is not None:
        norm = total - correction * ((weights * aweights).sum() / total)
    elif aweights is None:
        norm = total - correction
    if not isinstance(norm, Tensor):
        norm = torch.scalar_tensor(norm, dtype=torch.float64, device=x.device)
    product: Tensor = x @ (x if weights is None else x * weights).mT.conj()
    return (product / norm.clamp(min=0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Correlation coefficients: `cov`, scaled by the standard deviations."""
    c: Tensor = cov(input)
    if c.ndim == 0:
        return c / c
    scale = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / scale[:, None] / scale[None]
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def gradient(input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Returns one derivative for each dim, each of the input's shape."""
    dims = list(range(input.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    steps = [spacing] * len(dims) if isinstance(spacing, (int, float)) else spacing
    even = isinstance(steps, (list, tuple)) and all(isinstance(s, (int, float)) for s in steps)
    if edge_order not in (1, 2) or not even or len(steps) != len(dims):
        more = {} if dim is None else {"dim": dim}
        return _ORIGINALS[torch, "gradient"](input, spacing=spacing, edge_order=edge_order, **more)
    return tuple(_along(input, d % max(input.ndim, 1), float(h), edge_order) for d, h in zip(dims, steps))


def _along(x: Tensor, dim: int, h: float, order: int) -> Tensor:
    """Returns the derivative along one dim. h: the spacing. order: the edge order, 1 or 2."""
    n: Any = x.shape[dim]
    check_while_exporting(
        n >= order + 1, lambda: "torch.gradient expected each dimension size to be at least edge_order+1"
    )
    first, second, last, before = (x.narrow(dim, at, 1) for at in (0, 1, n - 1, n - 2))
    if order == 1:  # each end is its own neighbour, so that no tensor here is empty at n = 2
        at = torch.arange(n, device=x.device)
        steps: Tensor = (at > 0).to(x.dtype) + (at < n - 1).to(x.dtype)
        after = torch.cat([x.narrow(dim, 1, n - 1), last], dim)
        difference = after - torch.cat([first, x.narrow(dim, 0, n - 1)], dim)
        return difference / (steps.reshape([-1 if d == dim else 1 for d in range(x.ndim)]) * h)
    middle = (x.narrow(dim, 2, n - 2) - x.narrow(dim, 0, n - 2)) / (2 * h)
    third, third_last = x.narrow(dim, 2, 1), x.narrow(dim, n - 3, 1)
    begin = (-1.5 * first + 2 * second - 0.5 * third) / h
    return torch.cat([begin, middle, (1.5 * last - 2 * before + 0.5 * third_last) / h], dim)


def multi_dot(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Any:
    """`[A, B], [B, C], ... -> [A, ..., Z]`; the first and the last may be vectors."""
    parts = list(tensors)
    static = all(isinstance(s, int) for t in parts for s in t.shape)
    matrices = all(t.ndim == 2 for t in parts[1:-1]) and all(t.ndim in (1, 2) for t in parts)
    if out is not None or static or len(parts) < 2 or not matrices:
        return _ORIGINALS[torch.linalg, "multi_dot"](tensors, out=out)
    row, column = parts[0].ndim == 1, parts[-1].ndim == 1
    parts[0] = parts[0].unsqueeze(0) if row else parts[0]
    parts[-1] = parts[-1].unsqueeze(1) if column else parts[-1]
    product = _product(parts)
    product = product.squeeze(-1) if column else product
    return product.squeeze(0) if row else product


def chain_matmul(*matrices: Tensor, out: Tensor | None = None) -> Any:
    """The older form of `multi_dot`."""
    if len(matrices) < 2 or any(m.ndim != 2 for m in matrices) or out is not None:
        return _ORIGINALS[torch, "chain_matmul"](*matrices, out=out)
    return multi_dot(matrices)


def _product(parts: Sequence[Tensor]) -> Tensor:
    """Multiplies in the order with the fewest multiplications. best[i, j] is (cost, split) of the parts i to
    j.
    """
    sizes = [s if isinstance(s, int) else _LARGE for s in (*(p.shape[0] for p in parts), parts[-1].shape[1])]
    best: dict[tuple[int, int], tuple[int, int]] = {(i, i): (0, i) for i in range(len(parts))}
    for length in range(1, len(parts)):
        for i in range(len(parts) - length):
            j = i + length
            best[i, j] = min(
                (best[i, k][0] + best[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k)
                for k in range(i, j)
            )

    def multiply(i: int, j: int) -> Tensor:
        k = best[i, j][1]
        return parts[i] if i == j else multiply(i, k) @ multiply(k + 1, j)

    return multiply(0, len(parts) - 1)


def tensorinv(input: Tensor, ind: int = 2, *, out: Tensor | None = None) -> Any:
    """The inverse of a tensor whose first `ind` dims are the rows."""
    rows, columns = input.shape[:ind], input.shape[ind:]
    if out is not None or ind <= 0 or math.prod(rows) != math.prod(columns):
        return _ORIGINALS[torch.linalg, "tensorinv"](input, ind, out=out)
    n = math.prod(rows)
    return torch.linalg.inv(input.reshape(n, n)).reshape(*columns, *rows)


def triu_indices(row: Any, col: Any, offset: Any = 0, **options: Any) -> Any:
    """The places of an upper triangle, `[2, P]`, also of dynamic sizes."""
    if not any(isinstance(n, torch.SymInt) for n in (row, col, offset)):
        return _ORIGINALS[torch, "triu_indices"](row, col, offset, **options)
    lines = torch.arange(row, device=options.get("device"))
    first = (lines + offset).clamp(min=0)
    return _triangle(lines, first, (col - first).clamp(min=0), _count(row, col, offset), options)


def tril_indices(row: Any, col: Any, offset: Any = 0, **options: Any) -> Any:
    """The places of a lower triangle, `[2, P]`, also of dynamic sizes."""
    if not any(isinstance(n, torch.SymInt) for n in (row, col, offset)):
        return _ORIGINALS[torch, "tril_indices"](row, col, offset, **options)
    lines = torch.arange(row, device=options.get("device"))
    counts = (lines + offset + 1).clamp(min=0, max=col)
    return _triangle(lines, torch.zeros_like(lines), counts, _count(row, col, -offset), options)


def _count(row: Any, col: Any, offset: Any) -> Any:
    """The number of places of an upper triangle; None where it is no simple formula."""
    if offset not in (-1, 0, 1) or not same_size(row, col):
        return None
    return row * (row - 1) // 2 if offset == 1 else row * (row + 1) // 2 - offset * (row - 1)


def _triangle(lines: Tensor, first: Tensor, counts: Tensor, places: Any, options: dict[str, Any]) -> Tensor:
    """Returns `[2, P]`. Each line of a matrix has `counts` places, from column `first` on."""
    rows = torch.repeat_interleave(lines, counts, output_size=places)
    before = (counts.cumsum(0) - counts - first).index_select(0, rows)
    columns = torch.arange(rows.shape[0], device=rows.device) - before
    return torch.stack([rows, columns]).to(options.get("dtype") or torch.int64)


def tensor(data: Any, **options: Any) -> Any:
    """`torch.tensor`, also of nested lists of dynamic sizes and of tensors without dims, as torch traces
    them.
    """
    parts = pytree.tree_leaves(data) if isinstance(data, (list, tuple)) else [data]
    computed = any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in parts)
    computed |= isinstance(data, (list, tuple)) and any(isinstance(v, Tensor) and v.ndim == 0 for v in parts)
    make = traced_tensor() if computed else _ORIGINALS[torch, "tensor"]
    return make(data, **options)


def normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Any:
    """`torch.normal`, also of a size."""
    if size is None:
        return _ORIGINALS[torch, "normal"](mean, std, **options)
    generator = options.pop("generator", None)
    return torch.empty(size, **options).normal_(mean, std, generator=generator)


def sqrt(x: Any) -> Any:
    """`math.sqrt`, also of a dynamic size."""
    return x**0.5 if isinstance(x, (torch.SymInt, torch.SymFloat)) else _ORIGINALS[math, "sqrt"](x)


def quotient(a: Any, b: Any) -> Any:
    """Divides a dynamic size, and notes both sides in the result for `floor`, `ceil` and `sym_int`."""
    result = _ORIGINALS[torch.SymInt, "__truediv__"](a, b)
    if isinstance(result, torch.SymFloat) and isinstance(b, (int, torch.SymInt)):
        setattr(result, _SIDES, (a, b))
    return result


def product(a: Any, b: Any) -> Any:
    """Multiplies a dynamic size; by a float, notes the sides of the same quotient as `quotient` does."""
    result = _ORIGINALS[torch.SymInt, "__mul__"](a, b)
    ratio = ratio_of(b) if isinstance(b, float) and isinstance(result, torch.SymFloat) else None
    if ratio is not None:
        setattr(result, _SIDES, (a * ratio.numerator, ratio.denominator))
    return result


_SIDES = "_widepack_quotient"


def sym_float(x: Any) -> Any:
    """`torch.sym_float`; a dynamic size stays one, for `product`."""
    return x if isinstance(x, torch.SymInt) else _ORIGINALS[decompositions, "sym_float"](x)


def floor(x: Any) -> Any:
    """`math.floor`; of a quotient of sizes as `//`."""
    sides = getattr(x, _SIDES, None)
    return sides[0] // sides[1] if sides else _ORIGINALS[torch.SymFloat, "__floor__"](x)


def ceil(x: Any) -> Any:
    """`math.ceil`; of a quotient of sizes by `//`."""
    sides = getattr(x, _SIDES, None)
    return -(-sides[0] // sides[1]) if sides else _ORIGINALS[torch.SymFloat, "__ceil__"](x)


def sym_int(x: Any) -> Any:
    """`torch.sym_int`; of a quotient of sizes that is surely not negative as `//`."""
    sides = getattr(x, _SIDES, None)
    if sides and all(surely_larger(side, -1) for side in sides):
        return sides[0] // sides[1]
    return _ORIGINALS[torch, "sym_int"](x)


def _target_text(base: str, target: str) -> str:
    """Returns the code by which fx reads a part of a module.

    fx writes `self.heads.class`, which is no Python (`nn.ModuleDict({"class": ...})`).
    """

    def attribute(code: str, name: str) -> str:
        plain = name.isidentifier() and not keyword.iskeyword(name)
        return f"{code}.{name}" if plain else f'getattr({code}, "{name}")'

    return functools.reduce(attribute, target.split("."), base)


REPLACEMENTS: dict[tuple[Any, str], Any] = {
    (torch, "take_along_dim"): _take_along_dim,
    (Tensor, "take_along_dim"): _take_along_dim,
    (torch, "max_pool1d"): _max_pool1d,
    (torch, "linspace"): _linspace,
    (torch, "div"): _div,
    (torch, "cdist"): _cdist,
    (torch.functional, "cdist"): _cdist,
    (Tensor, "__setitem__"): set_item,
    (_BatchNorm, "forward"): _batch_norm,
    (transformer, "_detect_is_causal_mask"): _declared_causal,
    (fx_graph, "_format_target"): _target_text,
    (torch, "cov"): cov,
    (Tensor, "cov"): cov,
    (torch, "corrcoef"): corrcoef,
    (Tensor, "corrcoef"): corrcoef,
    (torch, "gradient"): gradient,
    (torch.linalg, "multi_dot"): multi_dot,
    (torch, "chain_matmul"): chain_matmul,
    (torch.linalg, "tensorinv"): tensorinv,
    (torch, "triu_indices"): triu_indices,
    (torch, "tril_indices"): tril_indices,
    (torch, "tensor"): tensor,
    (torch, "normal"): normal,
    (math, "sqrt"): sqrt,
    (torch.SymInt, "__truediv__"): quotient,
    (torch.SymInt, "__mul__"): product,
    (torch.SymInt, "__rmul__"): product,
    (torch, "sym_int"): sym_int,
    (F, "_sym_int"): sym_int,
    (decompositions, "sym_int"): sym_int,
    (decompositions, "sym_float"): sym_float,
    (torch.SymFloat, "__floor__"): floor,
    (torch.SymFloat, "__ceil__"): ceil,
}
"""What stands in the place of functions during an export: (owner, name) -> function."""
_ORIGINALS: dict[tuple[Any, str], Callable[..., Any]] = {p: getattr(*p) for p in REPLACEMENTS}


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
