"""Defines what a service would write itself to answer rows of several members: the baselines of `route`.

Each function takes the members' modules, the inputs of a call, and the member of each row. The batch is axis
0 of every input and of every tensor of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import widepack

Inputs = Sequence[Tensor]

GATHERED = 64 * 2**20
"""The most bytes of weights that the baseline `vmap` gathers for a call."""


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


def gathered(modules: Sequence[nn.Module]) -> Callable[[Inputs, Sequence[int]], Any]:
    """Returns a function that gathers the weights of each row and calls one module by `vmap`."""
    parameters, buffers = stack_module_state(list(modules))
    base = modules[0]

    def one(p: Any, b: Any, *inputs: Tensor) -> Any:
        answer = functional_call(base, (p, b), tuple(x.unsqueeze(0) for x in inputs))
        return tree_map(lambda y: y.squeeze(0), answer)

    def run(inputs: Inputs, ids: Sequence[int]) -> Any:
        at = torch.tensor(ids, device=inputs[0].device)
        return vmap(one)(
            {k: v[at] for k, v in parameters.items()}, {k: v[at] for k, v in buffers.items()}, *inputs
        )

    return run


def padded(ens: widepack.WideModel, inputs: Inputs, ids: Sequence[int]) -> Any:
    """Pads the rows of each member to the largest group and runs all members with `each`."""
    rows: dict[int, list[int]] = {}
    for row, i in enumerate(ids):
        rows.setdefault(i, []).append(row)
    most = max(map(len, rows.values()))
    places = torch.empty(len(ids), dtype=torch.int64)
    for i, at in rows.items():
        places[at] = torch.arange(len(at)) + i * most
    places = places.to(inputs[0].device)
    wide = []
    for x in inputs:
        wide.append(x.new_zeros(len(ens.members), most, *x.shape[1:]))
        wide[-1].flatten(0, 1)[places] = x
    return tree_map(lambda y: y.flatten(0, 1)[places], ens.each(*wide))


def baseline_calls(
    ens: widepack.WideModel,
    modules: Sequence[nn.Module],
    vmapped: Callable[[Inputs, Sequence[int]], Any],
    x: Tensor,
    ids: Sequence[int],
) -> dict[str, Callable[[], Any]]:
    """Returns the baselines of a call by name; `vmap` only where its weights take at most `GATHERED`.

    vmapped: `gathered(modules)`.
    """
    calls: dict[str, Callable[[], Any]] = {
        "dict": partial(by_dict, modules, [x], ids),
        "sorted": partial(by_sort, modules, [x], ids),
        "each": partial(padded, ens, [x], ids),
    }
    size = sum(p.numel() * p.element_size() for p in modules[0].parameters())
    if size * len(ids) <= GATHERED:
        calls["vmap"] = partial(vmapped, [x], ids)
    return calls
