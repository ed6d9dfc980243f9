"""Tests that a build changes no setting of the process that other threads see."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from loaded import save_members
from small_builds import QUICK
from torch import Tensor, nn

from widepack import build


class Floats(nn.Module):
    """Makes floats of integers, of sizes and of nothing, in float32 by torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        y = self.a(x) * (n / 3).unsqueeze(-1) + n.unsqueeze(-1) * 0.1
        y = y + torch.arange(4) / 7 + torch.full((4,), 0.3) + torch.linspace(0, 1, 4)
        y = y + torch.where(n > 2, 0.1, 0.7).unsqueeze(-1) + torch.sqrt(n.abs()).unsqueeze(-1)
        z: Tensor = (
            y * torch.sigmoid(n).unsqueeze(-1) + n.double().mean().float() + torch.exp(n).mean() * 1e-3
        )
        return z


def test_a_build_leaves_the_default_dtype_to_other_threads(tmp_path: Path) -> None:
    paths = save_members(Floats, tmp_path, 2)
    stop, seen = threading.Event(), set()

    def watch() -> None:
        while not stop.wait(0.001):
            seen.add((torch.randn(1).dtype, torch.is_grad_enabled(), torch.get_num_threads() > 0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        sample = (torch.randn(3, 4), torch.randint(0, 5, (3,)))
        build(paths, tmp_path / "e.wide", model=Floats, sample=sample, **QUICK)
    finally:
        stop.set()
        thread.join()
    assert seen == {(torch.float32, True, True)}
