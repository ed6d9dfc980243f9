"""Tests that the public functions of torch that graphs call give the bits of the ops that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from widepack import ArtifactError
from widepack.ir import ops
from widepack.ir.ops import DIRECT, direct
from widepack.registry.samples import SAMPLES, Draw

SAMPLED = sorted(set(DIRECT) & set(SAMPLES))


def parts(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("op", SAMPLED)
def test_a_function_gives_the_bits_of_its_op(op: str) -> None:
    for args, kwargs in SAMPLES[op](Draw(0)):
        function = direct(op, kwargs)
        with torch.inference_mode():
            expected, found = parts(ops.resolve(op)(*args, **kwargs)), parts(function(*args, **kwargs))
        for a, b in zip(expected, found, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())


def test_most_functions_are_sampled() -> None:
    assert len(SAMPLED) > 0.8 * len(DIRECT), sorted(set(DIRECT) - set(SAMPLED))


def test_other_keywords_and_other_ops_take_the_op() -> None:
    assert direct("aten.relu.default", ()) is torch.relu
    assert direct("aten.relu.default", {"self": 1}) is ops.function("aten.relu.default")
    assert direct("aten.flip.default", ()) is ops.function("aten.flip.default")
    with pytest.raises(ArtifactError):
        direct("os.system.default", ())
