"""Defines the op `grouped_experts`: products of rows with the matrices of experts, as one grouped product.

    y[i, r] = x[i, r] @ weight[i, index[i, r]]
    x: [N, R, I]   weight: [N, E, I, O]   index: [N, R], from -E to E - 1   y: [N, R, O], bfloat16

The op sorts the rows of all members by expert, and calls torch's `grouped_mm` with the end of each group.
That is one kernel on CUDA devices of compute capability 9.0, and the host waits for nothing, so a CUDA graph
can capture it. That kernel takes at most `MOST_GROUPS` groups, one for each expert of each member. The op
divides more members into several grouped products, whose rows are known without their values. A member with
more experts copies the matrix of each row. Elsewhere torch runs one product after the other. In ATen
ops the op copies the matrix of each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks.require import dense, require
from .experts import check_experts
from .library import NodeList, in_aten, own_op

OP = "widepack.grouped_experts.default"
MULTIPLE = 8
"""I and O must be multiples of this: rows of a grouped product begin at multiples of 16 bytes."""
SORTING_KERNELS = 7
"""How many kernels the op starts to sort rows by expert and to find where groups end. An estimate from its
ops: a read at indices, a sort of four kernels, a search and a cast."""
MOST_GROUPS = 1023
"""The most groups of one grouped product: torch's kernel for compute capability 9.0 refuses 1,024."""


@own_op(
    "grouped_experts(Tensor x, Tensor weight, Tensor index) -> Tensor",
    lambda x, weight, _: x.new_empty((weight.shape[0], x.shape[1], weight.shape[3])),
)
def _grouped_experts(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    inputs, outputs = dense("weight", weight, 4).shape[2:]
    require(weight.dtype is torch.bfloat16, f"weight is {weight.dtype}; bfloat16 is needed")
    require(inputs > 0 and outputs > 0, f"weight is {list(weight.shape)}; no size may be 0")
    require(inputs % 8 == 0 and outputs % 8 == 0, f"{inputs} and {outputs} are not multiples of 8")
    check_experts(x, weight, index, inputs)
    return _products(x, weight, index)


def _products(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    members, experts, inputs, outputs = weight.shape
    if members * experts > MOST_GROUPS:
        return _in_parts(x, weight, index)
    numbers = torch.arange(members * experts, device=index.device).view(members, experts)
    places = torch.arange(members, device=index.device).unsqueeze(1)
    of_row, order = torch.sort(numbers[places, index.long()].flatten(), stable=True)  # refuses other experts
    ends = torch.searchsorted(of_row, numbers.flatten(), right=True).to(torch.int32)
    rows = x.reshape(-1, inputs).index_select(0, order)
    y = x.new_empty(rows.shape[0], outputs)
    if rows.shape[0]:
        matrices = _aligned(weight.reshape(-1, inputs, outputs))
        y.index_copy_(0, order, torch.nn.functional.grouped_mm(rows, matrices, offs=ends))
    return y.view(*index.shape, outputs)


def _in_parts(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Returns the products of more groups than one grouped product takes."""
    members, experts = weight.shape[:2]
    if experts > MOST_GROUPS:
        places = torch.arange(members, device=index.device).unsqueeze(1)
        return torch.matmul(x.unsqueeze(2), weight[places, index]).squeeze(2)
    parts = (torch.split(t, MOST_GROUPS // experts) for t in (x, weight, index))
    return torch.cat([_products(*part) for part in zip(*parts, strict=True)])


def _aligned(matrices: Tensor) -> Tensor:
    """Returns matrices whose rows, or columns, are dense and begin at multiples of 16 bytes."""
    first, row, column = matrices.stride()
    dense = (column == 1 and row % MULTIPLE == 0) or (row == 1 and column % MULTIPLE == 0)
    begin = matrices.storage_offset() % MULTIPLE == 0
    if dense and begin and first % MULTIPLE == 0:
        return matrices
    return matrices.clone(memory_format=torch.contiguous_format)


@in_aten(OP)
def _in_aten(new: NodeList, members: int, x: Any, weight: Any, index: Any) -> None:
    numbers = new.member_numbers(members)
    matrices = new.add("aten.index.Tensor", weight, [numbers, index], suffix="matrices")  # [N, R, I, O]
    rows = new.add("aten.unsqueeze.default", x, 2, suffix="one")
    product = new.add("aten.matmul.default", rows, matrices, suffix="product")
    new.add("aten.squeeze.dim", product, 2, suffix="of_rows")
