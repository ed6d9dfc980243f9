"""Lists the ops that run once for each member on purpose, if they read values that differ between members.

Every op that programs may use has a strategy (`registry`), becomes an op that has one
(`simplify/canonical.py`), takes no tensor, or has the reason in its record (`ir/op_records.py`).
"""

from __future__ import annotations

from widepack_artifacts.opset import OPS

from ..ir import ops
from ..ir.op_records import record
from ..registry.registry import REGISTRY
from ..simplify.canonical import REPLACED


def once_a_member() -> dict[str, list[str]]:
    """Returns for each reason the ops that run once for each member; "" is the reason of ops without one."""
    found: dict[str, list[str]] = {}
    for op in sorted(OPS - set(REGISTRY) - REPLACED):
        if op.startswith("aten.") and any("Tensor" in type_ for _, type_, _ in ops.arguments(op)):
            found.setdefault(record(op).once, []).append(op)
    return found
