"""`Held`: an open artifact with its weights, and how it was asked to be loaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts import header
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.store import Reader
from widepack_artifacts.weights import Weights

from .backends.task import Mapped
from .errors import ArtifactError, UsageError
from .progress import Report
from .walk import Budget


@dataclass(frozen=True)
class Running:
    """What programs are to run on. backend: its name or `auto`. compile: whether it may compile, and most_nodes how long a program: 0 for any. cache: of compiled
    programs; None is the usual one."""

    backend: str = "eager"
    compile: bool = False
    cache: Path | None = None
    progress: Report | None = None
    most_nodes: int = 0


class Held:
    """An open artifact with its weights, and how it was asked to be loaded: what all entries of a model share.

    chosen: numbers of the members that are loaded. members: their names. probe: the tensors of the probe, mapped, where there is one.
    """

    def __init__(
        self,
        reader: Reader,
        weights: Weights,
        chosen: Sequence[int],
        device: torch.device,
        *,
        prologue: bool,
        strategies: str | Sequence[str] | None,
        verified: bool,
        running: Running = Running(),
        simplify: bool = True,
        limit: float | None = 1.0,
    ) -> None:
        self.reader, self.weights, self.chosen, self.device = reader, weights, tuple(chosen), device
        self.prologue, self.strategies, self.verified, self.running = prologue, strategies, verified, running
        self.simplify = simplify
        self.manifest: Manifest = reader.manifest
        self.probe = Weights([reader.path(reader.manifest.probe)]) if reader.manifest.probe else None
        self.limit = limit
        self.budget = self.fresh_budget()
        self.loading = False
        self.members: tuple[str, ...] = tuple(self.manifest.members[i].name for i in self.chosen)
        self.whole = len(self.chosen) == len(self.manifest.members)
        self.lock = threading.RLock()
        self.closed = False
        self._values: dict[str, Any] = {}

    def fresh_budget(self) -> Budget | None:
        """What programs may take that are bound together: all of one load, or those of one later pattern. None: no limit."""
        if self.limit is None:
            return None
        probe = [self.reader.path(self.manifest.probe)] if self.manifest.probe else []
        weights, probed = (sum(p.stat().st_size for p in paths) for paths in (self.reader.weights_files(), probe))
        return Budget.of(weights, probed, self.limit)

    def index(self, member: int | str) -> int:
        """A loaded member's place. Raises: UsageError."""
        if isinstance(member, str):
            if member not in self.members:
                raise UsageError(f"no member is called {member!r}; the members are {', '.join(self.members[:20])}")
            return self.members.index(member)
        if not -len(self.members) <= member < len(self.members):
            raise UsageError(f"member {member} of {len(self.members)}; members are numbered from 0")
        return member % len(self.members)

    def part(self, name: str, i: int) -> torch.Tensor:
        """Weight `name` of the artifact's member i, mapped."""
        row = next(w for w in self.manifest.weights if w.name == name)
        return (
            self.weights.get(name)
            if row.kind == "shared"
            else self.weights.get(f"{name}@{i}")
            if row.kind == "ragged"
            else self.weights.slice(name, i)
        )

    def weight(self, name: str) -> Any:
        """A weight of the loaded members, on the device: shared `[...]`, stacked `[N, ...]`, ragged a list of N."""
        row = next((w for w in self.manifest.weights if w.name == name), None)
        if row is None:
            raise ArtifactError(f"a program reads the weight {name!r}, which the manifest's table does not have")
        if name in self._values:
            return self._values[name]
        if row.kind == "ragged":
            value: Any = [self.weights.get(f"{name}@{i}").to(self.device) for i in self.chosen]
        elif row.kind == "stacked" and not self.whole:
            value = self._values[name] = torch.stack([self.weights.slice(name, i) for i in self.chosen]).to(
                self.device
            )  # a copy: one for all programs
        else:
            value = self.weights.get(name).to(self.device)
        return value

    def located(self) -> list[Mapped]:
        """Every tensor of the weights files, where it is mapped."""
        found = []
        for path in self.reader.weights_files():
            read = header.read(path)
            for name, row in read.tensors.items():
                found.append(Mapped(self.weights.get(name).data_ptr(), row.end - row.begin, path.name, read.start + row.begin))
        return found

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._values.clear()
