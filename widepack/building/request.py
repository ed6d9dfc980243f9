"""Holds the parsed and checked arguments of one build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from widepack_artifacts.errors import some

from ..checkpoints.discovery import MemberPlace, member_names
from ..errors import UsageError
from ..fleet.adapter import adapters_inside, is_adapter
from ..planning.request import StrategyRequest
from ..spec.input_spec import type_text
from ..spec.names import read_names
from ..spec.state import StateRequest
from ..system.progress import Report
from ..tuning.tune import BATCHES
from .captures import CallDescription, specs_of
from .features import features_of
from .write import SHARD_BYTES

TARGETS = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """The arguments of `widepack.build`, parsed and checked.

    places: where the members are. names: of the members. ignore: patterns of names that are not the model's.
    one_checkpoint: whether all members are passes of one checkpoint. shard_bytes: the largest size of a
    weights file. part_counts: the numbers of parts of the members whose programs are written too. budget:
    the seconds in which plans are measured, if nothing excludes it. tune_batches: the batches to tune at, or
    None. dropout: whether dropout is on. base: the checkpoint of the base of a fleet, or None. unmerge:
    whether to look for a base and low-rank differences in merged checkpoints. tolerance: the part of what
    fine-tunes change in the answers that approximate factors may change; None if none are approximate.
    features: their names, as the user gives them; the inputs are known after the capture.

    Raises: UsageError for arguments that exclude each other, and for input specs that cannot be read.
    """

    places: tuple[MemberPlace, ...]
    names: tuple[str, ...]
    out: str | Path
    model: str | Callable[..., nn.Module] | None = None
    model_args: Mapping[str, Any] | None = None
    calls: CallDescription = field(default_factory=CallDescription)
    entries: tuple[str, ...]
    states: tuple[StateRequest, ...] = ()
    key: str | None = None
    ignore: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    trust_pickle: bool = False
    skip_bad: bool = False
    strategies: StrategyRequest = field(default_factory=StrategyRequest)
    targets: tuple[str, ...] = TARGETS
    share: str = "auto"
    pt2: bool = True
    shard_bytes: int = SHARD_BYTES
    part_counts: tuple[int, ...] = ()
    force: bool = False
    dry_run: bool = False
    budget: float = 0.0
    tune_batches: tuple[int, ...] | None = None
    dropout: bool = False
    one_checkpoint: bool = False
    base: str | None = None
    unmerge: bool = False
    tolerance: float | None = None
    features: Any = None
    progress: Report | None = None

    def __post_init__(self) -> None:
        for target in self.targets:
            if target not in TARGETS:
                raise UsageError(f"unknown target {target!r}; known: {', '.join(TARGETS)}")
        if self.tune_batches is not None and self.strategies != StrategyRequest():
            raise UsageError(
                "tune and strategy are both given, but tune chooses the strategies by measurement; "
                "give one of the two"
            )
        self._check_fleet()
        # A mistake in a spec is reported before any checkpoint is read.
        types: dict[str, str] = {}
        for name in self.entries if self.calls.inputs else ():
            specs, _ = specs_of(self.calls.inputs or (), name, self.entries)
            types |= {spec.name: type_text(spec) for spec in specs}
        if types:
            features_of(self.features, types)

    def _check_fleet(self) -> None:
        """Refuses a base without fine-tunes, and fine-tunes without their base. Raises: UsageError."""
        adapters = adapters_in(self.paths)
        for path in self.paths:
            if path not in adapters and (inside := adapters_inside(path)):
                raise UsageError(
                    f"{path} has no adapter_config.json and no weights: it is a folder of adapters. Give the"
                    f" adapters in it, with --base: {some(inside, 4)}"
                )
        if adapters and len(adapters) < len(self.paths):
            other = next(path for path in self.paths if path not in adapters)
            raise UsageError(
                f"{adapters[0]} is an adapter, and {other} is none; give adapters with their base, or whole"
                " checkpoints"
            )
        if adapters and self.base is None:
            raise UsageError(
                f"{adapters[0]} is a LoRA adapter, which is a difference from a base model: give the base's"
                " folder or file with --base"
            )
        if adapters and self.unmerge:
            raise UsageError(
                "unmerge is for checkpoints that adapters were merged into; these are adapters: leave it out"
            )
        if self.base is not None and not adapters and not self.unmerge:
            raise UsageError(
                f"a base is given ({self.base}), but no adapter; add --unmerge for checkpoints that adapters"
                " were merged into, or leave the base out"
            )
        if self.tolerance is not None and not (self.unmerge and self.base is not None):
            raise UsageError(
                "tolerance is a part of what fine-tunes change over their base: it needs --unmerge and --base"
            )
        number = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if self.tolerance is not None and not (number and 0 < self.tolerance < 1):
            raise UsageError(
                f"tolerance is {self.tolerance!r:.40}; it is a part between 0 and 1, such as 0.05"
            )
        if (adapters or self.unmerge) and self.one_checkpoint:
            raise UsageError(
                "n is for stochastic passes of one checkpoint, which have no differences from it"
            )
        if (adapters or self.unmerge) and self.share == "none":
            raise UsageError("share='none' stores every member's weights, but a fleet shares its base")

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each member's checkpoint, as the user gave it."""
        return tuple(place.path for place in self.places)

    @property
    def measures(self) -> bool:
        """Whether plans are measured after the build."""
        chosen = self.tune_batches is not None or self.strategies != StrategyRequest()
        return self.budget > 0 and not (chosen or self.dry_run or self.dropout)

    def states_of(self, entry: str) -> list[StateRequest]:
        """Returns the states that were requested for one entry."""
        return [s for s in self.states if s.entry in ("", entry)]


def adapters_in(paths: Sequence[str]) -> list[str]:
    """Returns the paths that are folders of LoRA adapters."""
    return [path for path in paths if is_adapter(path)]


def names_of(
    names: str | Path | Sequence[str] | None, paths: Sequence[str], count: int, one_checkpoint: bool
) -> tuple[str, ...]:
    """Returns the names of the members.

    Without `names` they are taken from the paths, or are numbers if all members are passes of one checkpoint.
    Raises: UsageError.
    """
    if names is not None:
        return tuple(read_names(names, count))
    return tuple(map(str, range(count))) if one_checkpoint else tuple(member_names(paths))


def part_counts_of(shards: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the numbers of parts that have programs of their own, each once.

    Raises: UsageError for what is no number of at least 2.
    """
    counts = () if shards is None else (shards,) if isinstance(shards, int) else tuple(shards)
    for count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or count < 2:
            raise UsageError(f"shards={count!r} is not a number of parts; give 2 or more")
    return tuple(dict.fromkeys(counts))


def batches_of(tune: bool | Sequence[int]) -> tuple[int, ...] | None:
    """Returns the batches that `tune` names; None if the build is not tuned."""
    if tune is False:
        return None
    return tuple(BATCHES) if tune is True else tuple(tune)
