"""Tests the ops over int8 weights against float64: the numbers, their bound, rows that are special."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from widepack.kernels import int8
from widepack.kernels.checks import OperandError
from widepack.kernels.library import FUNCTIONS

SCALES, WEIGHT, LINEAR = (FUNCTIONS[name] for name in (int8.SCALES, int8.WEIGHT, int8.LINEAR))
EPS = torch.finfo(torch.float32).eps


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the int8 numbers and the scales of a weight, in float64."""
    scales = SCALES(weight)
    members, outputs, inputs = weight.shape
    table = WEIGHT(weight, scales).view(members, inputs, -1)[..., :outputs]
    return table.double().transpose(1, 2) - 128, scales.double()


def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    scales = SCALES(weight)
    found = LINEAR(x, WEIGHT(weight, scales), scales, bias)
    assert isinstance(found, Tensor)
    return found


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_answers_are_those_of_the_int8_numbers(
    members: int, rows: int, inputs: int, outputs: int, shared: bool
) -> None:
    weight, bias = drawn(0, members, outputs, inputs), drawn(1, members, outputs)
    x = drawn(2, 1 if shared else members, rows, inputs)
    q, scales = numbers(weight)
    exact = x.double() @ q.transpose(1, 2) * scales.unsqueeze(1)
    # Each of the I products and sums rounds; stored bytes are larger by 128, which is subtracted.
    room = (x.double().abs() @ (q.abs() + 256).transpose(1, 2)) * scales.unsqueeze(1)
    for added in (None, bias):
        truth = exact if added is None else exact + added.double().unsqueeze(1)
        found = run(x, weight, added)
        assert found.shape == (members, rows, outputs)
        assert found.dtype == torch.float32
        assert bool(((found.double() - truth).abs() <= EPS * ((inputs + 2) * room + truth.abs())).all())


@given(st.integers(0, 2**20), st.floats(1e-44, 1e38))
def test_numbers_are_at_most_half_a_scale_away(seed: int, size: float) -> None:
    weight = drawn(seed, 2, 3, 17).clamp(-3, 3) * size
    q, scales = numbers(weight)
    assert float(q.abs().max()) <= 127
    assert bool((q == q.round()).all())
    errors = (weight.double() - q * scales.unsqueeze(2)).abs() / scales.unsqueeze(2)
    assert float(errors.max()) <= 0.5 + 127 * EPS  # w / scale is rounded to float32
    largest = weight.abs().amax(2).double()
    assert bool((scales * 127 >= largest * (1 - EPS)).all())  # the scale is rounded to float32
    normal = largest > 1e-35  # below, the scales are denormal numbers, which are few
    assert bool((scales * 126.99 <= largest)[normal].all())


def test_the_largest_number_of_each_row_is_kept() -> None:
    weight = drawn(3, 2, 5, 33)
    q, scales = numbers(weight)
    at = weight.abs().argmax(2, keepdim=True)
    back = (q * scales.unsqueeze(2)).gather(2, at)
    torch.testing.assert_close(back, weight.gather(2, at).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_there_alone(bad: float) -> None:
    weight, x, bias = drawn(0, 3, 6, 20), drawn(1, 3, 4, 20), drawn(2, 3, 6)
    right = run(x, weight, bias)
    weight[1, 2, 7] = bad
    found = run(x, weight, bias)
    assert bool(found[1, :, 2].isnan().all())
    found[1, :, 2] = right[1, :, 2]
    assert torch.equal(found, right)


def test_a_row_of_zeros_gives_the_bias() -> None:
    weight, x, bias = drawn(0, 2, 6, 20), drawn(1, 2, 4, 20), drawn(2, 2, 6)
    weight[1, 3] = 0
    found = run(x, weight, bias)
    assert torch.equal(found[1, :, 3], bias[1, 3].expand(4))
    assert torch.equal(run(x, torch.zeros_like(weight), None), torch.zeros(2, 4, 6))


def test_nan_in_a_row_of_x_is_in_its_answer_alone() -> None:
    weight, x = drawn(0, 2, 6, 20), drawn(1, 2, 4, 20)
    right = run(x, weight, None)
    x[0, 2, 3] = float("nan")
    found = run(x, weight, None)
    assert bool(found[0, 2].isnan().all())
    found[0, 2] = right[0, 2]
    assert torch.equal(found, right)


def test_a_row_has_the_same_bits_alone_and_on_several_threads() -> None:
    weight, x, bias = drawn(0, 3, 130, 70), drawn(1, 3, 9, 70), drawn(2, 3, 130)
    whole = run(x, weight, bias)
    for row in range(9):
        assert torch.equal(run(x[:, row : row + 1], weight, bias)[:, 0], whole[:, row])
    for member in range(3):
        alone = slice(member, member + 1)
        assert torch.equal(run(x[alone], weight[alone], bias[alone])[0], whole[member])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(run(x, weight, bias), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_input_of_all_members_is_that_of_each(rows: int) -> None:
    weight, x, bias = drawn(0, 3, 8, 20), drawn(1, 1, rows, 20), drawn(2, 3, 8)
    repeated = x.expand(3, rows, 20)
    assert torch.equal(run(x, weight, bias), run(repeated, weight, bias))
    assert torch.equal(run(x, weight, bias), run(repeated.contiguous(), weight, bias))


def test_no_rows_and_no_outputs() -> None:
    assert run(torch.empty(2, 0, 5), drawn(0, 2, 3, 5), None).shape == (2, 0, 3)
    assert run(drawn(0, 2, 4, 5), torch.empty(2, 0, 5), None).shape == (2, 4, 0)


def test_bytes_of_a_weight() -> None:
    weight = drawn(0, 4, 256, 128)
    table = WEIGHT(weight, SCALES(weight))
    assert table.nbytes == 4 * 128 * (256 + int8.TAIL)
    assert table.nbytes < weight.nbytes / 3.8


def test_fake_answers_have_the_sizes_of_the_right_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    weight, x = drawn(0, 2, 6, 20), drawn(1, 1, 4, 20)
    scales = SCALES(weight)
    table = WEIGHT(weight, scales)
    with FakeTensorMode() as mode:
        fake_x, fake_weight = mode.from_tensor(x), mode.from_tensor(weight)
        fake_scales = torch.ops.widepack.int8_scales(fake_weight)
        fake_table = torch.ops.widepack.int8_weight(fake_weight, fake_scales)
        fake_y = torch.ops.widepack.int8_linear(fake_x, fake_table, fake_scales, None)
    for fake, right in ((fake_scales, scales), (fake_table, table), (fake_y, LINEAR(x, table, scales, None))):
        assert (fake.shape, fake.dtype) == (right.shape, right.dtype)


def test_wrong_operands_are_refused() -> None:
    weight = drawn(0, 2, 6, 20)
    scales = SCALES(weight)
    table, x = WEIGHT(weight, scales), drawn(1, 2, 4, 20)
    for message, arguments in (
        ("x is for 3 members; 2 are needed", (drawn(1, 3, 4, 20), table, scales, None)),
        ("weight is [40, 14]; [38, 14] is needed", (x[..., :19], table, scales, None)),
        ("x is torch.float64; float32 is needed", (x.double(), table, scales, None)),
        ("x has 2 dims; 3 are needed", (x[0], table, scales, None)),
        ("weight is torch.int8; uint8 is needed", (x, table.to(torch.int8), scales, None)),
        ("weight has gaps", (x, table.repeat(1, 2)[:, :14], scales, None)),
        ("bias is [6]; [2, 6] is needed", (x, table, scales, torch.zeros(6))),
        ("scales has 1 dims; 2 are needed", (x, table, scales[0], None)),
    ):
        with pytest.raises(OperandError) as refused:
            LINEAR(*arguments)
        assert message in str(refused.value)
    with pytest.raises(OperandError, match=r"weight is torch.float16; float32 is needed"):
        SCALES(weight.half())
    with pytest.raises(OperandError, match="weight has no inputs"):
        SCALES(torch.empty(2, 3, 0))
    with pytest.raises(OperandError, match=r"scales is \[6\]; \[2, 6\] is needed"):
        WEIGHT(weight, scales[0])
