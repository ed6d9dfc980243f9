"""Makes one member a function of its weights, and runs `torch.func.vmap` of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.answers import Run, leaves

Table = dict[str, Tensor]
One = Callable[[Table, tuple[Any, ...], Mapping[str, Any]], Any]


def tables(modules: Sequence[nn.Module]) -> list[Table]:
    """Returns each member's parameters and buffers by name.

    Raises: ValueError where the members' names or shapes differ.
    """
    members = [{k: t.detach() for k, t in (*m.named_parameters(), *m.named_buffers())} for m in modules]
    for name, first in members[0].items():
        if any(name not in table or table[name].shape != first.shape for table in members):
            raise ValueError(
                f"the members' {name} have different shapes, and one function of the weights "
                "needs equal shapes"
            )
    return members


def function_of(module: nn.Module) -> One:
    """Returns a member's forward as a function of (weights, args, kwargs).

    It returns a tensor, or a tuple of the output's leaves.
    """
    base = copy.deepcopy(module)

    def one(weights: Table, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = torch.func.functional_call(base, weights, args, dict(kwargs))
        return out if isinstance(out, Tensor) else tuple(leaves(out))

    return one


def vmap(modules: Sequence[nn.Module], each: bool) -> Run:
    """Runs `torch.func.vmap` over stacked weights. Raises: ValueError if the weights cannot be stacked."""
    rows = tables(modules)
    weights = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    _silence_fallbacks()
    one = function_of(modules[0])

    def run(*args: Any, **kwargs: Any) -> Any:
        dims = (0, _axes(args, each), _axes(kwargs, each))
        return torch.vmap(one, in_dims=dims, randomness="different")(weights, args, kwargs)

    return run


def _silence_fallbacks() -> None:
    """Silences vmap's warnings: an op without a rule runs member by member and warns at every call, which
    takes time.
    """
    silence = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled", None)
    if silence is not None:
        silence(False)


def _axes(value: Any, each: bool) -> Any:
    """Returns vmap's in_dims: 0 for stacked tensors, None for everything else."""
    if isinstance(value, Tensor):
        return 0 if each else None
    if isinstance(value, Mapping):
        return {k: _axes(v, each) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_axes(v, each) for v in value)
    return None
