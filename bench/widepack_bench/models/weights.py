"""Random weights and statistics for members. `shared` names the weights that are equal in all members."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike, fspath

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

State = dict[str, Tensor]


def states(
    factory: Callable[[], nn.Module], members: int, shared: Callable[[str], bool] = lambda name: False
) -> Iterator[State]:
    """Returns the state dict of each member. shared: names of weights that all members share."""
    first: State = {}
    for i in range(members):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7 * i + 1)
            module = factory()
            for part in module.modules():
                _statistics(part)
        own = module.state_dict()
        first = first or own
        yield {name: first[name] if shared(name) else value for name, value in own.items()}


def write_checkpoints(
    factory: Callable[[], nn.Module],
    members: int,
    folder: str | PathLike[str],
    shared: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Writes the state dict of each member into a folder, and returns the paths. shared: as in `states`."""
    paths = []
    for i, state in enumerate(states(factory, members, shared)):
        paths.append(f"{fspath(folder)}/{i:04}.pt")
        torch.save(state, paths[-1])
    return paths


def _statistics(part: nn.Module) -> None:
    """Draws different scales, shifts, means and variances for each norm, as training does."""
    if isinstance(part, (_BatchNorm, nn.LayerNorm, nn.RMSNorm)):
        for tensor, low, high in ((part.weight, 0.5, 1.5), (getattr(part, "bias", None), -0.2, 0.2)):
            if tensor is not None:
                nn.init.uniform_(tensor, low, high)
    if isinstance(part, _BatchNorm):
        assert part.running_mean is not None and part.running_var is not None
        nn.init.normal_(part.running_mean, std=0.2)
        nn.init.uniform_(part.running_var, 0.5, 1.5)
