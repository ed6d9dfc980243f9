"""Runs the user's own module on one call, and restores its buffers afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.derivatives import weights_fixed
from ..capture.named_fields import known_forms
from ..capture.state import owner_of
from ..ir.overlapping import copy_into
from ..spec.entries import FORWARD, method_of
from ..spec.state import BUFFER, CHANGED
from .rest_mode import without_draws
from .subject import Subject


def run_module(
    module: nn.Module,
    subject: Subject,
    inputs: Sequence[torch.Tensor],
    mode: AbstractContextManager[Any] | None = None,
) -> list[Any]:
    """Runs the user's module on one call and restores its buffers.

    The nested-tensor path is off: it gives other answers at padded positions. mode: a context that the call
    runs in.

    Returns: the leaves of what the method returns, then the new values of the states in buffers and inputs.
    """
    values = [x.detach().clone() for x in inputs]
    args, kwargs = subject.bind(values)
    with _restored_buffers(module), _without_fast_path(), weights_fixed(module):
        owners = {s.name: owner_of(module, s.name) for s in subject.states if s.how == BUFFER}
        for s in subject.states:
            if s.how == BUFFER:
                part, name = owners[s.name]
                # In place: other holders of this tensor see the value, as they do in the user's own calls.
                buffer = _buffers(part)[name]
                assert buffer is not None  # a state is a tensor from the beginning
                copy_into(buffer, values[s.input])
        call = module if subject.method == FORWARD else method_of(module, subject.method)
        with mode or nullcontext(), without_draws() if subject.rests else nullcontext():
            result = call(*args, **kwargs)
        found = pytree.tree_leaves(known_forms(result))
        for s in sorted(subject.states, key=lambda s: s.output):
            if s.how == BUFFER:
                part, name = owners[s.name]
                found.append(_buffers(part)[name])
            elif s.how == CHANGED:
                found.append(values[s.input])
        # A parameter may be an output, and so may a buffer, which is restored below.
        return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in found]


def _buffers(part: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the module's own buffers, which can be replaced there."""
    return part._buffers  # torch has no public name for it


@contextlib.contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the buffers of all submodules: the tensors themselves and their values."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in _buffers(part).items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in before:
                _buffers(part)[name] = buffer
                copy_into(buffer, value)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
