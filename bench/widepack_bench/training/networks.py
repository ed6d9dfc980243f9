"""Lists the networks of the suite `training`, in sizes that people train on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from widepack.errors import UsageError

from ..models.factory import MODELS

CLASSES = 10
BASELINES = ("loop", "compiled-member", "compiled-loop", "vmap", "vmap-compiled", "processes")


@dataclass(frozen=True, slots=True)
class TrainingNetwork:
    """A classifier that is trained.

    title: its name in the table. size: width and depth in words. factory: `file:function` in `models/`.
    batch: rows of a step. sample: the shape of one row. members: the numbers of members that are measured.
    """

    name: str
    title: str
    size: str
    factory: str
    batch: int
    sample: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[int, ...] = (8, 32)

    @property
    def model(self) -> str:
        """Returns the name of the factory: `module:function`."""
        return f"{MODELS}.{self.factory}"


def _recurrent(kind: str, width: int) -> TrainingNetwork:
    return TrainingNetwork(
        f"{kind}-{width}",
        kind.upper(),
        f"width {width}, 1 layer, 20 steps",
        f"recurrent:{kind}",
        16,
        (20, 32),
        {"inputs": 32, "width": width, "layers": 1},
        (8,),
    )


NETWORKS: tuple[TrainingNetwork, ...] = (
    TrainingNetwork(
        "mlp", "MLP", "64-128-128-10", "mlp:deep", 32, (64,), {"width": 128, "depth": 2, "outputs": CLASSES}
    ),
    TrainingNetwork(
        "mlp-512",
        "MLP",
        "64-512-512-512-10",
        "mlp:deep",
        256,
        (64,),
        {"width": 512, "depth": 3, "outputs": CLASSES},
        (8,),
    ),
    TrainingNetwork(
        "conv-net", "convolutional net", "3 layers, 16 to 32 channels", "conv:small", 16, (3, 16, 16),
        {"width": 16},
    ),
    TrainingNetwork(
        "transformer",
        "vision transformer",
        "width 64, 2 blocks, 17 tokens",
        "transformer:vit",
        8,
        (3, 32, 32),
        {"image": 32, "patch": 8, "dim": 64, "depth": 2, "heads": 4, "classes": CLASSES},
    ),
    TrainingNetwork(
        "transformer-256",
        "vision transformer",
        "width 256, 2 blocks, 17 tokens",
        "transformer:vit",
        32,
        (3, 32, 32),
        {"image": 32, "patch": 8, "dim": 256, "depth": 2, "heads": 4, "classes": CLASSES},
        (8,),
    ),
    *(_recurrent(kind, width) for kind in ("lstm", "gru", "rnn") for width in (32, 64, 128)),
)  # fmt: skip


def chosen_networks(names: Sequence[str]) -> list[TrainingNetwork]:
    """Returns networks by name; all where none is named. Raises: UsageError with the known ones."""
    known = {network.name: network for network in NETWORKS}
    if unknown := [n for n in names if n not in known]:
        raise UsageError(
            f"the suite training has no network {', '.join(map(repr, unknown))}; "
            f"its networks are {', '.join(known)}"
        )
    return [network for network in NETWORKS if not names or network.name in names]
