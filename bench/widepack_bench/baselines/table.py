"""Lists the baselines: the members without widepack.

All return the same form: every output leaf is `[N, ...]`, or a list of N where the members' shapes differ.

| name | what it is |
|---|---|
| `loop` | the modules one after another, outputs stacked |
| `compiled-member` | one member under `torch.compile`, called N times with each member's weights |
| `compiled-loop` | all N calls and the stacking in one graph of `torch.compile` |
| `vmap` | `torch.func.vmap` of `functional_call` over stacked weights, eager |
| `vmap-compiled` | the same under `torch.compile` |
| `onnxruntime` | N sessions of ONNX Runtime, each writes its part of the output (CPU, if installed) |
| `cuda-graph-loop` | the loop recorded as one CUDA graph and replayed (CUDA) |

Baselines compile, export or record for the exact shapes of a call. A baseline is made from the modules and
`each`: whether inputs have one value for each member, stacked. A baseline that cannot be made or run for
these modules is skipped with its reason. Each is compared with the loop before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..measure.answers import Run as Run
from ..measure.answers import difference as difference
from ..measure.answers import leaves as leaves
from ..measure.answers import members_of as members_of
from ..measure.answers import stack as stack
from .compiled import compiled_loop, compiled_member, vmap_compiled
from .cuda_graph import cuda_graph_loop
from .members import loop as loop
from .onnxruntime_sessions import onnxruntime
from .vmap import vmap

Baseline = Callable[[Sequence[nn.Module], bool], Run]

BASELINES: dict[str, Baseline] = {
    "loop": loop,
    "compiled-member": compiled_member,
    "compiled-loop": compiled_loop,
    "vmap": vmap,
    "vmap-compiled": vmap_compiled,
    "onnxruntime": onnxruntime,
    "cuda-graph-loop": cuda_graph_loop,
}
COMPILED = ("compiled-member", "compiled-loop", "vmap-compiled")
"""Baselines whose first call may take minutes."""
