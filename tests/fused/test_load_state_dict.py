"""Tests what `Fused.load_state_dict` refuses, and numbers of members that are no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from widepack import Fused, UsageError, fuse


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
