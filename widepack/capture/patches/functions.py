"""Replaces functions whose own code reads values or fixes the sizes of its inputs, while a member is
exported.

The replacements use tensor operations and give the same answers.

| function | why not torch's own | equation |
|---|---|---|
| `cov`, `corrcoef` | look whether weights are 0 or less | (x - m) diag(w) (x - m)^H / norm, m: mean |
| `gradient` with even spacing | fixes the size of the dim | central differences, one-sided at both ends |
| `linalg.multi_dot`, `chain_matmul` | branch on sizes | the product, in an order that suits large sizes |
| `linalg.tensorinv` | asserts on values | the inverse of a matrix of all rows and columns |
| `triu_indices`, `tril_indices` | fix the size | rows repeated as often as they have columns |
| `torch.tensor` of a list of tensors | reads their values | their stack |
| `math.sqrt` of a size | fixes the size | n ** 0.5 |
| `math.floor`, `math.ceil` of a quotient of sizes | a condition that is no arithmetic | n // d, -(-n // d) |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ...ir.torch_internals import check_while_exporting, same_size, traced_tensor

_LARGE = 4096  # stands for a dynamic size in the choice of the order of products


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Covariance: rows are variables, `[V, S]` -> `[V, V]`; a vector is one variable, -> `[]`."""
    if input.ndim > 2 or any(w is not None and w.ndim > 1 for w in (fweights, aweights)):
        refused: Tensor = _ORIGINALS[torch, "cov"](  # raises torch's error
            input, correction=correction, fweights=fweights, aweights=aweights
        )
        return refused
    x = input if input.ndim == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any = x.shape[1] if weights is None else weights.sum()
    weighted = x if weights is None else x * weights
    mean = weighted.sum(1, keepdim=True) / total
    x = x - mean
    spread = (
        total
        if aweights is None or weights is None or correction == 0
        else (weights * aweights).sum() / total
    )
    norm = total - correction * (1 if aweights is None else spread if correction else 0)
    norm = (
        torch.scalar_tensor(norm, dtype=torch.float64, device=x.device)
        if not isinstance(norm, Tensor)
        else norm
    )
    product: Tensor = x @ (x if weights is None else x * weights).mT.conj()
    return (product / norm.clamp(min=0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Correlation coefficients: `cov`, scaled by the standard deviations."""
    c = cov(input)
    if c.ndim == 0:
        return c / c
    scale = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / scale[:, None] / scale[None]
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def gradient(input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Returns one derivative for each dim, each of the input's shape."""
    dims = list(range(input.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    steps = (
        [spacing] * len(dims)
        if isinstance(spacing, (int, float))
        else list(spacing)
        if isinstance(spacing, (list, tuple))
        else []
    )
    if (
        edge_order not in (1, 2)
        or len(steps) != len(dims)
        or not all(isinstance(s, (int, float)) for s in steps)
    ):
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
        steps: Tensor = ((at > 0).to(x.dtype) + (at < n - 1).to(x.dtype)).reshape(
            [-1 if d == dim else 1 for d in range(x.ndim)]
        )
        difference = torch.cat([x.narrow(dim, 1, n - 1), last], dim) - torch.cat(
            [first, x.narrow(dim, 0, n - 1)], dim
        )
        return difference / (steps * h)
    middle = (x.narrow(dim, 2, n - 2) - x.narrow(dim, 0, n - 2)) / (2 * h)
    third, third_last = x.narrow(dim, 2, 1), x.narrow(dim, n - 3, 1)
    begin = (-1.5 * first + 2 * second - 0.5 * third) / h
    return torch.cat([begin, middle, (1.5 * last - 2 * before + 0.5 * third_last) / h], dim)


def multi_dot(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """`[A, B], [B, C], ... -> [A, ..., Z]`; the first and the last may be vectors."""
    parts = list(tensors)
    static = all(isinstance(s, int) for t in parts for s in t.shape)
    if (
        out is not None
        or static
        or len(parts) < 2
        or any(t.ndim != 2 for t in parts[1:-1])
        or any(t.ndim not in (1, 2) for t in parts)
    ):
        static_product: Tensor = _ORIGINALS[torch.linalg, "multi_dot"](tensors, out=out)
        return static_product
    row, column = parts[0].ndim == 1, parts[-1].ndim == 1
    parts[0] = parts[0].unsqueeze(0) if row else parts[0]
    parts[-1] = parts[-1].unsqueeze(1) if column else parts[-1]
    product = _product(parts)
    product = product.squeeze(-1) if column else product
    return product.squeeze(0) if row else product


def chain_matmul(*matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """The older form of `multi_dot`."""
    if len(matrices) < 2 or any(m.ndim != 2 for m in matrices) or out is not None:
        refused: Tensor = _ORIGINALS[torch, "chain_matmul"](*matrices, out=out)
        return refused
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


def tensorinv(input: Tensor, ind: int = 2, *, out: Tensor | None = None) -> Tensor:
    """The inverse of a tensor whose first `ind` dims are the rows."""
    rows, columns = input.shape[:ind], input.shape[ind:]
    if out is not None or ind <= 0 or math.prod(rows) != math.prod(columns):
        refused: Tensor = _ORIGINALS[torch.linalg, "tensorinv"](input, ind, out=out)
        return refused
    n = math.prod(rows)
    inverse: Tensor = torch.linalg.inv(input.reshape(n, n))
    return inverse.reshape(*columns, *rows)


def triu_indices(row: Any, col: Any, offset: Any = 0, **options: Any) -> Tensor:
    """The places of an upper triangle, `[2, P]`, also of dynamic sizes."""
    if not any(isinstance(n, torch.SymInt) for n in (row, col, offset)):
        fixed: Tensor = _ORIGINALS[torch, "triu_indices"](row, col, offset, **options)
        return fixed
    lines = torch.arange(row, device=options.get("device"))
    first = (lines + offset).clamp(min=0)
    return _triangle(lines, first, (col - first).clamp(min=0), _places(row, col, offset), options)


def tril_indices(row: Any, col: Any, offset: Any = 0, **options: Any) -> Tensor:
    """The places of a lower triangle, `[2, P]`, also of dynamic sizes."""
    if not any(isinstance(n, torch.SymInt) for n in (row, col, offset)):
        fixed: Tensor = _ORIGINALS[torch, "tril_indices"](row, col, offset, **options)
        return fixed
    lines = torch.arange(row, device=options.get("device"))
    counts = (lines + offset + 1).clamp(min=0, max=col)
    return _triangle(lines, torch.zeros_like(lines), counts, _places(row, col, -offset), options)


def _places(row: Any, col: Any, offset: Any) -> Any:
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


def tensor(data: Any, **options: Any) -> Tensor:
    """`torch.tensor`, also of nested lists of dynamic sizes and of tensors without dims, as torch traces
    them.
    """
    parts = pytree.tree_leaves(data) if isinstance(data, (list, tuple)) else [data]
    computed = any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in parts)
    computed |= isinstance(data, (list, tuple)) and any(isinstance(v, Tensor) and v.ndim == 0 for v in parts)
    make = traced_tensor() if computed else _ORIGINALS[torch, "tensor"]
    made: Tensor = make(data, **options)
    return made


def sqrt(x: Any) -> Any:
    """`math.sqrt`, also of a dynamic size."""
    return x**0.5 if isinstance(x, (torch.SymInt, torch.SymFloat)) else _ORIGINALS[math, "sqrt"](x)


def quotient(a: Any, b: Any) -> Any:
    """Divides a dynamic size, and notes both sides in the result for `floor` and `ceil`."""
    result = _ORIGINALS[torch.SymInt, "__truediv__"](a, b)
    if isinstance(result, torch.SymFloat) and isinstance(b, (int, torch.SymInt)):
        setattr(result, _SIDES, (a, b))
    return result


_SIDES = "_widepack_quotient"


def floor(x: Any) -> Any:
    """`math.floor`; of a quotient of sizes as `//`."""
    sides = getattr(x, _SIDES, None)
    return sides[0] // sides[1] if sides else _ORIGINALS[torch.SymFloat, "__floor__"](x)


def ceil(x: Any) -> Any:
    """`math.ceil`; of a quotient of sizes by `//`."""
    sides = getattr(x, _SIDES, None)
    return -(-sides[0] // sides[1]) if sides else _ORIGINALS[torch.SymFloat, "__ceil__"](x)


_REPLACEMENTS: dict[tuple[Any, str], Any] = {
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
    (math, "sqrt"): sqrt,
    (torch.SymInt, "__truediv__"): quotient,
    (torch.SymFloat, "__floor__"): floor,
    (torch.SymFloat, "__ceil__"): ceil,
}
_ORIGINALS = {place: getattr(*place) for place in _REPLACEMENTS}


@contextmanager
def replaced_functions() -> Iterator[None]:
    """Replaces the functions of this module's table, inside a with block."""
    for (owner, name), replacement in _REPLACEMENTS.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for (owner, name), original in _ORIGINALS.items():
            setattr(owner, name, original)
