"""Tests that pickles of optimizers, schedulers and fused modules load and name public classes only."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest
import torch
from fusing import Mlp, draw, members
from torch import nn

import widepack
from optim.stepping import LR, saved
from widepack.optim import SGD, Adam, AdamW, PerMember

PUBLIC = {"widepack", "widepack.optim", "widepack.primitives"}


def modules_of_widepack(value: Any) -> set[str]:
    """Returns the Python modules of widepack that are named in a pickle of the value."""
    texts = [
        text for _, text, _ in pickletools.genops(pickle.dumps(value, protocol=2)) if isinstance(text, str)
    ]
    return {name for text in texts if (name := text.split(" ")[0]).split(".")[0] == "widepack"}


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
def test_an_optimizer_is_pickled_under_its_public_name(optimizer: Any) -> None:
    first = optimizer([nn.Parameter(torch.ones(3, 2))], lr=LR)
    assert modules_of_widepack(first) == {"widepack.optim"}
    for other in (pickle.loads(pickle.dumps(first)), torch.load(saved(first), weights_only=False)):
        assert type(other) is optimizer and other.param_groups[0]["lr"] == PerMember(LR)


def test_a_scheduler_is_pickled_under_public_names() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(3, 2))], lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    state = scheduler.state_dict()
    assert modules_of_widepack(state) == {"widepack.optim"}
    assert torch.load(saved(state), weights_only=True)["base_lrs"] == [PerMember(LR)]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("options", [{}, {"n": 3, "dropout": "on"}], ids=["members", "passes"])
def test_a_fused_module_is_pickled_under_public_names(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()
    models: Any = model if options else members(Mlp, 3)
    x = draw(5, 4)
    fused = widepack.fuse(models, x, validate=False, **options)
    assert modules_of_widepack(fused) <= PUBLIC
    for other in (pickle.loads(pickle.dumps(fused)), torch.load(saved(fused), weights_only=False)):
        assert type(other) is widepack.Fused and len(other) == 3
        with torch.no_grad():
            torch.manual_seed(1)
            expected = fused(x)
            torch.manual_seed(1)
            assert torch.equal(other(x), expected)
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in fused.named_parameters()]
        assert len(other.unfuse()) == 3
