"""Tests the functions that replace ops of torch, against what torch documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from widepack.ir import ops
from widepack.kernels.replacements import REPLACEMENTS

LEAST = -(2**63)


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    return ops.function(f"aten.{name}")(*args, **kwargs)


def test_every_replacement_is_of_an_op_that_programs_may_use() -> None:
    for name in REPLACEMENTS:
        assert ops.resolve(name) is not None, name


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("empty.memory_format", ([3, 5],)),
        ("empty_like.default", (torch.full((3, 5), 7.0),)),
        ("new_empty.default", (torch.full((2,), 7.0), [3, 5])),
    ],
)
def test_memory_that_a_program_never_wrote_is_zero(name: str, args: tuple[Any, ...]) -> None:
    for _ in range(20):
        torch.full((3, 5), 7.0)  # leaves its number in memory that the next allocation may get
        y = run(name, *args, dtype=torch.float32, device="cpu")
        assert torch.equal(y, torch.zeros(3, 5))
    half = run(
        "empty_like.default", torch.ones(2, 3), dtype=torch.float16, memory_format=torch.preserve_format
    )
    assert half.dtype == torch.float16 and not half.any()


def rows() -> Tensor:
    return torch.arange(20.0).view(4, 5)


def test_a_reshaped_value_has_none_of_the_memory_around_it() -> None:
    """The value is a row of a caller's tensor. Sizes and strides that name other rows are refused."""
    row = rows()[1]
    assert torch.equal(run("_reshape_alias.default", row, [5, 1], [1, 1]), row.view(5, 1))
    with pytest.raises(RuntimeError, match="invalid for input of size 5"):
        run("_reshape_alias.default", row, [2, 5], [5, 1])
    swapped = rows().t()
    assert torch.equal(run("_reshape_alias.default", swapped, [20], [1]), swapped.reshape(20))


@pytest.mark.parametrize("name", ["median.dim", "nanmedian.dim"])
def test_medians_of_expanded_tensors(name: str) -> None:
    """torch's kernel reads the four numbers after the one that is expanded."""
    many = torch.arange(20.0)
    for x in (many[3:4].expand(5), many[3:5].view(2, 1).expand(2, 5), rows(), rows().t(), many[::3]):
        values, indices = run(name, x, -1)
        wanted = getattr(torch, name.split(".")[0])(x.clone(memory_format=torch.contiguous_format), -1)
        assert torch.equal(values, wanted.values) and torch.equal(indices, wanted.indices)


def test_the_least_common_multiple() -> None:
    a, b = torch.tensor([4, 6, 0, 0, -21, 7]), torch.tensor([6, -4, 5, 0, 6, 7])
    assert run("lcm.default", a, b).tolist() == [12, 12, 0, 0, 42, 7]
    assert run("lcm.default", a.to(torch.int8), b).dtype == torch.int64
    assert run("lcm.default", a.view(6, 1), b).shape == (6, 6)
    least = torch.tensor([LEAST, LEAST, LEAST])
    run("lcm.default", least, torch.tensor([5, -1, LEAST]))  # torch's kernel ends the process here


def test_a_masked_softmax_of_tensors_in_another_order() -> None:
    x, mask = torch.randn(2, 3, 4, 4), torch.tensor([[True, False, False, True], [False, True, False, False]])
    wanted = x.masked_fill(mask.view(2, 1, 1, 4), float("-inf")).softmax(-1)
    turned, other = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), mask.t().contiguous().t()
    for a in (x, turned):
        for b in (mask, other):
            torch.testing.assert_close(run("_masked_softmax.default", a, b, -1, 1), wanted)
