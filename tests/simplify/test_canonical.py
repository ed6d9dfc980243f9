"""Tests that programs that were saved in a decomposed form are rewritten to ops that have strategies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from loaded import seeded
from torch import Tensor, nn

import widepack


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, groups=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, output_padding=1)
        self.line = nn.Conv1d(4, 6, 3, dilation=2, groups=2)
        self.group, self.norm = nn.GroupNorm(2, 8), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(self.group(self.conv(x)), (1, 1, 1, 1), mode="reflect")
        y = self.up(F.pad(y, (1, 0, 0, 1), mode="replicate"))
        y = self.line(y.flatten(2)).transpose(1, 2)
        answer: Tensor = self.norm(y).mean(1)
        return answer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        answer: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return answer


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        y = F.grid_sample(self.conv(x), grid, align_corners=True)
        y = F.interpolate(y, size=(9, 7), mode="bicubic")
        return F.adaptive_avg_pool2d(y, 3)


@pytest.mark.extended
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)  # from the decompositions of torch
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (Vision, [(4, 3, 6, 6)]),
        pytest.param(Attention, [(4, 5, 16), (4, 5, 5)], marks=pytest.mark.slow),
        pytest.param(Sampled, [(4, 3, 6, 6), (4, 5, 5, 2)], marks=pytest.mark.slow),
    ],
)
def test_a_decomposed_program_runs_wide(
    make: type[nn.Module], shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    example = tuple(torch.rand(s) - 0.5 for s in shapes)
    paths = []
    for i in range(3):
        batch = {0: torch.export.Dim("batch", min=1, max=64)}
        exported = torch.export.export(
            seeded(make, i), example, dynamic_shapes=tuple(batch for _ in example), strict=False
        ).run_decompositions()
        paths.append(tmp_path / f"m{i}.pt2")
        torch.export.save(exported, paths[-1])
    widepack.build(paths, tmp_path / "e.wide", strategy="wide", pt2=False, targets=("cpu",))
    ens = widepack.load(tmp_path / "e.wide")
    used = set(ens.plan.strategies())
    assert "sequential" not in used and "loop" not in used, used
    call = tuple(torch.rand((3, *s[1:])) - 0.5 for s in shapes)
    with torch.no_grad():
        torch.testing.assert_close(
            ens(*call).clone(), torch.stack([seeded(make, i)(*call) for i in range(3)]), rtol=1e-4, atol=1e-5
        )
