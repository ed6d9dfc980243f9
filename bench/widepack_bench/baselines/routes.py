"""Calls of rows for several members, as a service without widepack would write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Inputs = Sequence[Tensor]


def by_dict(modules: Sequence[nn.Module], inputs: Inputs, ids: Sequence[int]) -> Any:
    """Groups the rows by member and calls each module."""
    rows: dict[int, list[int]] = {}
    for row, i in enumerate(ids):
        rows.setdefault(i, []).append(row)
    if len(rows) == 1:
        return modules[ids[0]](*inputs)
    found: list[Tensor] = []
    tree: Any = None
    for i, at in rows.items():
        leaves, tree = tree_flatten(modules[i](*(x[at] for x in inputs)))
        found = found or [y.new_empty(len(ids), *y.shape[1:]) for y in leaves]
        for whole, part in zip(found, leaves):
            whole[at] = part
    return tree_unflatten(found, tree)


def by_sort(modules: Sequence[nn.Module], inputs: Inputs, ids: Sequence[int]) -> Any:
    """Sorts the rows once and calls each module on a slice."""
    numbers = torch.tensor(ids)
    order = numbers.argsort(stable=True).to(inputs[0].device)
    ordered = [x[order] for x in inputs]
    counts = torch.bincount(numbers, minlength=len(modules)).tolist()
    answers, tree, start = [], None, 0
    for i, n in enumerate(counts):
        if n:
            leaves, tree = tree_flatten(modules[i](*(x[start : start + n] for x in ordered)))
            answers.append(leaves)
            start += n

    def placed(parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(parts))
        found = torch.empty_like(joined)
        found[order] = joined
        return found

    assert tree is not None
    return tree_unflatten([placed(parts) for parts in zip(*answers)], tree)


def gathered(
    modules: Sequence[nn.Module], wrap: Callable[[Any], Any] = lambda run: run
) -> Callable[[Inputs, Sequence[int]], Any]:
    """Returns a function that gathers the weights of each row and calls one module by `vmap`.

    wrap: changes what runs once the members' numbers are a tensor, such as `torch.compile`.
    """
    parameters, buffers = stack_module_state(list(modules))
    base = modules[0]

    def one(p: Any, b: Any, *inputs: Tensor) -> Any:
        answer = functional_call(base, (p, b), tuple(x.unsqueeze(0) for x in inputs))
        return tree_map(lambda y: y.squeeze(0), answer)

    def rows(at: Tensor, *inputs: Tensor) -> Any:
        return vmap(one)(
            {k: v[at] for k, v in parameters.items()}, {k: v[at] for k, v in buffers.items()}, *inputs
        )

    wrapped = wrap(rows)
    return lambda inputs, ids: wrapped(torch.tensor(ids, device=inputs[0].device), *inputs)
