"""Files with the stacked weights of several members, as `torch.func.stack_module_state` makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from widepack.checkpoints.differences import mismatch
from widepack.checkpoints.discovery import open_all, places_of
from widepack.checkpoints.open_file import open_file
from widepack.checkpoints.state_dict import RefusedFile
from widepack.errors import UsageError

FORMS: dict[str, tuple[Callable[[Any, Any], object], list[str]]] = {
    "a tuple": (lambda p, b: (p, b), ["[*]"]),
    "a list": (lambda p, b: [p, b], ["[*]"]),
    "a dict": (lambda p, b: {"params": p, "buffers": b}, ["[*]", "params[*]"]),
    "other names": (lambda p, b: {"parameters": p, "buffers": b}, ["[*]", "parameters[*]"]),
    "beside values": (lambda p, b: {"epoch": 3, "params": p, "buffers": b}, ["[*]", "params[*]"]),
    "in a dict": (lambda p, b: {"epoch": 3, "model": (p, b)}, ["[*]", "model[*]"]),
    "deeper": (lambda p, b: {"run": {"params": p, "buffers": b}}, ["run[*]", "run.params[*]"]),
    "one dict": (lambda p, b: {**p, **b}, ["[*]"]),
}


def members() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]


@pytest.mark.parametrize("form", FORMS)
def test_each_slice_is_a_member(tmp_path: Path, form: str) -> None:
    nets, path = members(), tmp_path / "all.pt"
    make, keys = FORMS[form]
    torch.save(make(*torch.func.stack_module_state(nets)), path)
    for key in keys:
        found = open_all(places_of([str(path)], key))
        assert len(found) == 3
        for net, one in zip(nets, found):
            state = net.state_dict()
            assert set(one.tensors()) == set(state)
            assert all(torch.equal(one.get(name), state[name]) for name in state)


@pytest.mark.parametrize("form", ["a tuple", "a dict", "other names", "beside values", "in a dict"])
def test_without_a_key_the_message_names_it(tmp_path: Path, form: str) -> None:
    nets, path = members(), tmp_path / "all.pt"
    torch.save(FORMS[form][0](*torch.func.stack_module_state(nets)), path)
    found = open_file(str(path))
    why = mismatch(found, nets[0].state_dict(), ragged=False, about="--")
    assert "It is a stack of 3 members of the model's shapes: --key '[*]' takes each." in why


def test_parameters_and_buffers_of_one_model_in_two_dicts(tmp_path: Path) -> None:
    net, path = members()[0], tmp_path / "one.pt"
    torch.save({"params": dict(net.named_parameters()), "buffers": dict(net.named_buffers())}, path)
    assert set(open_file(str(path)).tensors()) == set(net.state_dict())


def test_members_without_buffers(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    torch.save(torch.func.stack_module_state([nn.Linear(3, 2) for _ in range(2)]), path)
    assert [set(c.tensors()) for c in open_all(places_of([str(path)], "[*]"))] == [{"weight", "bias"}] * 2


def test_other_pairs_are_not_joined(tmp_path: Path) -> None:
    """Two state dicts of one model, and a tuple of three, are members and no parts of one."""
    path = tmp_path / "all.pt"
    for pair in ([nn.Linear(3, 2).state_dict()] * 2, [{f"{i}": torch.ones(2)} for i in range(3)]):
        torch.save(tuple(pair), path)
        with pytest.raises(RefusedFile, match="state dicts: give --key"):
            open_file(str(path))
        with pytest.raises(Exception, match="no state dict at its top to take slices of"):
            open_all(places_of([str(path)], "[*]"))


@pytest.mark.parametrize(("key", "words"), [("*", "name the file once"), ("0", "for several members")])
def test_a_file_that_is_named_twice_with_a_key(key: str, words: str, tmp_path: Path) -> None:
    path = str(tmp_path / "ens.pt")
    torch.save([{"w": torch.ones(2)}, {"w": torch.zeros(2)}], path)
    with pytest.raises(UsageError, match=f"ens.pt is named twice with the key .*equal members; {words}"):
        places_of([path, path], key)
    assert len(places_of([path, path])) == 2
