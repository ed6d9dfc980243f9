"""Runs one artifact on several devices, or in several processes: `widepack.load(device=[...])`,
`widepack.distributed.load`.

Each device or process has a part of the members. A call runs all parts and joins their answers. `reduce`
moves sums of each part instead of answers, and `route` sends rows to the part that has their member.

| in | out | start reading |
|---|---|---|
| an artifact and devices | `DeviceModel` | `device_load.py`, `device_model.py` |
| an artifact, in each process of a group | `RankModel` | `rank_model.py` |

| file | what it does |
|---|---|
| `collectives.py` | Moves tensors between the processes of a group, and raises when a process has ended |
| `device_model.py` | Defines a loaded artifact whose members are on several devices, and its entries |
| `device_load.py` | Loads an artifact on one device or on several: `widepack.load` |
| `part_calls.py` | Calls the parts of the members, and joins or sums up what they answer |
| `rank_model.py` | Loads this process's part of an artifact, and defines the model and its entries |
| `split_entry.py` | Defines what entries over parts of the members have in common |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rank_model import RankModel as RankModel
    from .rank_model import load as load


def __getattr__(name: str) -> Any:
    if name not in ("load", "RankModel"):
        raise AttributeError(f"module 'widepack.distributed' has no attribute {name!r}")
    from . import rank_model

    return getattr(rank_model, name)
