"""Functions of torch whose own code asks for values, or fixes the sizes that it is given: the same in tensor operations, while an export runs.

| function | why not torch's own | equation |
|---|---|---|
| cov, corrcoef | look whether weights are 0 or less | C = (x - m) diag(w) (x - m)^H / norm, m the weighted mean |
| gradient with even spacing | fixes the size of the dim | central differences, one-sided at both ends |
| linalg.multi_dot, chain_matmul | the order of the products hangs on the sizes | a product of matrices, in the order that is cheapest where dynamic sizes are large |
| linalg.tensorinv | asserts on values | the inverse of a matrix of all rows and columns |
| math.sqrt of a size | fixes the size | n ** 0.5 |
| math.floor, math.ceil of the quotient of two sizes | a condition that is no arithmetic over sizes | n // d, -(-n // d) |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LARGE = 4096  # what a dynamic size is taken for where the order of products is chosen


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """Rows are variables `[V, S]` -> `[V, V]`; a vector is one variable -> `[]`."""
    if input.ndim > 2 or any(w is not None and w.ndim > 1 for w in (fweights, aweights)):
        return _OWN[torch, "cov"](input, correction=correction, fweights=fweights, aweights=aweights)  # type: ignore[no-any-return]  # which says what is wrong
    x = input if input.ndim == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any = x.shape[1] if weights is None else weights.sum()
    weighted = x if weights is None else x * weights
    mean = weighted.sum(1, keepdim=True) / total
    x = x - mean
    spread = total if aweights is None or weights is None or correction == 0 else (weights * aweights).sum() / total
    norm = total - correction * (1 if aweights is None else spread if correction else 0)
    norm = torch.scalar_tensor(norm, dtype=torch.float64, device=x.device) if not isinstance(norm, Tensor) else norm
    made: Tensor = x @ (x if weights is None else x * weights).mT.conj()
    return (made / norm.clamp(min=0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    c = cov(input)
    if c.ndim == 0:
        return c / c
    scale = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / scale[:, None] / scale[None]
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def gradient(input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """One derivative a dim, each of the input's shape."""
    dims = list(range(input.ndim)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    steps = [spacing] * len(dims) if isinstance(spacing, (int, float)) else list(spacing) if isinstance(spacing, (list, tuple)) else []
    if edge_order not in (1, 2) or len(steps) != len(dims) or not all(isinstance(s, (int, float)) for s in steps):
        given = {} if dim is None else {"dim": dim}
        return _OWN[torch, "gradient"](input, spacing=spacing, edge_order=edge_order, **given)
    return tuple(_along(input, d % max(input.ndim, 1), float(h), edge_order) for d, h in zip(dims, steps))


def _along(x: Tensor, dim: int, h: float, order: int) -> Tensor:
    n: Any = x.shape[dim]
    torch._check(n >= order + 1, lambda: "torch.gradient expected each dimension size to be at least edge_order+1")  # type: ignore[no-untyped-call]
    first, second, last, before = (x.narrow(dim, at, 1) for at in (0, 1, n - 1, n - 2))
    if order == 1:  # neighbours on both sides, the ends their own: nothing here is empty at n = 2
        at = torch.arange(n, device=x.device)
        steps: Tensor = ((at > 0).to(x.dtype) + (at < n - 1).to(x.dtype)).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        difference = torch.cat([x.narrow(dim, 1, n - 1), last], dim) - torch.cat([first, x.narrow(dim, 0, n - 1)], dim)
        return difference / (steps * h)
    middle = (x.narrow(dim, 2, n - 2) - x.narrow(dim, 0, n - 2)) / (2 * h)
    third, third_last = x.narrow(dim, 2, 1), x.narrow(dim, n - 3, 1)
    begin = (-1.5 * first + 2 * second - 0.5 * third) / h
    return torch.cat([begin, middle, (1.5 * last - 2 * before + 0.5 * third_last) / h], dim)


def multi_dot(tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """`[A, B], [B, C], ... -> [A, ..., Z]`; the first and the last may be vectors."""
    parts = list(tensors)
    static = all(isinstance(s, int) for t in parts for s in t.shape)
    if out is not None or static or len(parts) < 2 or any(t.ndim != 2 for t in parts[1:-1]) or any(t.ndim not in (1, 2) for t in parts):
        return _OWN[torch.linalg, "multi_dot"](tensors, out=out)  # type: ignore[no-any-return]
    row, column = parts[0].ndim == 1, parts[-1].ndim == 1
    parts[0] = parts[0].unsqueeze(0) if row else parts[0]
    parts[-1] = parts[-1].unsqueeze(1) if column else parts[-1]
    made = _product(parts)
    made = made.squeeze(-1) if column else made
    return made.squeeze(0) if row else made


def chain_matmul(*matrices: Tensor, out: Tensor | None = None) -> Tensor:
    if len(matrices) < 2 or any(m.ndim != 2 for m in matrices) or out is not None:
        return _OWN[torch, "chain_matmul"](*matrices, out=out)  # type: ignore[no-any-return]
    return multi_dot(matrices)


def _product(parts: Sequence[Tensor]) -> Tensor:
    """The product in the order of fewest multiplications: best[i, j] of the parts i to j."""
    sizes = [s if isinstance(s, int) else _LARGE for s in (*(p.shape[0] for p in parts), parts[-1].shape[1])]
    best: dict[tuple[int, int], tuple[int, int]] = {(i, i): (0, i) for i in range(len(parts))}
    for length in range(1, len(parts)):
        for i in range(len(parts) - length):
            j = i + length
            best[i, j] = min((best[i, k][0] + best[k + 1, j][0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))

    def of(i: int, j: int) -> Tensor:
        k = best[i, j][1]
        return parts[i] if i == j else of(i, k) @ of(k + 1, j)

    return of(0, len(parts) - 1)


def tensorinv(input: Tensor, ind: int = 2, *, out: Tensor | None = None) -> Tensor:
    rows, columns = input.shape[:ind], input.shape[ind:]
    if out is not None or ind <= 0 or math.prod(rows) != math.prod(columns):
        return _OWN[torch.linalg, "tensorinv"](input, ind, out=out)  # type: ignore[no-any-return]
    n = math.prod(rows)
    inverse: Tensor = torch.linalg.inv(input.reshape(n, n))
    return inverse.reshape(*columns, *rows)


def sqrt(x: Any) -> Any:
    return x**0.5 if isinstance(x, (torch.SymInt, torch.SymFloat)) else _OWN[math, "sqrt"](x)


def quotient(a: Any, b: Any) -> Any:
    """A size by a whole number, which knows what it was made of."""
    made = _OWN[torch.SymInt, "__truediv__"](a, b)
    if isinstance(made, torch.SymFloat) and isinstance(b, (int, torch.SymInt)):
        made._quotient = (a, b)  # type: ignore[attr-defined]
    return made


def floor(x: Any) -> Any:
    parts = getattr(x, "_quotient", None)
    return parts[0] // parts[1] if parts else _OWN[torch.SymFloat, "__floor__"](x)


def ceil(x: Any) -> Any:
    parts = getattr(x, "_quotient", None)
    return -(-parts[0] // parts[1]) if parts else _OWN[torch.SymFloat, "__ceil__"](x)


_WAYS: dict[tuple[Any, str], Any] = {
    (torch, "cov"): cov,
    (Tensor, "cov"): cov,
    (torch, "corrcoef"): corrcoef,
    (Tensor, "corrcoef"): corrcoef,
    (torch, "gradient"): gradient,
    (torch.linalg, "multi_dot"): multi_dot,
    (torch, "chain_matmul"): chain_matmul,
    (torch.linalg, "tensorinv"): tensorinv,
    (math, "sqrt"): sqrt,
    (torch.SymInt, "__truediv__"): quotient,
    (torch.SymFloat, "__floor__"): floor,
    (torch.SymFloat, "__ceil__"): ceil,
}
_OWN = {at: getattr(*at) for at in _WAYS}


@contextmanager
def whole_functions() -> Iterator[None]:
    """While an export runs."""
    for (owner, name), way in _WAYS.items():
        setattr(owner, name, way)
    try:
        yield
    finally:
        for (owner, name), own in _OWN.items():
            setattr(owner, name, own)
