"""Finds what would make an artifact's calls faster: each move is predicted, carried out and measured.

| module | what it does |
|---|---|
| `run.py` | `advise(artifact)`: predicts, opens, checks and times every move |
| `machine_times.py` | measures the kernel times of this machine |
| `subject.py` | the artifact as it is now, its inputs, and what its members answer |
| `move.py` | a move: what it is called, how a user does it, how it is tried |
| `plan_moves.py` | moves that write other plans or another artifact |
| `load_moves.py` | moves that load the artifact in another way |
| `call_moves.py` | moves that call it in another way |
| `environment_moves.py` | settings of a process |
| `trial.py` | times a move against what is there now |
| `report.py` | the advice as text and as JSON |
"""

from .report import Advice
from .run import advise

__all__ = ["Advice", "advise"]
