"""Shares random numbers and plans between the tests of prepacked layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from widepack.planning.plan import NodeChoice, Plan
from widepack.registry.registry import REGISTRY
from widepack_artifacts.program import Program

OWN = torch.ops.widepack
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")  # type: ignore[no-untyped-call]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(
        dtype
    )


def chosen(member_program: Program, name: str) -> Plan:
    choices = {
        n.name: NodeChoice(name, "requested")
        for n in member_program.nodes
        if n.op in REGISTRY and name in REGISTRY[n.op].strategies
    }
    return Plan("cpu", "shared", (1, None), (), choices)
