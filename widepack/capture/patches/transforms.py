"""Replaces the levels of torch.func by autograd, while a member that takes derivatives is exported.

`torch.func.grad`, `vjp` and `jacrev` wrap tensors in levels of their own. Inside these torch reads sizes as
numbers, and so fixes dynamic dims. Here the same functions differentiate by autograd: an input becomes an
alias that requires a gradient. The answers are equal.

| what | in place of it |
|---|---|
| a level of `grad`, `vjp`, `jacrev` | an alias of each input, with `requires_grad` |
| a backward pass that frees what autograd recorded | one that keeps it: outer derivatives need it |
| `jvp`: J v | the derivative of J^T u by u, times v |
| `jacfwd` | `jacrev` |
| `F.linear` inside of `vmap`, for more than two dims | a product of rows |

Inside `torch.vmap` the levels stay, because a batched tensor cannot require a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ...ir.torch_internals import function_transforms, in_transform, replaced

_NAMES = (
    "grad_increment_nesting", "_wrap_for_grad", "_unwrap_for_grad", "_create_differentiable",
    "_autograd_grad", "_jvp_with_argnums", "jacrev", "jacfwd", "vjp",
)  # fmt: skip
_OURS = -1  # stands for a level where autograd does its work


@contextmanager
def transforms_by_autograd() -> Iterator[None]:
    """Replaces the levels of torch.func inside a with block.

    Does nothing in a torch without these names.
    """
    module = function_transforms()
    originals = {name: getattr(module, name, None) for name in _NAMES}
    table: dict[tuple[Any, str], Any] = {}
    if None not in originals.values():
        table = {(module, name): value for name, value in _replacements(module, originals).items()}
        table[torch.nn.functional, "linear"] = _linear_of(torch.nn.functional.linear)
    with replaced(table):
        yield


def _replacements(module: Any, originals: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the functions that replace those of torch, by their names."""

    @contextmanager
    def level() -> Iterator[int]:
        if in_transform():
            with originals["grad_increment_nesting"]() as number:
                yield number
        else:
            yield _OURS

    def wrap(x: Tensor, number: int) -> Any:
        return _alias(x) if number == _OURS else originals["_wrap_for_grad"](x, number)

    def unwrap(x: Tensor, number: int) -> Any:
        return x if number == _OURS else originals["_unwrap_for_grad"](x, number)

    def create(values: Any, level: int | None = None) -> Any:
        if level != _OURS:
            return originals["_create_differentiable"](values, level)
        return pytree.tree_map(lambda x: x.requires_grad_(), values)

    def derivative(
        outputs: Any, inputs: Any, weights: Any = None, retain_graph: bool = False, create_graph: bool = True
    ) -> Any:
        return originals["_autograd_grad"](outputs, inputs, weights, True, create_graph)

    def jvp(
        func: Any, primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool
    ) -> Any:
        if in_transform() or strict or argnums is not None or not isinstance(primals, tuple):
            forward: Any = originals["_jvp_with_argnums"]
            return forward(func, primals, tangents, argnums, strict=strict, has_aux=has_aux)
        out, pull, *aux = module.vjp(func, *primals, has_aux=has_aux)
        weights = pytree.tree_map(lambda y: torch.zeros_like(y).requires_grad_(), out)
        pulled = pytree.tree_leaves(pull(weights))
        flat, form = pytree.tree_flatten(weights)
        with torch.enable_grad():  # zeros, where the result does not depend on the input
            pushed = derivative(pulled, flat, pytree.tree_leaves(tangents))
        return (out, pytree.tree_unflatten(list(pushed), form), *aux)

    def jacfwd(func: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
        return module.jacrev(func, argnums, has_aux=has_aux)

    return {
        "grad_increment_nesting": level,
        "_wrap_for_grad": wrap,
        "_unwrap_for_grad": unwrap,
        "_create_differentiable": create,
        "_autograd_grad": derivative,
        "_jvp_with_argnums": jvp,
        "jacfwd": jacfwd,
    }


def _alias(x: Tensor) -> Tensor:
    """Returns a tensor by which a function can be differentiated. Outer derivatives flow through it."""
    return x.view_as(x) if x.requires_grad else x.detach()


def _linear_of(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `F.linear` that does not read sizes inside of `torch.vmap`."""

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim < 3 or not in_transform():
            return linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        y = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        return y.view(*x.shape[:-1], weight.shape[0])

    return replacement
