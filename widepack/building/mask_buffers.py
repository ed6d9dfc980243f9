"""Reads the buffers of a model that are masks of attention, so that its costs know what they forbid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts.program import Kind, Program

from ..capture.reachable import tensors_of
from ..costs.mask_data import MOST_ELEMENTS, known_of
from ..costs.mask_values import Known
from ..costs.mask_weights import is_number, mask_slots
from ..ir.torch_internals import op_base_name, schema_of


def known_masks(
    program: Program, kind: Callable[[str], Kind], members: int, value: Callable[[str, int], Tensor]
) -> dict[str, Known]:
    """Returns what is known of the weights of a member program that are masks, by their names in the table.

    Args:
        program: The member program.
        kind: Returns the kind of a weight.
        members: The number of members.
        value: Returns a weight's value in a member. One value is read at a time.
    """

    def values(name: str) -> Iterator[Tensor]:
        return (value(name, i) for i in range(1 if kind(name) == "shared" else members))

    found = {s.source: known_of(values(s.source)) for s in mask_slots(program)}
    return {name: known for name, known in found.items() if known is not None}


def fresh_masks(
    program: Program, make: Callable[[], nn.Module], literals: Mapping[str, Tensor]
) -> dict[str, Known]:
    """Returns what is known of the masks that a fresh module has in buffers, as `known_masks` does.

    Args:
        program: The member program.
        make: Returns the module. It is called without memory for weights, and only if the program may have
            masks. Parameters, and buffers whose numbers are drawn, are not known.
        literals: The tensors in the code, by their names in the table.
    """
    slots = mask_slots(program)
    names = [s.source for s in slots if s.source not in literals and not is_number(s)]
    try:
        first, second = (_set_numbers(make, names, seed) for seed in (0, 1)) if names else ({}, {})
    except Exception:  # noqa: BLE001  # code that gets no values may raise anything
        return {}
    same = {n: t for n, t in first.items() if n in second and torch.equal(t, second[n])}
    same |= {s.source: literals[s.source] for s in slots if s.source in literals}
    found = {name: known_of([value]) for name, value in same.items() if _has_values(value)}
    return {name: known for name, known in found.items() if known is not None}


def _set_numbers(make: Callable[[], nn.Module], names: Iterable[str], seed: int) -> dict[str, Tensor]:
    """Returns the tensors of a fresh module that have values, of those with these names. seed: of what the
    constructor draws.
    """
    with torch.random.fork_rng(devices=[]), _OnlySetNumbers():
        torch.manual_seed(seed)
        module = make()
    tensors: dict[str, Tensor] = dict(tensors_of(module))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    kept = {n: tensors[n].detach() for n in names if n in tensors}
    return {n: t for n, t in kept.items() if _has_values(t)}


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


_UNSET = frozenset(["empty", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"])


class _OnlySetNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Makes fake tensors, which take no memory, of numbers that are drawn or not set, and of large tensors.

    All other tensors are made as they are: `torch.tril(torch.ones(64, 64))` has its values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        large = all(isinstance(n, int) for n in sizes) and prod(sizes) > MOST_ELEMENTS
        drawn = torch.Tag.nondeterministic_seeded in func.tags and not schema_of(func).is_mutable
        if op_base_name(func) in _UNSET or large or drawn:
            with self._fake:
                return func(*args, **given)
        return func(*args, **given)
