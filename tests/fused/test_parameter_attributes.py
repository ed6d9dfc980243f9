"""Tests parameters with attributes or a class of their own, and code that export runs otherwise."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack import UsageError, VerificationError

X = torch.randn(3, 4)


class OwnParameter(nn.Parameter):
    """A class that computes as nn.Parameter does."""


class Doubled(nn.Parameter):
    """A class that does not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Product(nn.Module):
    def __init__(self, cls: Any = nn.Parameter, **marks: Any) -> None:
        super().__init__()
        self.w: nn.Parameter = cls(torch.randn(4, 4))
        vars(self.w).update(marks)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def test_marks_of_parameters_are_those_of_all_members() -> None:
    """Loops over parameters read them, such as those that choose which have weight decay."""
    own = {"_no_weight_decay": True, "rates": {"lr": 0.1}, "mask": torch.ones(4)}
    fused = widepack.fuse([Product(**own, number=i) for i in range(2)], X)
    for one in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        marks = {k: v for k, v in vars(one.w).items() if not k.startswith("widepack_")}
        assert marks == {"_no_weight_decay": True, "rates": {"lr": 0.1}}
    fused.w.rates["lr"] = 0.5
    assert fused.unfuse()[1].w.rates == {"lr": 0.1}  # type: ignore[union-attr]


def test_a_parameter_of_a_class_of_its_own() -> None:
    members = [Product(OwnParameter, tag="x") for _ in range(2)]
    fused = widepack.fuse(members, X)
    for i, member in enumerate(fused.unfuse()):
        assert torch.equal(fused(X)[i], members[i](X))
        assert type(member.w) is OwnParameter and vars(member.w) == {"tag": "x"}
        assert member.w.requires_grad and member.w.is_leaf


def test_a_class_that_changes_operations_is_refused() -> None:
    with pytest.raises(UsageError, match="w is a Doubled; .*leaves torch's operations as they are"):
        widepack.fuse([Product(Doubled) for _ in range(2)], X)


class Scaled(Product):
    def forward(self, x: Tensor) -> Tensor:
        scale: float = getattr(self.w, "scale", 1.0)
        return x @ self.w * scale


class Compiled(Product):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w * (2 if torch.compiler.is_compiling() else 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Scaled(scale=2.0), r"as the program does without w\.scale: torch.export does not see"),
        (Compiled, "as the program does while torch.compiler.is_compiling\\(\\) is True"),
    ],
)
def test_what_export_sees_otherwise_is_named(make: Any, words: str) -> None:
    with pytest.raises(VerificationError, match=words) as info:
        widepack.fuse([make() for _ in range(2)], X)
    assert "report" not in str(info.value)
    assert not torch.compiler.is_compiling()
