"""Reads networks from a registry of architectures, and describes their inputs as specs.

A registry is a folder with two modules. `zoo.py` has `ENTRIES`, a dict of entries by name,
`inputs(name, batch, seed)`, which returns `(args, kwargs)`, and `seed_all(seed)`. An entry has `package`, and
`make()`, which returns a module. `check.py` has `pick(count)`, which returns the names of a seeded sample.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from flop_counts import tensors_of
from torch import Tensor, nn

SMALL, LARGE = 4, 6
"""Two batches at which the inputs are made, to see which dims grow with the batch."""
_LETTERS = ("B", "V", "E", "R", "S")


def registry(folder: Path) -> Any:
    """Returns the module `zoo` of a folder."""
    sys.path.insert(0, str(folder.resolve()))
    return importlib.import_module("zoo")


def sample(folder: Path) -> list[str]:
    """Returns the names of all entries that count, in the order of the sample."""
    registry(folder)
    pick: Callable[[int], list[str]] = importlib.import_module("check").pick
    return pick(sys.maxsize)


@dataclass(frozen=True)
class Network:
    """A network of a registry with specs of its inputs.

    make: returns a fresh module, which takes the inputs of the specs by name. member: returns a fresh module
    as the registry has it. dims: by letter, the place of the dim as (number of the tensor, axis). flattened:
    whether `make` returns an adapter, because specs cannot describe the nested or unnamed inputs of a member.
    """

    make: Callable[[], nn.Module]
    member: Callable[[], nn.Module]
    specs: tuple[str, ...]
    dims: Mapping[str, tuple[int, int]]
    flattened: bool

    def sizes(self, call: Any) -> dict[str, int]:
        """Returns the size of each dim in a call. call: `(args, kwargs)` of the registry."""
        tensors = tensors_of(call)
        return {letter: tensors[i].shape[axis] for letter, (i, axis) in self.dims.items()}


class Flattened(nn.Module):
    """Takes the tensors of a nested call by name, and calls a module as the registry does."""

    def __init__(self, inner: nn.Module, call: Any) -> None:
        """call: `(args, kwargs)`; its tensors stand for those of a later call."""
        super().__init__()
        leaves, self._form = pytree.tree_flatten(call)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.inner = inner

    def forward(self, **tensors: Tensor) -> Any:
        leaves = list(self._leaves)
        for i, place in enumerate(self._places):
            leaves[place] = tensors[f"x{i}"]
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        return self.inner(*args, **kwargs)


def network(zoo: Any, name: str) -> Network:
    """Returns an entry of a registry with the specs of its inputs."""
    entry = zoo.ENTRIES[name]

    def make() -> nn.Module:
        zoo.seed_all(0)
        module: nn.Module = entry.make().eval()
        return module

    small, large = (zoo.inputs(name, batch, 0) for batch in (SMALL, LARGE))
    names = _parameters(make(), small)
    tensors = list(zip(tensors_of(small), tensors_of(large), strict=True))
    dims: dict[str, tuple[int, int]] = {}
    letters: dict[tuple[int, int], str] = {}
    specs = []
    for i, (a, b) in enumerate(tensors):
        shape = []
        for axis, pair in enumerate(zip(a.shape, b.shape, strict=True)):
            if pair[0] == pair[1]:
                shape.append(str(pair[0]))
                continue
            if pair not in letters:
                free = (letter for letter in _LETTERS[1:] if letter not in letters.values())
                letters[pair] = _LETTERS[0] if pair == (SMALL, LARGE) else next(free)
                dims[letters[pair]] = (i, axis)
            shape.append(letters[pair])
        specs.append(f"{names[i] if names else f'x{i}'}={_type(a, b, shape)}")
    if names:
        return Network(make, make, tuple(specs), dims, False)
    return Network(lambda: Flattened(make(), small).eval(), make, tuple(specs), dims, True)


def _type(a: Tensor, b: Tensor, shape: list[str]) -> str:
    text = f"{str(a.dtype).removeprefix('torch.')}[{','.join(shape)}]"
    if a.is_floating_point() or a.is_complex() or a.dtype == torch.bool:
        return text
    return f"{text}:{min(int(t.min()) for t in (a, b))}..{max(int(t.max()) for t in (a, b))}"


def _parameters(module: nn.Module, call: Any) -> list[str]:
    """Returns the names of the parameters that a call gives tensors; empty if a spec cannot describe it."""
    args, kwargs = call
    parameters = inspect.signature(module.forward).parameters
    if not all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [*list(parameters)[: len(args)], *kwargs]
    if len(names) != len(args) + len(kwargs):
        return []
    named = all(name in parameters and parameters[name].kind in kinds for name in names)
    return names if named else []
