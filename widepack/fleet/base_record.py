"""Records the base of a fleet in the artifact's provenance, and warns of adapters that name another base.

`adapter_config.json` has the name of the base model that an adapter was trained on. The name is no proof: two
names or paths can be of one model. So another name is a warning, not an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from .adapter import Adapter

BASE = "base"
"""The field of the provenance with the record of the base."""
_NAMED = "named"
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class FleetBase:
    """The base that a fleet was built with.

    checkpoint: of the base. named: the name of the base model in the settings of all adapters; "" if they
    name none, or several.
    """

    checkpoint: Checkpoint
    named: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the record for the provenance. Raises: CheckpointError if a file changed meanwhile."""
        return {
            "source": self.checkpoint.path,
            "sha256": self.checkpoint.sha256(),
            "bytes": self.checkpoint.bytes,
            **({_NAMED: self.named} if self.named else {}),
        }


def base_of(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> FleetBase:
    """Returns the base of adapters, and warns if they name several base models."""
    first: dict[str, str] = {}
    for adapter in adapters:
        if adapter.config.base_model:
            first.setdefault(_shown(adapter.config.base_model), adapter.path)
    if len(first) > 1:
        (one, one_path), (other, other_path) = list(first.items())[:2]
        warnings.warn(
            f"the adapters name {len(first)} base models: {one_path} names {one!r}, and {other_path} names"
            f" {other!r}. All of them get the base {checkpoint.path}; if these are different models, build"
            " one artifact for each",
            stacklevel=2,
        )
    return FleetBase(checkpoint, next(iter(first)) if len(first) == 1 else "")


def warn_of_other_base(provenance: Mapping[str, Any], adapter: Adapter) -> None:
    """Warns if an adapter names another base model than the adapters of an artifact.

    provenance: of the artifact. It is a free record, so any value in it is accepted.
    """
    record = provenance.get(BASE)
    named = record.get(_NAMED) if isinstance(record, dict) else None
    mine = _shown(adapter.config.base_model)
    if not mine or not isinstance(named, str) or not named or mine == _shown(named):
        return
    warnings.warn(
        f"adapter {adapter.path} names the base model {mine!r}, and the adapters of the artifact name"
        f" {_shown(named)!r}. Its answers are computed over the artifact's base; if these are different"
        " models, build an artifact with the other base",
        stacklevel=6,
    )


def _shown(name: str) -> str:
    return name.rstrip("/")[:_MOST_CHARACTERS]
