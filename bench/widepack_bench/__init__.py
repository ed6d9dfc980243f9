"""Compares a wide model with what a user would run without widepack.

| module | what is in it |
|---|---|
| `suite` | `bench(artifact)`, `compare(ens, modules)`, and the suite of reference networks |
| `training` | training steps of fused members, beside the members trained one by one |
| `as_built` | artifacts as built and loaded, beside what users write instead, in processes that take turns |
| `advice` | `advise(artifact)`: what makes calls faster, predicted, tried and measured |
| `layers` | one layer of `torch.nn` at a time, every strategy beside the baselines |
| `baselines` | the members without widepack: an eager loop, `torch.func.vmap`, compiled, ONNX Runtime |
| `measure` | interleaved timing, intervals, A against A, profiles, rooflines, inputs |
| `processes` | contestants in their own process: start-up, peak memory |
| `report` | the results as a table, a JSON document, an HTML page |
| `models` | the reference networks and blocks |
| `selftest` | `widepack selftest`: checks every strategy on this machine |
| `errors` | the errors of the benchmarks |
| `text` | columns, times and sizes as text |

Start reading at `suite/bench.py`. The names below are imported at their first use, which keeps the command
line fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report.document import Report as Report
    from .report.row import Row as Row
    from .suite.bench import bench as bench
    from .suite.compare import compare as compare

_HOME = {
    "Report": ".report.document",
    "Row": ".report.document",
    "bench": ".suite.bench",
    "compare": ".suite.compare",
}
__all__ = ["Report", "Row", "bench", "compare"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
