"""Tests more patterns of everyday code, from architectures of public packages: each is built, loaded, and
compared with every member alone in float64, in both presets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loaded import built, files_of
from small_builds import QUICK
from support import Bound, run
from torch import Tensor, nn

from widepack import build, load
from widepack.capture.patches import decompositions

N = 3
BATCHES = (5, 1, 2, 16)


class Experts(nn.Module):
    """Runs the experts of a mixture as one product over rows sorted by expert, as transformers does."""

    def __init__(self, experts: int, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts)
        self.up = nn.Parameter(torch.randn(experts, 16, 8) / 3)
        self.down = nn.Parameter(torch.randn(experts, 16, 8) / 4)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        expert, order = chosen.flatten().sort()
        counts = torch.histc(expert.float(), bins=len(self.up), min=0, max=len(self.up) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        y = self.product(x[order // 2], self.up.transpose(1, 2), ends)
        y = self.product(F.gelu(y), self.down, ends) * weight.flatten()[order].unsqueeze(1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        answer: Tensor = y[back].view(x.shape[0], 2, -1).sum(1)
        return answer


def group_by_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Does what an op of a library does for each group in turn. Rows after the last end are 0."""
    y, start = x.new_zeros(x.shape[0], weight.shape[2]), 0
    for g, end in enumerate(ends.tolist()):
        y[start:end] = x[start:end] @ weight[g]
        start = end
    return y


def keep_operands(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def gradients_by_group(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    start = 0
    for g, end in enumerate(ends.tolist()):
        of_x[start:end] = gradient[start:end] @ weight[g].T
        of_weight[g] = x[start:end].T @ gradient[start:end]
        start = end
    return of_x, of_weight, None


if not hasattr(
    torch.ops.transformers, "grouped_mm_fallback"
):  # registers the op as transformers does, if transformers has not
    torch.library.custom_op(
        "transformers::grouped_mm_fallback",
        group_by_group,
        mutates_args=(),
        schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor",
    )
    torch.library.register_fake(
        "transformers::grouped_mm_fallback", lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2])
    )
    torch.library.register_autograd(
        "transformers::grouped_mm_fallback", gradients_by_group, setup_context=keep_operands
    )


def grouped_mm_of_transformers(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)  # type: ignore[no-any-return]


class ShortGroups(nn.Module):
    """Rows after the last end belong to no group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = (x.new_tensor([0.2, 0.2, 0.7]) * x.shape[0]).to(torch.int32)
        return grouped_mm_of_transformers(x, self.weight, ends)


class Checked(nn.Module):
    """Only an assertion reads a size that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1)
        torch._check(lengths.max().item() <= x.shape[1])  # type: ignore[no-untyped-call]
        answer: Tensor = self.lin(x) * lengths.unsqueeze(1)
        return answer


class FirstKeys(nn.Module):
    """Concatenates an empty cache, a tensor of one dim without numbers, with tensors that have more dims."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tensor([]), self.lin(x)], dim=-2) * 2


@functools.cache
def _nodes(count: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.1, 1, count, dtype=dtype)


class Remembered(nn.Module):
    """Calls a function that caches its result. The cache must not keep a tensor of an export, or the module
    would later answer without numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y * _nodes(8, y.dtype)


class Moments(nn.Module):
    """Computes standard deviation and mean together, and variance and mean together."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        std, mean = torch.std_mean(y, dim=1, keepdim=True)
        var, middle = torch.var_mean(y, (0, 1), unbiased=False)
        return (y - mean) / std + var - middle


class Shifts(nn.Module):
    """Converts integers to bits and back, and computes powers of two."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        code = ((x * 8).long() << 2) >> 1
        return (
            torch.ldexp(y, (code ^ 3) % 4) * (1 << code % 5)
            + (64 >> code.to(torch.int8) % 5)
            + y * torch.kaiser_window(8)
            + torch.blackman_window(8)
        )


CASES: dict[str, Callable[[], nn.Module]] = {
    "experts_library": lambda: Experts(4, grouped_mm_of_transformers),
    "experts_many": lambda: Experts(40, grouped_mm_of_transformers),
    "short_groups": ShortGroups,
    "checked": Checked,
    "first_keys": FirstKeys,
    "shifts": Shifts,
    "remembered": Remembered,
    "moments": Moments,
}


def member(make: Callable[[], nn.Module], i: int) -> nn.Module:
    torch.manual_seed(i)
    return make().eval()


@pytest.mark.extended
@pytest.mark.parametrize("name", CASES)
def test_every_member_answers_as_alone(name: str, tmp_path: Path) -> None:
    make = CASES[name]
    members, exact = [member(make, i) for i in range(N)], [member(make, i).double() for i in range(N)]
    paths, inputs = files_of(tmp_path, members), ["x=float32[B,8]"]
    report = build(paths, tmp_path / "e.wide", model=make, inputs=inputs, strategy="wide", **QUICK)
    assert report.wide_share == 1.0
    assert "sequential" not in report.strategies
    ens = load(tmp_path / "e.wide", verify="off", warmup=False)
    bounds = [Bound() for _ in range(N)]
    for k, batch in enumerate(BATCHES):
        calls = [torch.randn(batch, 8, generator=torch.Generator().manual_seed(10 * k + i)) for i in range(N)]
        for answer, given in ((ens(calls[0]), [calls[0]] * N), (ens.each(torch.stack(calls)), calls)):
            for i in range(N):
                answer_alone = run(members[i], (given[i],), {})
                truth = run(exact[i], (given[i].double(),), {})
                bounds[i].add(answer[i], answer_alone, truth)
    for bound in bounds:
        bound.check()


@pytest.mark.parametrize("groups", [4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decomposed_grouped_product_equals_torchs(groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(groups * 3, 16).to(dtype), torch.randn(groups, 16, 8).to(dtype)
    ends = torch.randint(0, 6, (groups,)).cumsum(0).clamp_max(len(x)).to(torch.int32)
    ends[-1] = len(x)
    for form in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(
            decompositions.grouped_mm(x, form, ends), torch._grouped_mm(x, form, offs=ends)
        )
    assert decompositions.grouped_mm(x, weight[0]) is NotImplemented


class Observed(nn.Module):
    """Has inputs in `*args`, of which the first is a dict of two tensors with the same batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(3, 8)

    def forward(self, *x: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.a(x[0]["a"]) * self.b(x[0]["b"])
        return y


def test_a_dict_in_star_args_has_one_batch(tmp_path: Path) -> None:
    members = [member(Observed, i) for i in range(N)]
    sample = ({"a": torch.randn(5, 4), "b": torch.randn(5, 3)},)
    ens = load(built(tmp_path, Observed, members, sample=sample), verify="off", warmup=False)
    x = {"a": torch.randn(2, 4), "b": torch.randn(2, 3)}
    for answer, m in zip(ens(x), members):
        torch.testing.assert_close(answer, run(m, (x,), {}))
