"""Tracks the memory that is live after each kernel, as formulas. Works on real, fake and symbolic tensors.

A storage is live as long as any tensor refers to it, so views keep what they are views of. Inputs and weights
are held by the caller and do not count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions

from ..ir.torch_internals import memory_id
from .expressions import ZERO, SizeSymbols


@dataclass(frozen=True)
class LiveStorage:
    """The memory of tensors. weight: of a weight. shared: one for all members. held: by the caller.

    size: its bytes as a formula, with the bytes of an element as a symbol. serial: its number.
    """

    weight: bool
    shared: bool
    held: bool
    size: Any
    serial: int


class LiveStorages:
    """The storages that are live, and all states of the memory that were seen."""

    def __init__(self, symbols: SizeSymbols) -> None:
        self._symbols = symbols
        self._live: dict[int, tuple[Any, LiveStorage]] = {}
        self._states: list[frozenset[tuple[tuple[Any, bool], int]]] = []
        self._count = 0

    def hold(self, tensor: Tensor, *, weight: bool, shared: bool) -> None:
        """Adds a tensor that the caller keeps."""
        self._add(tensor, weight=weight, shared=shared, held=True)

    def made(self, tensor: Tensor, *, shared: bool) -> LiveStorage:
        """Returns the storage of a result; a new one is added."""
        known = self.of(tensor)
        return known or self._add(tensor, weight=False, shared=shared, held=False)

    def of(self, tensor: Tensor) -> LiveStorage | None:
        """Returns the storage of a tensor; None if it is not known."""
        reference, storage = self._live.get(memory_id(tensor), (None, None))
        return storage if reference is not None and not reference.expired() else None

    def remember(self) -> None:
        """Notes what is live now."""
        dead = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in dead:
            del self._live[key]
        sizes = Counter((s.size, s.shared) for _, s in self._live.values() if not s.held)
        self._states.append(frozenset(sizes.items()))

    def states(self) -> list[tuple[Any, Any]]:
        """Returns the states of the memory in order, as (bytes for all members, bytes for each member)."""
        sums = {
            state: (
                sum((size * n for (size, shared), n in state if shared), ZERO),
                sum((size * n for (size, shared), n in state if not shared), ZERO),
            )
            for state in set(self._states)
        }
        return [sums[state] for state in self._states]

    def _add(self, tensor: Tensor, *, weight: bool, shared: bool, held: bool) -> LiveStorage:
        memory = tensor.untyped_storage()
        elements = self._symbols.expr(memory.nbytes()) / tensor.dtype.itemsize
        size = elements * self._symbols.element(tensor.dtype, weight)
        self._count += 1
        storage = LiveStorage(weight, shared, held, size, self._count)
        self._live[memory_id(tensor)] = (_weak_reference(memory), storage)
        return storage


def _weak_reference(storage: Any) -> Any:
    """Returns a reference that does not keep the memory alive; `expired()` tells whether it is gone."""
    return reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch has no types here
