"""Tests the costs of ops: each allowed op has a cost class, and the costs of products agree with torch's
count of operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from widepack.ir import ops
from widepack.ir.op_records import RECORDS, by_tags
from widepack.rows.walk import RULES
from widepack.runtime import op_costs
from widepack.runtime.flop_formulas import FORMULAS
from widepack.runtime.meta_values import META
from widepack.runtime.op_costs import rate
from widepack_artifacts.opset import OPS

NAMED = sorted(OPS - set(ops.PYTHON) - {"loop"})


@pytest.mark.parametrize("op", NAMED)
def test_each_allowed_op_has_a_record_or_is_a_view(op: str) -> None:
    """A new op of the allow-list needs a decision on its cost, unless torch's tags say what it is."""
    known = op.rpartition(".")[0] in RECORDS or by_tags(ops.resolve(op)) is not None
    assert known or ops.returns_view(op)


def test_records_name_classes_and_treatments_that_exist() -> None:
    for name, known in RECORDS.items():
        assert known.cost in op_costs.CLASSES, name
        assert known.rows in {"", *RULES}, name


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
    given = {"input": x, "weight": weight, "transposed": transposed}
    assert FORMULAS["convolution"]("aten.convolution", given, out) == counter.get_total_flops()
