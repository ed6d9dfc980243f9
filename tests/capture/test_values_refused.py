"""Tests that errors about code that torch.export cannot follow name the line and a solution."""

from __future__ import annotations

import contextlib
import math
import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import agree, built, loaded, refused
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import widepack
from capture.size_members import Base, line_in_class
from widepack.capture.explain import is_infrastructure, user_frame, user_line
from widepack.errors import VerificationError
from widepack.ir.torch_internals import distributions_validate


class Item(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / math.log(float(x.abs().max()) + 2)  # here


class Sum(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # here
            return self.fc(x)
        return -self.fc(x)


class Loop(Base):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        for _ in range(int(n)):  # here
            y = y + 1
        return y


class AsList(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.tensor(x.sum(-1).tolist())[:, None]  # here


class AsNumpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.from_numpy(x.numpy() * 2))  # here


class Printed(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        print(f"{y.mean():.3f}")  # here
        return y


class Until(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        while y.abs().max() > 1:  # here
            y = y / 2
        return y


class Tried(Base):
    def forward(self, x: Tensor) -> Tensor:
        try:
            if x.sum() > 0:  # here
                return self.fc(x)
        except RuntimeError:
            pass
        return -self.fc(x)


class Cond(Base):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.fc(x),))  # here


class Flex(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.fc(x).unflatten(-1, (1, 4)).unsqueeze(0).transpose(1, 2)  # [1, heads, B, width]
        return flex_attention(y, y, y, score_mod=lambda s, b, h, q, k: s - (q - k).abs())  # here


class FlexOfFrozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x).unflatten(-1, (1, 4)).unsqueeze(0).transpose(1, 2)
        return flex_attention(y, y, y)  # here


class Checked(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert (x > -1000).all()  # here
        return self.fc(x)


class Validated(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.distributions.Normal(y, y.exp(), validate_args=True).log_prob(y + 1)  # here


class Sampled(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.distributions.Normal(y, y.exp()).rsample()  # here


class Scripted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.jit.script(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.fc(x))  # here
        return y


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            Flex,
            "uses FlexAttention ... Use torch.nn.functional.scaled_dot_product_attention: attn_mask takes",
        ),
        (FlexOfFrozen, "uses FlexAttention ... node flex_attention ... scaled_dot_product_attention"),
        (
            Item,
            "reads the value of a tensor as a Python number ... Keep it in a tensor, without .item(), "
            "int() and float()",
        ),
        (Sum, "branches on the values of a tensor ... choose with torch.where"),
        (
            Loop,
            "repeats something a number of times that depends on the values of a tensor ... an "
            "argument of the factory",
        ),
        (AsList, "keep the values in a tensor"),
        (AsNumpy, "uses NumPy ... torch's functions"),
        (Printed, "writes the value of a tensor into a string ... Remove it from"),
        (Until, "branches on the values of a tensor ... a fixed number of steps"),
        (Tried, "branches on the values of a tensor ... choose with torch.where"),
        (Cond, "uses torch's cond ... choose with torch.where"),
        (Checked, "checks the values of a tensor ... make it before the call"),
        (Validated, "looks at the values of a distribution's arguments ... Remove validate_args"),
        (Scripted, "contains head, compiled by torch.jit ... plain modules"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_code_that_no_export_can_follow(make: type[nn.Module], words: str, tmp_path: Path) -> None:
    more = ["n=int64[]:1..3"] if make is Loop else []
    message = refused(make, tmp_path, inputs=["x=float32[B,3]", *more])
    for word in words.split(" ... "):
        assert word in message, message
    assert line_in_class(message, make).endswith("# here")
    assert "(unhinted" not in message


class Coin(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * random.random()


@pytest.mark.extended
def test_random_numbers_of_torch(tmp_path: Path) -> None:
    """The message names the op, the line and the option; with the option the member builds."""
    inputs = ["x=float32[B,3]"]
    message = refused(Sampled, tmp_path, VerificationError, inputs=inputs)
    assert "it draws random numbers by aten.randn_like at test_values_refused.py" in message
    assert "--dropout on" in message
    ens = widepack.load(built(Sampled, tmp_path, inputs=inputs, dropout="on"))
    one, other = ens(torch.ones(2, 3)), ens(torch.ones(2, 3))
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


def test_pythons_random_numbers(tmp_path: Path) -> None:
    message = refused(Coin, tmp_path, VerificationError, inputs=["x=float32[B,3]"])
    assert "forward gives other answers from run to run" in message
    assert "it draws from the generator of Python's random" in message


class Policy(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return torch.distributions.Normal(y, y.exp()).log_prob(y + 1)


def test_distributions_do_not_validate_while_a_member_is_captured(tmp_path: Path) -> None:
    before = distributions_validate()
    ens = loaded(Policy, tmp_path, "x=float32[B,3]")
    assert distributions_validate() == before
    agree(ens, Policy, torch.randn(5, 3))


class Endless(Base):
    """A module with a dict that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Any] = {"one": torch.ones(4)}
        self.tables["all"] = self.tables

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.tables["one"]
        return y


def test_a_value_that_contains_itself_is_reported(tmp_path: Path) -> None:
    message = refused(Endless, tmp_path, inputs=["x=float32[B,3]"])
    assert (
        "an object is nested in itself. Look for a list or dict of the member that contains itself" in message
    )


def test_a_line_of_the_user_is_preferred_to_a_line_of_a_library() -> None:
    torchs, library = (
        str(Path(torch.__file__).parent / "a.py"),
        str(Path(pytest.__file__).parent / "blocks.py"),
    )
    frame = lambda file, name, code: traceback.FrameSummary(file, 7, name, line=code)  # noqa: E731
    stack = [
        frame("/home/me/net.py", "forward", "self.up(x)"),
        frame(torchs, "call", ""),
        frame(library, "forward", "if n > 3:"),
        frame(torchs, "b", ""),
    ]
    assert user_frame(stack) == "net.py:7 in forward: self.up(x), by way of blocks.py:7 in forward: if n > 3:"
    assert user_frame(stack[1:]) == "blocks.py:7 in forward: if n > 3:"
    assert user_frame(stack[:2]) == "net.py:7 in forward: self.up(x)"
    assert user_frame([stack[1]]) == ""
    pythons = frame(contextlib.__file__, "__enter__", "return next(self.gen)")
    assert (
        user_frame([*stack[:2], pythons]) == "net.py:7 in forward: self.up(x)" and user_frame([pythons]) == ""
    ), "a line of Python's library is reported as a line of the user"
    runner = str(Path(widepack.__file__).parent / "capture" / "export.py")
    assert (
        user_frame([frame("/home/me/build.py", "main", "build()"), frame(runner, "export", ""), stack[2]])
        == "blocks.py:7 in forward: if n > 3:"
    )


def test_lines_of_generated_code_are_left_out() -> None:
    trace = (
        '  File "/home/me/net.py", line 3, in forward\n    y = f(x)\n'
        '  File "<eval_with_key>.3", line 11, in forward\n    sin = x.sin()\n'
    )
    assert user_line(trace) == "net.py:3 in forward"
    assert user_line(trace, code=True) == "net.py:3 in forward: y = f(x)"
    assert user_line("") == ""


def test_libraries_with_torch_in_their_names_are_not_torch() -> None:
    folder = Path(torch.__file__).parent
    assert is_infrastructure(str(folder / "nn/functional.py"))
    assert not is_infrastructure(f"{folder}vision/ops/boxes.py")
