"""Runs the user's own module on one call, with or without its random draws, and restores its buffers.

A module at rest draws nothing, as `ir/random_ops.py` rewrites its program. Functions that switch dropout by
an argument run switched off. Every other draw of torch gives the number that the rewritten program has in its
place. Draws of Python and NumPy stay.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.derivatives import weights_fixed
from ..capture.named_fields import known_forms
from ..capture.state import owner_of
from ..ir.edit import all_nodes
from ..ir.overlapping import copy_into
from ..ir.torch_internals import buffers_of, op_base_name, without_fast_path
from ..kernels.checks import CHECKS, OF_VALUES
from ..spec.entries import callable_of
from ..spec.state import BUFFER, CHANGED
from .subject import Subject

_OFF = {"dropout", "dropout_", "native_dropout", "rrelu", "rrelu_", "multi_head_attention_forward"}
"""Functions that draw in training only. Their programs at rest have them switched off."""
_ON = {
    f"{name}{end}"
    for name in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for end in ("", "_")
} | {"dropout1d", "dropout2d", "dropout3d"}
"""Functions that an export writes as several ops around a draw of a mask. They run switched on, and the mask
keeps all numbers.
"""
_SWITCHES = ("training", "train")
_PLACES = {"rrelu": 3, "rrelu_": 3}
"""The position of the switch of an op of torch, whose signature Python cannot read; 2 for the others."""
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


class _Switched(TorchFunctionMode):
    """Calls the functions that switch dropout by an argument with dropout off."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, named = list(args), dict(kwargs or {})
        name = getattr(func, "__name__", "")
        # torch's derivatives of these two are zero, those of the ops in their place are not
        if name.partition(".")[0] == "poisson":
            return (given[0] if given else named["input"]).clone()
        if name.partition(".")[0] == "normal":
            mean, std = _two(given, named, ("mean", "std"), (0.0, 1.0))
            if isinstance(mean, torch.Tensor):
                return mean + std
        if name == "scaled_dot_product_attention":
            if len(given) > 4:
                given[4] = 0.0
            named.update({k: 0.0 for k in named if k == "dropout_p"})
        elif name in _RECURRENT and len(given) > 7:
            given[6 if isinstance(given[1], torch.Tensor) and isinstance(given[3], (list, tuple)) else 5] = (
                0.0
            )
        elif name in _OFF or name in _ON:
            _switch(func, name, given, named, on=name in _ON)
        return func(*given, **named)


def _switch(
    func: Callable[..., Any], name: str, given: list[Any], named: dict[str, Any], *, on: bool
) -> None:
    """Sets the switch among the arguments of a function."""
    names = list(inspect.signature(func).parameters) if inspect.isfunction(func) else []
    switch = next((s for s in _SWITCHES if s in named or s in names), "train")
    place = names.index(switch) if switch in names else _PLACES.get(name, 2)
    if place < len(given):
        given[place] = on
    else:
        named[switch] = on


class _CheckedOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Checks operands whose values kernels trust: a module runs on values that its user may never give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := str(func)) in OF_VALUES:
            CHECKS[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _checked_operands(subject: Subject) -> AbstractContextManager[Any]:
    """Returns a context for modules whose programs have such kernels. Others run without: an op of the user's
    may not accept a mode.
    """
    if any(node.op in OF_VALUES for program in subject.programs for node in all_nodes(program)):
        return _CheckedOperands()  # type: ignore[no-untyped-call]
    return nullcontext()


_HALF = {"exponential", "cauchy", "geometric", "log_normal"}


class _Fixed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Replaces the draws of ops by fixed numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = op_base_name(func)
        functional_name, writes = name.rstrip("_"), name.endswith("_")
        if functional_name == "uniform":
            least, most = _two(args[1:], kwargs, ("from", "to"), (0.0, 1.0))
            number = (least + most) / 2
            return args[0].fill_(number) if writes else torch.full_like(args[0], number)
        if functional_name == "bernoulli" or functional_name in _HALF:
            number = 1.0 if functional_name == "bernoulli" else 0.5
            return args[0].fill_(number) if writes else torch.full_like(args[0], number)
        if name in ("normal_", "normal_functional"):
            mean, std = _two(args[1:], kwargs, ("mean", "std"), (0.0, 1.0))
            return args[0].fill_(mean + 0.5 * std) if writes else torch.full_like(args[0], mean + 0.5 * std)
        if name in ("rand", "randn", "rand_like", "randn_like"):
            return func(*args, **kwargs).fill_(0.5)
        if name == "normal" and len(args) > 2:  # of a size
            return func(*args, **kwargs).fill_(args[0] + 0.5 * args[1])
        if name == "randint":
            return func(*args, **kwargs).fill_(0)
        if name == "randperm":
            return func(*args, **kwargs).sort().values
        return func(*args, **kwargs)


def _two(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: tuple[str, str], defaults: tuple[float, float]
) -> tuple[Any, Any]:
    """Returns two arguments of a draw."""
    first, second = (
        args[i] if len(args) > i else kwargs.get(name, default)
        for i, (name, default) in enumerate(zip(names, defaults))
    )
    return first, second


@contextmanager
def without_draws() -> Iterator[None]:
    """Runs modules without random draws inside a with block."""
    with _Switched(), _Fixed():  # type: ignore[no-untyped-call]
        yield


def run_module(
    module: nn.Module,
    subject: Subject,
    inputs: Sequence[torch.Tensor],
    mode: AbstractContextManager[Any] | None = None,
) -> list[Any]:
    """Runs the user's module on one call and restores its buffers.

    The nested-tensor path is off: it gives other answers at padded positions. Values of operands are checked
    as those of programs are, because some kernels of torch end the process otherwise. mode: a context that
    the call runs in.

    Returns: the leaves of what the method returns, then the new values of the states in buffers and inputs.
    """
    values = [x.detach().clone() for x in inputs]
    args, kwargs = subject.bind(values)
    with _restored_buffers(module), without_fast_path(), weights_fixed(module):
        owners = {s.name: owner_of(module, s.name) for s in subject.states if s.how == BUFFER}
        for s in subject.states:
            if s.how == BUFFER:
                part, name = owners[s.name]
                # In place: other holders of this tensor see the value, as they do in the user's own calls.
                buffer = buffers_of(part)[name]
                assert buffer is not None  # a state is a tensor from the beginning
                copy_into(buffer, values[s.input])
        call = callable_of(module, subject.method)
        draws = without_draws() if subject.rests else nullcontext()
        with mode or nullcontext(), _checked_operands(subject), draws:
            result = call(*args, **kwargs)
        found = pytree.tree_leaves(known_forms(result))
        for s in sorted(subject.states, key=lambda s: s.output):
            if s.how == BUFFER:
                part, name = owners[s.name]
                found.append(buffers_of(part)[name])
            elif s.how == CHANGED:
                found.append(values[s.input])
        # A parameter may be an output, and so may a buffer, which is restored below.
        return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in found]


@contextlib.contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the buffers of all submodules: the tensors themselves and their values."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in buffers_of(part).items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in before:
                buffers_of(part)[name] = buffer
                copy_into(buffer, value)
