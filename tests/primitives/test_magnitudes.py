"""Tests normalisations over large magnitudes: a strategy is finite wherever the op of each member is.

torch's kernels of some norms give NaN themselves where a variance overflows. A strategy may do the same
there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fusing import members
from oracle import combinations, member, memories, outputs, put, tensors, wide
from torch import Tensor, nn

from widepack import fuse
from widepack.lowering.interpreter import applicable
from widepack.registry.samples import SAMPLES, Draw, Sample
from widepack.registry.writer import EagerWriter

OPS = [
    f"aten.{name}"
    for name in (
        "group_norm.default",
        "layer_norm.default",
        "rms_norm.default",
        "instance_norm.default",
        "_native_batch_norm_legit_no_training.default",
        "_native_batch_norm_legit_functional.default",
        "_native_batch_norm_legit.no_stats",
        "_weight_norm.default",
        "renorm.default",
        "linalg_vector_norm.default",
        "softmax.int",
        "log_softmax.int",
        "logsumexp.default",
        "var.correction",
        "std.correction",
        "cosine_similarity.default",
    )
]
MAGNITUDES = (1e12, 3e18, 2e19, 1e30, 1e37, 1e38, 3.3e38)
CHANNELS_LAST = {"last"}
"""torch's kernels of group and batch norms for this memory order square numbers: of one member, too, they
overflow from about 2e19 on, where those for its own order are finite."""
FORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "uniform": lambda x, size: (x.double() / x.abs().max() * size).float(),
    "constant": lambda x, size: torch.full_like(x, size),
    "signs": lambda x, size: torch.where(x > 0, size, -size),
    "few": lambda x, size: torch.where(x > 1, size, x),
}


def enlarged(sample: Sample, form: str, size: float) -> Sample:
    """Returns the sample with its first tensor at another magnitude."""
    first, *others = tensors(sample)
    args, kwargs = put(sample, iter([FORMS[form](first, size), *others]))
    return args, kwargs


@pytest.mark.extended(keep=13)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_a_strategy_is_finite_where_the_members_are(op: str, form: str) -> None:
    columns = list(zip(*(SAMPLES[op](Draw(17 + i)) for i in range(3))))
    finite = 0
    for many in columns:
        if not tensors(many[0])[0].is_floating_point() or not tensors(many[0])[0].ndim:
            continue
        for size in MAGNITUDES:
            large = [enlarged(s, form, size) for s in many]
            for kinds in combinations(len(tensors(large[0]))):
                for memory in set(memories(large)) - CHANNELS_LAST:
                    args, kwargs, calls = wide(large, kinds, memory)
                    expected = [member(op, c) for c in calls]
                    w = EagerWriter(3)
                    w.op = op
                    for s in applicable(w, op, args, kwargs):
                        for got, want in zip(outputs(s.rule(w, *args, **kwargs), 3), expected):
                            for a, b in zip(tensors([got]), tensors([want])):
                                lost = torch.isfinite(b) & ~torch.isfinite(a)
                                assert not lost.any(), f"{s.name}, {memory}, {kinds}, {size}, {b.shape}"
                                finite += int(torch.isfinite(b).sum())
    assert finite


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.GroupNorm(2, 8), (2, 8, 4, 4)),
        (lambda: nn.LayerNorm(8), (2, 3, 8)),
        (lambda: nn.RMSNorm(8), (2, 3, 8)),
        (lambda: nn.BatchNorm2d(8), (2, 8, 4, 4)),
        (lambda: nn.InstanceNorm2d(8, affine=True), (2, 8, 4, 4)),
        (lambda: nn.Softmax(1), (2, 8)),
    ],
    ids=["group", "layer", "rms", "batch", "instance", "softmax"],
)
def test_fused_norms_are_finite_where_the_members_are(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    modules = members(make)
    fused = fuse(modules, torch.randn(shape), validate=False)
    torch.manual_seed(0)
    draws = torch.rand(3, *shape) * 2 - 1
    with torch.no_grad():
        for form in ("uniform", "constant", "signs"):
            for size in MAGNITUDES:
                xs = FORMS[form](draws, size)
                for each in (True, False):
                    answers = fused.each(xs) if each else fused(xs[0])
                    for i, m in enumerate(modules):
                        want = m(xs[i] if each else xs[0])
                        lost = torch.isfinite(want) & ~torch.isfinite(answers[i])
                        assert not lost.any(), f"{form}, {size}, member {i}"
