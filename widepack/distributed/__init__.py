"""Runs one artifact on several devices, or in several processes: `widepack.load(device=[...])`,
`widepack.distributed.load`.

Each device or process has a part of the members. A call runs all parts and joins their answers. `reduce`
moves sums of each part instead of answers, and `route` sends rows to the part that has their member.

| in | out | start reading |
|---|---|---|
| an artifact and devices | `DeviceModel` | `device_load.py`, `device_model.py`, `device_entry.py` |
| an artifact, in each process of a group | `RankModel` | `rank_load.py`, `rank_model.py`, `rank_entry.py` |

| file | what it does |
|---|---|
| `collectives.py` | Moves tensors between the processes of a group, and raises when a process has ended |
| `device_entry.py` | Defines an entry of a model on several devices |
| `device_model.py` | Defines a loaded artifact whose members are on several devices of one process |
| `device_load.py` | Loads an artifact on one device or on several: `widepack.load` |
| `part_calls.py` | Calls the parts of the members, and joins or sums up what they answer |
| `rank_entry.py` | Defines an entry of a model whose members are in several processes |
| `rank_load.py` | Loads this process's part of an artifact: `widepack.distributed.load` |
| `rank_model.py` | Defines a loaded artifact whose members are in several processes |
| `split_entry.py` | Defines what entries over parts of the members have in common |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rank_load import load as load
    from .rank_model import RankModel as RankModel

_WHERE = {"load": "rank_load", "RankModel": "rank_model"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'widepack.distributed' has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
