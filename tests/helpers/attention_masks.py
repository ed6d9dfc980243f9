"""Attention with masks, whose costs are compared with pairs that are counted one by one in real masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from counted import torch_flops
from torch import Tensor, nn

from widepack.building.model_costs import model_costs
from widepack_artifacts.costs import documents, read_documents

HEADS, WIDTH = 2, 8
INF = float("-inf")
Maker = Callable[[int, int], Tensor]


def ij(t: int, s: int) -> tuple[Tensor, Tensor]:
    return torch.arange(t)[:, None], torch.arange(s)[None]


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, INF)


def forbidden(mask: Tensor) -> int:
    return int(((~mask) if mask.dtype == torch.bool else mask < -1e4).sum())


class Attention(nn.Module):
    """Attention with a mask. how: as an argument, or written out in one of the usual ways."""

    def __init__(self, mask: Maker, how: str = "argument") -> None:
        super().__init__()
        self.mask, self.how = mask, how

    def forward(self, q: Tensor, k: Tensor) -> Any:
        mask = self.mask(q.shape[-2], k.shape[-2])
        if self.how == "argument":
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        scores = q @ k.transpose(-1, -2) * WIDTH**-0.5
        if self.how == "added":
            scores = scores + (additive(mask) if mask.dtype == torch.bool else mask)
        elif self.how == "filled":
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif self.how == "where":
            scores = torch.where(mask, torch.tanh(scores / 30.0) * 30.0, torch.full([], INF))
        return F.dropout(scores.softmax(-1), 0.1, self.training).to(k.dtype) @ k


INPUTS = [f"q=float32[B,{HEADS},T,{WIDTH}]", f"k=float32[B,{HEADS},S,{WIDTH}]"]
SIZES = [(1, 5, 5), (3, 9, 17), (2, 17, 9), (1, 40, 40), (2, 2, 30)]


class Several(nn.Module):
    """Attention with several masks, each in a module of its own."""

    def __init__(self, parts: list[Attention]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, q: Tensor, k: Tensor) -> Any:
        return [part(q, k) for part in self.parts]


def check(parts: list[tuple[Maker, str]], wide: int = 0) -> None:
    """Compares the formulas of each module with its mask. What reads no weight is Shared: it runs once."""

    def make() -> nn.Module:
        return Several([Attention(mask, how) for mask, how in parts])

    costs = model_costs(make, INPUTS, wide=wide)
    by_module: dict[str, int] = {}
    for b, t, s in SIZES:
        sizes = {"B": b, "T": t, "S": s}
        values = costs.values(sizes, members=3)
        found = {f"parts.{i}": 0 for i in range(len(parts))}
        for row in costs.rows:
            found[row.module] += int(costs.evaluate(row.costs.get("masked_flops", ("0", "0")), values))
        for i, (mask, how) in enumerate(parts):
            wanted = 4 * b * HEADS * WIDTH * forbidden(mask(t, s))
            assert found[f"parts.{i}"] == wanted, (mask, how, sizes)
            by_module[f"parts.{i}"] = by_module.get(f"parts.{i}", 0) + wanted
        assert costs.at(values)["masked_flops"] == sum(found.values())
        assert costs.at(values)["flops"] == torch_flops(make, INPUTS, sizes)
    assert all(by_module.values())
    assert read_documents(documents({"forward": costs})) == {"forward": costs}
