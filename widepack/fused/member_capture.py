"""Captures the program of one member of a fused module, in its mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.call import MemberCall, arrange
from ..capture.capture import Captured, capture
from ..capture.derivatives import weights_fixed
from ..capture.example import dynamic_axes
from ..capture.export import calm, clone
from ..checkpoints.differences import bit_equal
from ..spec.state import StateRequest
from .torch_module import write_count


def call_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Mapping[str, Any] | None
) -> MemberCall:
    """Returns the sample as a call of the member.

    Args:
        module: The member, or its skeleton. It does not run.
        args: The sample's positional inputs.
        kwargs: The sample's inputs by name.
        dynamic: {input: {axis: letter}}. Default: axis 0 of every input is "B".

    Raises:
        UsageError: `dynamic` has another form, or names an input that forward does not take.
        CaptureError: Forward does not take the sample.
    """
    axes = dynamic_axes(dynamic, module, args, kwargs)
    return arrange(module, args, kwargs, axes, {})


def changed_buffers(module: nn.Module, call: MemberCall) -> list[str]:
    """Runs a module once and returns the buffers that it changed. The module must not be used again."""
    before = {
        n: (b, b.clone(), write_count(b))
        for n, b in module.named_buffers(remove_duplicate=False)
        if b is not None
    }
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    with calm(), weights_fixed(module), torch.random.fork_rng(devices=[]):
        try:
            module(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the capture reports the error
            return []
    after = dict(module.named_buffers(remove_duplicate=False))
    return [
        n
        for n, (b, value, writes) in before.items()
        if after.get(n) is not b or write_count(b) != writes or not bit_equal(b, value)
    ]


def capture_member(
    make: Callable[[], nn.Module], call: MemberCall, named_dims: bool, dropout: bool
) -> Captured:
    """Captures a member's program in its mode.

    Args:
        make: Returns fresh copies of the member.
        call: The sample.
        named_dims: Whether the user named the dynamic dims.
        dropout: Whether dropout is on in every mode.
    """
    states = [StateRequest(n) for n in changed_buffers(make(), call)]
    return capture(make, call, named_dims=named_dims, states=states, gradients=True, dropout=dropout)
