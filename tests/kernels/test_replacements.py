"""Tests the functions that replace ops of torch, against what torch documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from widepack.ir import ops
from widepack.kernels.replacements import REPLACEMENTS, own_memory

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


@pytest.mark.parametrize("size", [2, 4, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_eigenvalues_of_a_matrix_that_is_not_finite(size: int, dtype: torch.dtype, number: float) -> None:
    """LAPACK would write outside of its memory. The other matrices keep every bit."""
    torch.manual_seed(size)
    x = torch.randn(3, size, size, dtype=dtype)
    wanted = torch.linalg.eigvals(x)
    x[1, -1, 0] = number
    found = run("linalg_eigvals.default", x)
    assert found.dtype == wanted.dtype and found[1].isnan().all()
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    assert run("linalg_eigvals.default", x[1]).isnan().all()
    with pytest.raises(RuntimeError, match="should not contain infs or NaNs"):
        run("linalg_eig.default", x)


def test_eigenvalues_of_empty_and_wrong_operands() -> None:
    assert run("linalg_eigvals.default", torch.ones(0, 3, 3)).shape == (0, 3)
    assert run("linalg_eigvals.default", torch.ones(2, 0, 0)).shape == (2, 0)
    for x in (torch.ones(3), torch.ones(2, 3)):
        with pytest.raises(RuntimeError, match=r"linalg\.eigvals|linalg_eigvals|must be"):
            run("linalg_eigvals.default", x)


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


def test_a_group_norm_with_an_expanded_weight() -> None:
    x, one, other = torch.randn(2, 4, 3), torch.tensor([2.0]).expand(4), torch.arange(8.0)[::2]
    for weight, bias in ((one, None), (None, one), (other, one)):
        y = run("native_group_norm.default", x, weight, bias, 2, 4, 3, 2, 1e-5)[0]
        w, b = (None if v is None else v.clone() for v in (weight, bias))
        torch.testing.assert_close(y, torch.nn.functional.group_norm(x, 2, w, b))


@pytest.mark.parametrize(
    "name", ["scaled_dot_product_attention.default", "_scaled_dot_product_flash_attention_for_cpu.default"]
)
def test_attention_over_windows_that_overlap(name: str) -> None:
    """torch gives the answer the strides of the query, and writes only a part of it."""
    windows = torch.randn(1, 1, 63 + 64 - 1).unfold(-1, 64, 1)
    assert windows.shape == (1, 1, 63, 64)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(windows.contiguous(),) * 3)
    found = run(name, windows, windows, windows)
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, wanted)


def test_values_of_their_own_memory_are_not_copied_for_attention() -> None:
    """Query, key and value are often three parts of one result: copies of them would take time."""
    parts = torch.randn(2, 8, 3, 4, 16).unbind(2)
    for part in (parts[0].transpose(1, 2), parts[1], torch.randn(3, 4).t()):
        assert own_memory(part) is part
    for shared in (torch.randn(3, 1).expand(3, 4), torch.randn(9).unfold(0, 4, 1)):
        assert own_memory(shared) is not shared and torch.equal(own_memory(shared), shared)


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


STRIDED = {
    "ids": ("_embedding_bag_forward_only.default", (torch.randn(5, 2), ids(3).expand(12), ids(0, 4))),
    "offsets": ("_embedding_bag.default", (torch.randn(5, 2), ids(0, 1), ids(0).expand(3))),
    "every second id": (
        "_embedding_bag.default",
        (torch.randn(9, 2), ids(*range(8))[::2], ids(0, 2), False, 1),
    ),
    "targets": (
        "ctc_loss.IntList",
        (torch.randn(12, 2, 6).log_softmax(-1), ids(1, 9, 2, 9, 3, 9, 4, 9)[::2], [12, 10], [2, 2]),
    ),
    "batch sizes": (
        "gru.data",
        (
            torch.randn(9, 3),
            ids(3).expand(3),
            torch.zeros(1, 3, 4),
            [torch.randn(12, 3), torch.randn(12, 4)],
            False,
            1,
            0.0,
            False,
            False,
        ),
    ),
    "repeats": ("repeat_interleave.Tensor", (ids(1, 0, 2, 0, 3)[::2],)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_kernels_read_strided_operands_as_contiguous_ones(name: str) -> None:
    op, args = STRIDED[name]
    dense = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args]
    found, wanted = run(op, *args), run(op, *dense)
    torch.testing.assert_close(
        found[0] if isinstance(found, tuple) else found, wanted[0] if isinstance(wanted, tuple) else wanted
    )
