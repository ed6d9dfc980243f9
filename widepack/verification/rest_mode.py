"""Runs the user's own module without its random draws, as `ir/random_ops.py` rewrites its program.

Functions that switch dropout by an argument run switched off. Every other draw of torch gives the number that
the rewritten program has in its place. Draws of Python and NumPy stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.torch_internals import op_base_name

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
