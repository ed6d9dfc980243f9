"""Fair comparisons of a wide model with what a user would run without it.

| module | what is in it |
|---|---|
| `noise` | interleaved timing, intervals, A against A; no torch |
| `inputs` | inputs for an artifact, made from its manifest |
| `baselines` | the members without widepack: an eager loop, `torch.func.vmap` eager and compiled |
| `suite` | `bench(artifact)` and `compare(ens, modules)` |
| `report` | what they give: a table, a JSON document; no torch |
| `text` | columns, times and sizes for a person; no torch |

The names below are imported when they are first used: the command line reads `text` alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report.document import Report as Report
    from .report.document import Row as Row
    from .suite.compare import bench as bench
    from .suite.compare import compare as compare

_HOME = {"Report": ".report", "Row": ".report", "bench": ".suite", "compare": ".suite"}
__all__ = ["Report", "Row", "bench", "compare"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
