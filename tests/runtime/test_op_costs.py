"""Tests the costs of ops: each allowed op has a cost class, and the costs of products agree with torch's
count of operations.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from widepack.ir import op_traits, ops
from widepack.runtime import op_costs
from widepack.runtime.cost_terms import rate
from widepack.runtime.matrix_costs import multiplications
from widepack.runtime.meta_values import META
from widepack_artifacts.opset import OPS

NAMED = sorted(OPS - set(ops.PYTHON) - {"loop"})


@pytest.mark.parametrize("op", NAMED)
def test_each_allowed_op_has_a_cost_class_or_is_a_view(op: str) -> None:
    """A new op of the allow-list needs a decision on its cost. No op is linear by default."""
    assert op_traits.cost_class(op.rpartition(".")[0]) is not None or ops.returns_view(op)


def test_no_op_has_two_cost_classes() -> None:
    listed = [name for names in op_traits.CLASS_NAMES.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(op_traits.CLASS_NAMES) == set(get_args(op_traits.CostClass))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META)


PRODUCTS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "aten.mm.default": ((meta(5, 7), meta(7, 3)), {}),
    "aten.addmm.default": ((meta(3), meta(5, 7), meta(7, 3)), {}),
    "aten.bmm.default": ((meta(2, 5, 7), meta(2, 7, 3)), {}),
    "aten.baddbmm.default": ((meta(2, 5, 3), meta(2, 5, 7), meta(2, 7, 3)), {}),
}


@pytest.mark.parametrize("op", PRODUCTS)
def test_products_cost_what_torch_counts(op: str) -> None:
    args, kwargs = PRODUCTS[op]
    with FlopCounterMode(display=False) as counter:
        result = ops.resolve(op)(*args, **kwargs)
    cost = op_costs.cost(op, args, kwargs, result)
    overhead = op_costs.CALL + sum(t.numel() for t in args) + result.numel()
    assert cost.work == pytest.approx(counter.get_total_flops() / 2 * rate(args[-1]) + overhead, rel=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_multiply_as_often_as_torch_counts(groups: int, transposed: bool) -> None:
    x, weight = meta(2, 4, 9, 9), meta(4, 6, 3, 3) if transposed else meta(6, 4 // groups, 3, 3)
    args: Any = (x, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    with FlopCounterMode(display=False) as counter:
        out = torch.ops.aten.convolution.default(*args)
    assert multiplications(x, weight, out, transposed) == counter.get_total_flops() / 2
