"""Tests that every op whose result has a size of values has a bound, so that a default load admits it."""

from __future__ import annotations

import pytest
import torch

from widepack.ir import ops
from widepack.ir.limits import size
from widepack.runtime.walk import result_bytes
from widepack_artifacts import opset

NOT_EXPORTED = {"aten.linalg_lstsq.default"}  # torch.export refuses it
OF_VALUES = [n for n in opset.OPS if n.startswith("aten.") and opset.allowed(n) and ops.of_values(n)]


@pytest.mark.parametrize("name", sorted(set(OF_VALUES) - NOT_EXPORTED))
def test_an_op_of_values_has_a_bound(name: str) -> None:
    x = torch.ones(3, 3, dtype=torch.int64)
    args = [x if "Tensor" in type_ else default for _, type_, default in ops.arguments(name)]
    assert result_bytes(name, args, {}) is not None


@pytest.mark.parametrize("name", ["aten.where.default", "aten.nonzero.default"])
def test_the_bound_of_indices(name: str) -> None:
    for shape in ((), (7,), (4, 5), (2, 3, 4)):
        x = torch.ones(shape, dtype=torch.bool)
        bound = result_bytes(name, [x], {})
        found = ops.function(name)(x)
        found = found if isinstance(found, torch.Tensor) else torch.stack(list(found))
        assert bound is not None and found.nbytes <= bound <= 2 * size(found) + 8
