"""Tests results on the meta device that torch does not compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from widepack.ir import ops
from widepack.runtime.meta_values import _ALIKE, META, like_operand

SIZES = st.integers(1, 4)


@st.composite
def operands(draw: st.DrawFn, binary: bool) -> list[Tensor]:
    """Draws floating tensors of any memory order, some of which overlap or have gaps."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=4))
    found = []
    for size in [shape, *([draw(st.sampled_from([shape, shape[-1:], [1] * len(shape)]))] * binary)]:
        order = draw(st.permutations(range(len(size))))
        x = torch.empty(
            [size[i] for i in order], dtype=draw(st.sampled_from([torch.float32] * 3 + [torch.int64]))
        )
        x = x.to(META).permute([order.index(i) for i in range(len(size))])
        if draw(st.integers(0, 5)) == 0:
            x = x.repeat([2] * x.dim())[tuple(slice(None, None, 2) for _ in size)]
        if draw(st.integers(0, 5)) == 0:
            x = x[:1].expand(x.shape)
        found.append(x)
    return found


@pytest.mark.parametrize("op", sorted(_ALIKE))
@given(data=st.data())
def test_a_result_like_its_operand_is_what_torch_returns(op: str, data: st.DataObject) -> None:
    args: list[object] = [*data.draw(operands(binary=op.endswith("Tensor")))]
    args += [data.draw(st.sampled_from([2, 0.5, True, 1j]))] if op.endswith("Scalar") else []
    found = like_operand(op, args)
    if found is None:
        return
    expected = ops.function(op)(*args)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    pairs = [(a, b) for a, b, n in zip(found.stride(), expected.stride(), found.shape) if n > 1]
    assert all(a == b for a, b in pairs)


def test_results_like_their_operands_are_found() -> None:
    x = torch.empty(2, 3, 4, device=META).transpose(0, 2)
    assert like_operand("aten.relu.default", [x]) is not None
    assert like_operand("aten.add.Tensor", [x, x[..., :1]]) is not None
    assert like_operand("aten.add.Tensor", [x[..., :1], x]) is None
    assert like_operand("aten.mul.Scalar", [x, 1j]) is None
    assert like_operand("aten.relu.default", [x, x]) is None
    assert like_operand("aten.relu.default", []) is None
    assert like_operand("aten.add.Tensor", [x]) is None
    assert like_operand("aten.mul.Scalar", [x, "2"]) is None
