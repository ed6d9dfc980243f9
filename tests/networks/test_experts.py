"""Tests mixtures of experts that select the matrix of an expert for each row: each member routes its rows.

The three forms of a product are those of users and of transformers. Each network runs wide at every batch of
a CPU, by expert.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from small_builds import QUICK
from torch import Tensor, nn

from networks.test_patterns_more import grouped_mm_of_transformers
from widepack import build, fuse, load
from widepack_artifacts.program import Program

N, EXPERTS, ACTIVE, WIDTH = 3, 32, 2, 64
FEW = 8
BATCHES = (64, 1, 5)
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_einsum(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return torch.einsum("boi,bi->bo", weight[expert], x)


def by_bmm(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), weight.transpose(1, 2)[expert]).squeeze(1)


def by_groups(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    order = expert.argsort()
    experts = torch.arange(1, len(weight) + 1)
    ends = torch.searchsorted(expert[order], experts).to(torch.int32)
    back = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0]))
    return grouped_mm_of_transformers(x[order], weight.transpose(1, 2), ends)[back]


PRODUCTS: Mapping[str, Product] = {"einsum": by_einsum, "bmm": by_bmm, "grouped_mm": by_groups}


class Mixture(nn.Module):
    """Runs `ACTIVE` of `EXPERTS` experts for each row, and adds their answers by the router's weights."""

    def __init__(self, product: Product, experts: int = EXPERTS, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(ACTIVE)
        rows = x.repeat_interleave(ACTIVE, 0)
        y = self.product(rows, self.up, chosen.flatten()).relu()
        y = self.product(y, self.down, chosen.flatten()).view(-1, ACTIVE, x.shape[1])
        answer: Tensor = (y * weight.unsqueeze(-1)).sum(1)
        return answer


def members(product: Product, folder: Path, experts: int = EXPERTS) -> tuple[list[Mixture], list[str]]:
    nets, files = [], []
    for i in range(N):
        torch.manual_seed(i)
        nets.append(Mixture(product, experts).eval())
        files.append(str(folder / f"{i}.pt"))
        torch.save(nets[-1].state_dict(), files[-1])
    return nets, files


def programs(artifact: Path) -> list[Program]:
    found = sorted((artifact / "programs").glob("cpu.*.json"))
    return [Program.from_json(json.loads(p.read_text(encoding="utf-8"))) for p in found]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("form", PRODUCTS)
def test_each_member_runs_its_own_experts(form: str, tmp_path: Path) -> None:
    nets, files = members(PRODUCTS[form], tmp_path)
    torch.manual_seed(9)
    x = torch.randn(BATCHES[0], WIDTH)
    out = tmp_path / "moe.wide"
    build(files, out, model=lambda: Mixture(PRODUCTS[form]), sample=(x,), **QUICK)
    for program in programs(out):
        ran = [n.op for n in program.nodes]
        assert ran.count("widepack.expert_linear.default") == 2 and "loop" not in ran, ran
        matrices = f"{WIDTH},{WIDTH}]"
        copied = [n.name for n in program.nodes if n.out.endswith(matrices) and f"{EXPERTS}," not in n.out]
        assert not copied, "no op has a matrix for each row"
    ens = load(out)
    with torch.inference_mode():
        routes = {tuple(n.gate(x).topk(ACTIVE).indices.flatten().tolist()) for n in nets}
        assert len(routes) == N, "the members choose other experts"
        for batch in BATCHES:
            y, each = ens(x[:batch]), ens.each(x[:batch].expand(N, -1, -1))
            for i, net in enumerate(nets):
                torch.testing.assert_close(y[i], net(x[:batch]))
                torch.testing.assert_close(each[i], net(x[:batch]))


@pytest.mark.extended
def test_a_requested_loop_runs_each_member_as_it_is_written(tmp_path: Path) -> None:
    nets, files = members(by_einsum, tmp_path)
    x = torch.randn(BATCHES[0], WIDTH)
    out = tmp_path / "moe.wide"
    build(files, out, model=lambda: Mixture(by_einsum), sample=(x,), strategy="loop", **QUICK)
    assert all("loop" in [n.op for n in p.nodes] for p in programs(out))
    y = load(out)(x)
    with torch.inference_mode():
        for i, net in enumerate(nets):
            torch.testing.assert_close(y[i], net(x))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [(s, "eager") for s in ("auto", "loop", "dense", "copied")] + [(s, "compile") for s in ("auto", "loop")],
)
def test_few_experts_run_by_expert_in_every_form(strategy: str, backend: str, tmp_path: Path) -> None:
    nets, files = members(by_groups, tmp_path, FEW)
    torch.manual_seed(9)
    x = torch.randn(BATCHES[0], WIDTH)
    out = tmp_path / "few.wide"
    build(files, out, model=lambda: Mixture(by_groups, FEW), sample=(x,), strategy=strategy, **QUICK)
    of_loop = [n.op for p in programs(out) for loop in p.nodes if loop.body for n in loop.body.nodes]
    wide = [n.op for p in programs(out) for n in p.nodes]
    assert (strategy in ("loop", "dense", "copied")) == bool(of_loop)
    assert "widepack.expert_mm.default" in of_loop or strategy != "loop"
    assert ("widepack.expert_linear.default" in wide) == (strategy == "auto")
    ens = load(out, backend=backend, compile="now" if backend == "compile" else None)
    with torch.inference_mode():
        for batch in BATCHES:
            y = ens(x[:batch])
            for i, net in enumerate(nets):
                torch.testing.assert_close(y[i], net(x[:batch]))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strategy", ["auto", "wide", "loop"])
@pytest.mark.parametrize(
    ("product", "experts", "width"),
    [(by_bmm, EXPERTS, WIDTH), (by_groups, EXPERTS, WIDTH), (by_groups, FEW, WIDTH), (by_groups, FEW, 16)],
)
def test_members_that_train_have_the_gradients_of_their_own_experts(
    product: Product, experts: int, width: int, strategy: str
) -> None:
    nets = []
    for i in range(N):
        torch.manual_seed(i)
        nets.append(Mixture(product, experts, width))
    x = torch.randn(8, width)
    fused = fuse(nets, sample=(x,), strategy=strategy)
    fused(x).square().sum().backward()
    found = {name.rpartition(".")[2]: p.grad for name, p in fused.named_parameters()}
    for i, net in enumerate(nets):
        net(x).square().sum().backward()
        for name in ("up", "down"):
            gradient = found[name]
            assert gradient is not None
            torch.testing.assert_close(gradient[i], net.get_parameter(name).grad)
