"""Tests that training continues in a fresh process, bit for bit as if it was not interrupted, and what
`Fused.load_state_dict` refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import resumable
import torch
from fusing import draw
from torch import nn

import widepack
from widepack import Fused, UsageError, fuse

FIRST, LAST = 4, 8


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors bit for bit and in dtype."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.extended
@pytest.mark.parametrize(
    "names",
    [["removed"], pytest.param(["images", "rows", "steps", "frozen"], marks=pytest.mark.slow)],
    ids="-".join,
)
def test_the_next_steps_in_a_fresh_process_equal_those_of_a_run_that_was_not_interrupted(
    names: list[str], tmp_path: Path
) -> None:
    uninterrupted = {}
    for name in names:
        run = resumable.RUNS[name]
        with torch.random.fork_rng(devices=[]):
            training = resumable.Training(run, seed=1)
            training.train(0, FIRST)
            torch.save(training.state(), tmp_path / f"{name}.pt")
            training.train(FIRST, LAST)
            uninterrupted[name] = training.state()
    helpers = Path(resumable.__file__)
    path = os.pathsep.join([*sys.path, str(helpers.parent)])
    arguments = [str(tmp_path), str(FIRST), str(LAST), str(torch.get_num_threads()), *names]
    subprocess.run(
        [sys.executable, str(helpers), *arguments], check=True, env={**os.environ, "PYTHONPATH": path}
    )
    for name, expected in uninterrupted.items():
        resumed = torch.load(tmp_path / f"{name}.resumed.pt", weights_only=True)
        before = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        for part, value in expected.items():
            assert same(value, resumed[part]), (name, part)
        assert not same(before["fused"], resumed["fused"]) and not same(before["random"], resumed["random"])


@pytest.mark.parametrize(
    ("model", "validate"),
    [
        (resumable.Images, True),
        pytest.param(resumable.Images, False, marks=pytest.mark.slow),
        pytest.param(resumable.Steps, True, marks=pytest.mark.slow),
    ],
)
def test_making_and_comparing_programs_draws_no_numbers(model: Any, validate: bool) -> None:
    """A program that is made after the random state was restored must not change it."""
    models = [model() for _ in range(2)]
    x = draw(5, 2, 6, 6) if model is resumable.Images else draw(5, 3, 4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        fused = widepack.fuse(models, x, validate=validate)
        fused.eval()
        with torch.no_grad():
            fused(x)
        fused.train().prepare()
        assert torch.equal(torch.get_rng_state(), before)
        first = fused(x)  # the first call makes the program
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        torch.testing.assert_close(fused(x), first)  # by the statistics of the batch, which are the same
        assert torch.equal(torch.get_rng_state(), after) and not torch.equal(after, before)


# ---------------------------------------------------------------- states of other forms


def net(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 2))


def fused(n: int, width: int = 4) -> Fused:
    return fuse(lambda: net(width), torch.randn(2, 6), n=n, validate=False)


def test_a_state_of_another_number_of_members_is_refused_in_one_line() -> None:
    three = fused(3)
    before = {n: v.clone() for n, v in three.state_dict().items()}
    with pytest.raises(
        UsageError, match=r"the state is of 2 members, and the fused module has 3\. Fuse 2"
    ) as e:
        three.load_state_dict(fused(2).state_dict())
    assert "\n" not in str(e.value)
    assert all(torch.equal(v, before[n]) for n, v in three.state_dict().items())


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("state", [fused(3, 5).state_dict(), net().state_dict(), {}], ids=len)
def test_other_states_are_refused_in_five_lines(state: Any) -> None:
    three = fused(3)
    with pytest.raises(UsageError, match="load_state_dict: Error") as e:
        three.load_state_dict(state)
    assert len(str(e.value).splitlines()) <= 5


def test_names_may_be_missing_if_not_strict() -> None:
    three, other = fused(3), fused(3)
    state = {n: v for n, v in other.state_dict().items() if n != "0.bias"}
    found = three.load_state_dict({**state, "more": torch.zeros(1)}, strict=False)
    assert found.missing_keys == ["0.bias"] and found.unexpected_keys == ["more"]
    assert torch.equal(three.get_parameter("0.weight"), other.get_parameter("0.weight"))


@pytest.mark.extended
def test_a_truth_value_is_no_number_of_a_member() -> None:
    three = fused(3)
    for call in (three.remove, three.member, three.freeze):
        with pytest.raises(UsageError, match="there is no member True"):
            call(True)
    assert len(three) == 3
