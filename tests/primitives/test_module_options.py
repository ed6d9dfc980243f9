"""Tests that every option of every module, captured and lowered with `auto`, equals the module in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_cases import Case
from module_options import EVERY, QUICK
from support import leaves, run
from torch import Tensor, nn

import widepack

N = 3


def members(case: Case) -> list[nn.Module]:
    """Returns modules in eval mode and float64 that differ in every number, including statistics."""
    modules = []
    for i in range(N):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(31 + i)
            module = case.make().double().eval()
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                if t.is_floating_point():
                    t.copy_(torch.rand_like(t) + 0.5 if name.endswith("var") else torch.randn_like(t) / 2)
        modules.append(module)
    return modules


def call(case: Case, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    return case.draw(g), {**case.call, **dict(case.named(g) if case.named else ())}


def stacked(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return widepack.each(torch.stack(values))
    return tuple(stacked(list(v)) for v in zip(*values)) if isinstance(first, tuple) else first


def check_option(name: str) -> None:
    case = EVERY[name]
    originals, calls = members(case), [call(case, 5 + i) for i in range(N)]
    args, kwargs = calls[0]
    fused = widepack.fuse(copy.deepcopy(originals), args, sample_kwargs=kwargs, dynamic={}, validate=False)
    many = (
        tuple(stacked([a[k] for a, _ in calls]) for k in range(len(args))),
        {k: stacked([kw[k] for _, kw in calls]) for k in kwargs},
    )
    with torch.no_grad():
        for given, each in (((args, kwargs), False), (many, True)):
            wide = leaves(fused(*given[0], **given[1]))
            for i, member in enumerate(copy.deepcopy(originals)):  # max_norm writes into the member's weights
                alone = leaves(run(member, *calls[i if each else 0]))
                assert len(wide) == len(alone) > 0
                for wide_answer, want in zip(wide, alone):
                    torch.testing.assert_close(wide_answer[i], want, rtol=1e-9, atol=1e-10, equal_nan=False)
    first, second = (leaves(run(m, *calls[0])) for m in copy.deepcopy(originals[:2]))
    if list(originals[0].parameters()):
        assert any(not torch.equal(a, b) for a, b in zip(first, second)), (
            "members with equal answers prove nothing"
        )


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", QUICK)
def test_an_option_of_each_module_answers_as_the_module(name: str) -> None:
    check_option(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EVERY) - set(QUICK)))
def test_every_option_of_every_module_answers_as_the_module(name: str) -> None:
    check_option(name)
