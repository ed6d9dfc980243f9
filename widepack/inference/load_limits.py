"""Limits the memory and the work that a load may take to what the artifact's files justify."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.file_sizes import bytes_on_disk

from ..runtime.budget import Budget
from ..runtime.executable import Executable, storage
from ..system.deadline import Deadline


class PrologueBytes:
    """Counts the bytes that prologues of bound programs have computed and that are still in memory."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, run: Executable, weights: Iterable[Any]) -> None:
        """Counts a program's derived weights as long as the program exists. weights: those that it is bound
        to.
        """
        known = {storage(t) for w in weights for t in (w if isinstance(w, list) else [w])}
        sizes = {}
        for t in (t for w in run.given for t in (w if isinstance(w, (list, tuple)) else [w])):
            if isinstance(t, torch.Tensor) and not ((at := storage(t)) and at in known):
                sizes[at or id(t)] = t.untyped_storage().nbytes() if at else t.numel() * t.element_size()
        size = sum(sizes.values())
        self.bytes += size
        weakref.finalize(run, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        self.bytes -= size


class LoadLimits:
    """The budget and the deadline of one load, and of each pattern that is bound later.

    Args:
        limit: How many times the usual amount a load may take; None for no limit.
        weights: The weights files.
        probe: The file of the probe, if the artifact has one.

    Attributes:
        budget: The memory and work of what is bound now; None for no limit.
        lowering: The deadline of what is lowered now.
        prologue: The bytes of derived weights in memory.
    """

    def __init__(self, limit: float | None, weights: Iterable[Path], probe: Path | None) -> None:
        self.limit = limit
        # The sizes are read now: the files may be replaced later.
        self._weights_bytes = sum(map(bytes_on_disk, weights))
        self._probe_bytes = bytes_on_disk(probe) if probe is not None else 0
        self._justified: dict[str, int] = {}  # weight -> its bytes
        self._merged_bytes = 0
        self.prologue = PrologueBytes()
        self.budget = self._new_budget()
        self.lowering = Deadline(limit)
        self._loading = False

    def _new_budget(self, before: Budget | None = None) -> Budget | None:
        """Returns a budget for what is bound now. before: the budget that it replaces in the same load."""
        if self.limit is None:
            return None
        weights = min(self._weights_bytes, sum(self._justified.values())) + self._merged_bytes
        budget = Budget.of(weights, self._probe_bytes, self.limit)
        budget.resident = self.prologue.bytes
        if before is not None:
            budget.spent, budget.walked, budget.nodes = before.spent, before.walked, before.nodes
        return budget

    @contextlib.contextmanager
    def one_load(self, active: bool = True) -> Iterator[None]:
        """All patterns that are bound in the block share one budget and one deadline. active: False changes
        nothing.
        """
        self._loading = active
        try:
            yield
        finally:
            self._loading = False
        self.lowering.made.clear()

    def begin(self) -> None:
        """Begins a budget and a deadline for a pattern that is bound now, unless a load has begun one."""
        if not self._loading:
            self.budget, self.lowering = self._new_budget(), Deadline(self.limit)

    def justify(self, sizes: Mapping[str, int]) -> None:
        """Raises the budget by weights that a program reads. Weights that no program reads do not raise it.

        sizes: the bytes of each weight.
        """
        self._justified.update(sizes)
        if self.budget is not None:
            self.budget = self._new_budget(self.budget)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the weights files on the disk."""
        return self._weights_bytes

    def justify_merged(self, size: int) -> None:
        """Raises the budget by weights that are merged, after their memory was found to be available.

        size: their bytes.
        """
        self._merged_bytes += size
        if self.budget is not None:
            self.budget = self._new_budget(self.budget)

    def justified(self, name: str) -> bool:
        """Returns whether a weight has been counted."""
        return name in self._justified
