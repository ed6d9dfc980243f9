"""Repeats the rows of a sample that has one row, because torch.export takes a size of 1 for a constant."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..ir.guards import factor_of
from ..spec.entries import FORWARD
from .call import MemberCall
from .export import run_once
from .results import known_forms


def without_ones(
    call: MemberCall, make: Callable[[], nn.Module], named_dims: bool, entry: str = FORWARD
) -> MemberCall:
    """Returns a call in which no dynamic dim has size 1, if the member takes such a call.

    Args:
        call: The sample.
        make: Returns a fresh member at every call, which runs once. It is not called if no dim has size 1.
        named_dims: The user named the dims. Otherwise the sample stays as it is where the member answers with
            other ranks at larger sizes (`squeeze()`).
        entry: The method that runs.
    """
    ones = [letter for letter, size in call.sizes.items() if size == 1]
    if not ones:
        return call
    free = (k for k in itertools.count(2) if k not in call.sizes.values())  # equal sizes could become one dim
    larger = _resized(call, dict(zip(ones, free)))
    answers = []
    for each in (larger, call):
        module = make()
        before = _shapes(dict(module.named_buffers()))
        with torch.enable_grad():
            answer, error = run_once(module, each, entry)
        if each is larger and (error is not None or _shapes(dict(module.named_buffers())) != before):
            return call
        answers.append(answer)
        if named_dims or error is not None:
            return larger
    ranks = [[getattr(y, "ndim", None) for y in pytree.tree_leaves(known_forms(a))] for a in answers]
    return larger if ranks[0] == ranks[1] else call


def _resized(call: MemberCall, sizes: dict[str, int]) -> MemberCall:
    """Returns the call with these sizes of dims that have size 1."""
    tensors: dict[int, torch.Tensor] = {}
    for leaf in call.leaves:
        value = leaf.example
        for axis, text in leaf.axes.items():
            value = value.repeat_interleave(sizes.get(factor_of(text)[1], 1), axis)
        tensors[id(leaf.example)] = value

    def resized(value: Any) -> Any:
        return tensors.get(id(value), value)

    args, kwargs = pytree.tree_map(resized, (call.args, call.kwargs))
    leaves = tuple(replace(leaf, example=resized(leaf.example)) for leaf in call.leaves)
    return replace(call, args=args, kwargs=kwargs, leaves=leaves, sizes={**call.sizes, **sizes})


def _shapes(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in buffers.items()}
