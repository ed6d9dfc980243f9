"""The networks of the tests: one small file for each, with usual shapes, small enough for a CPU.

Every module has

| name | what it is |
|---|---|
| `model(**kwargs)` | the factory, as in `--model cases.mlp:model` or `tests/cases/mlp.py:model` |
| `INPUTS` | the input specs |
| `N` | the number of members |
| `RECURRENT` | whether a recurrent op takes most of its time |
| `sample(batch, seed)` | `(args, kwargs)` for one call |
| `member(i)` | member i in eval mode, as if trained: its weights, norms and statistics are distinct |

`NAMES` lists the twelve networks, and `QUICK` those whose artifacts `make test` builds. The networks in
`GUARDED` branch on a size, so that their export is valid under a condition only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

NAMES = [
    "mlp",
    "resnet18",
    "depthwise",
    "unet",
    "vit",
    "bert",
    "gpt2",
    "encoder",
    "lstm",
    "textcnn",
    "frozen_trunk",
    "ragged_heads",
]
GUARDED = ["guard_pad", "guard_size"]
QUICK = ["mlp", "bert", "lstm", "frozen_trunk", "ragged_heads"]


def load(name: str) -> ModuleType:
    """Returns the Python module of one case."""
    return import_module(f"{__name__}.{name}")


def write_checkpoints(case: str | ModuleType, folder: str | Path) -> list[str]:
    """Saves every member's state dict as `<case>-<i>.pt` in the folder, and returns the paths in order."""
    module = load(case) if isinstance(case, str) else case
    stem = module.__name__.rpartition(".")[2]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{stem}-{i}.pt") for i in range(module.N)]
    for i, path in enumerate(paths):
        torch.save(module.member(i).state_dict(), path)
    return paths


def generator(seed: int) -> torch.Generator:
    """Returns a new generator, so that a sample depends on its seed only."""
    return torch.Generator().manual_seed(seed)


def trained(
    build: Callable[[], nn.Module], seed: int, batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]] = ()
) -> nn.Module:
    """Returns a module that looks trained: random weights, norms different from 1 and 0, statistics of the
    batches.

    Fresh norms and biases are equal in all members, and would be Shared. Trained ones differ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build().eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() <= 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            calibrate(module, batches)
    return module.eval()


@torch.no_grad()
def calibrate(module: nn.Module, batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Sets the running statistics of every BatchNorm to those of the batches, layer by layer."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # None: the unweighted average over the batches
        norm.train()
    for args, kwargs in batches:
        module(*args, **kwargs)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
        norm.eval()
