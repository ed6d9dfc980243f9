"""The weights of N live modules as one module's: `[N, *shape]` each, under the member's own names, in submodules that mirror the member's.

| row | held as |
|---|---|
| parameter | one nn.Parameter `[N, *shape]`, frozen where the members' is |
| parameter named in `share` | one nn.Parameter `[*shape]`: equal in all members, and kept so |
| buffer | a buffer `[N, *shape]`, saved where the members' is |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from widepack_artifacts.program import Kind

from ..errors import MemberMismatch, UsageError
from .skeleton import Hollow, first_names, weights_of
from ..checkpoints.alignment import bit_equal
from ..optim.rates import ONE_FOR_ALL


@dataclass(frozen=True)
class Row:
    """A weight of all members. name: its first; aliases: its others. kind: stacked, or shared. parameter: else it is a buffer."""

    name: str
    aliases: tuple[str, ...]
    kind: Kind
    parameter: bool


class Part(nn.Module):
    """One of the member's modules, for all members: holds their stacked weights and the mode. `layers.0` of a fused model is the `Part` of the members' `layers.0`."""

    def __init__(self, kind: str, training: bool) -> None:
        super().__init__()
        self._kind = kind
        self.training = training

    def _get_name(self) -> str:
        return self._kind

    def __getitem__(self, key: int | str) -> Any:
        """A part or parameter of a container by its place or key, as the member has it: `fused.layers[0]`, `fused.heads["a"]`."""
        held = {**self._modules, **self._parameters}
        if isinstance(key, int):
            return list(held.values())[key]
        return held[key]

    def extra_repr(self) -> str:
        held = {**self._parameters, **self._buffers}
        return ", ".join(f"{n}={list(v.shape)}" for n, v in held.items() if v is not None)


def rows_of(models: Sequence[nn.Module], share: Sequence[str], all_shared: bool = False) -> list[Row]:
    """The rows of members that are alike. share: names of parameters, or patterns (`trunk.*`). all_shared: of one model that is taken N times.

    Raises: UsageError for a name that no parameter has; MemberMismatch for one whose values differ.
    """
    held = weights_of(models[0])
    first = first_names(held)
    parameters = {n for n, v in held.items() if isinstance(v, nn.Parameter)}
    chosen: set[str] = set()
    for pattern in share:
        matching = [n for n in held if n in parameters and fnmatchcase(n, pattern)]
        if not matching:
            own = "a buffer, and each member has its own" if pattern in held else "no parameter"
            raise UsageError(
                f"share: {pattern} is {own}; the parameters are {', '.join(sorted(parameters)[:20])}{', ...' if len(parameters) > 20 else ''}"
            )
        chosen |= {first[n] for n in matching}
    differ = []
    for name in sorted(chosen):
        for i, model in enumerate(models[1:], 1):
            if not bit_equal(held[name].detach(), weights_of(model)[name].detach()):
                differ.append(f"{name} in member {i}")
    if differ:
        raise MemberMismatch(
            f"share: {len(differ)} weights are not equal to member 0's: {', '.join(differ[:20])}{', ...' if len(differ) > 20 else ''}; what is shared has one value: "
            "load the same numbers into all members first"
        )
    names: dict[str, Row] = {}
    for name in held:
        if first[name] == name:
            names[name] = Row(name, (), "shared" if all_shared or name in chosen else "stacked", name in parameters)
        else:
            names[first[name]] = replace(names[first[name]], aliases=(*names[first[name]].aliases, name))
    return list(names.values())


def stack(root: nn.Module, models: Sequence[nn.Module], rows: Sequence[Row]) -> None:
    """Put the members' weights under `root`, in parts that mirror the first member's modules."""
    first = models[0]
    made: dict[int, nn.Module] = {id(first): root}
    for path, module in first.named_modules(remove_duplicate=False):
        if not path:
            continue
        part = made.setdefault(id(module), Part(type(module).__name__, module.training))
        parent, _, last = path.rpartition(".")
        made[id(first.get_submodule(parent))]._modules[last] = part  # not by add_module: `train` may be the name of a member's layer
    every = [weights_of(m) for m in models]
    for row in rows:
        own = [w[row.name].detach() for w in every]
        value = torch.stack(own) if row.kind == "stacked" else own[0].clone()
        if row.parameter:
            value = nn.Parameter(value, every[0][row.name].requires_grad)
            setattr(value, ONE_FOR_ALL, row.kind == "shared")
        for name in (row.name, *row.aliases):
            path, _, last = name.rpartition(".")
            source, part = first.get_submodule(path), made[id(first.get_submodule(path))]
            held: dict[str, Any] = part._parameters if row.parameter else part._buffers
            held[last] = value
            if not row.parameter and last in source._non_persistent_buffers_set:
                part._non_persistent_buffers_set.add(last)
    for source in first.modules():  # a bias that is None is one here too
        for own_, there in ((source._parameters, made[id(source)]._parameters), (source._buffers, made[id(source)]._buffers)):
            there.update({name: None for name, value in own_.items() if value is None})


def place_of(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a weight, and its name there."""
    path, _, last = name.rpartition(".")
    part = root
    for key in path.split(".") if path else ():
        part = part._modules[key]  # type: ignore[assignment]
    return (part._parameters if last in part._parameters else part._buffers), last


def modes(root: nn.Module) -> dict[str, bool]:
    """Of every part whether it is in train mode, by path; those that stand in two places under the first."""
    return {path: part.training for path, part in root.named_modules()}


def filled(root: nn.Module, hollow: Hollow, rows: Sequence[Row], i: int, device: torch.device | None = None) -> nn.Module:
    """Member i as a module of the user's own class, with weights of its own, in the mode that the parts are in."""
    values = {}
    for row in rows:
        held, last = place_of(root, row.name)
        values[row.name] = held[last][i] if row.kind == "stacked" else held[last]
    member = hollow.filled(values, device)
    for path, training in modes(root).items():
        member.get_submodule(path).training = training
    own = weights_of(member)
    for row in rows:  # frozen since, or no longer
        held, last = place_of(root, row.name)
        if row.parameter:
            own[row.name].requires_grad_(held[last].requires_grad)
    return member
