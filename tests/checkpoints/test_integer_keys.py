"""Dicts of state dicts whose keys are integers, as scripts of k-fold training save them, or other values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import widepack
from widepack.checkpoints.discovery import open_all, places_of
from widepack.checkpoints.open_file import open_file
from widepack.checkpoints.state_dict import RefusedFile

STATES = [nn.Linear(3, 2).state_dict() for _ in range(3)]
BY_FOLD = dict(enumerate(STATES))
FORMS: dict[str, tuple[object, str, str]] = {  # a file, the key of all members, and the key of member 1
    "at the top": (BY_FOLD, "*", "1"),
    "in a dict": ({"models": BY_FOLD, "epoch": 3}, "models.*", "models.1"),
    "in a usual dict": ({"state_dict": BY_FOLD}, "*", "1"),
    "with the state dict deeper": (
        {i: {"model": s, "epoch": 3} for i, s in BY_FOLD.items()},
        "*.model",
        "1.model",
    ),
    "with the usual dict deeper": ({i: {"model": s, "epoch": 3} for i, s in BY_FOLD.items()}, "*", "1"),
    "in a list": ([BY_FOLD], "0.*", "0.1"),
    "years, with texts": ({-1: STATES[0], 2019: STATES[1], "last": STATES[2]}, "*", "2019"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_integer_is_named_by_its_digits(tmp_path: Path, form: str) -> None:
    content, every, one = FORMS[form]
    path = str(tmp_path / "all.pt")
    torch.save(content, path)
    opened = open_all(places_of([path], every))
    for state, member in zip(STATES, opened, strict=True):
        assert all(torch.equal(member.get(name), value) for name, value in state.items())
    assert opened[1].part.endswith(one) and len({c.part for c in opened}) == 3
    assert torch.equal(open_file(path, one).get("weight"), STATES[1]["weight"])


def test_a_build_of_folds(tmp_path: Path) -> None:
    torch.save(BY_FOLD, tmp_path / "folds.pt")
    build: Any = widepack.build
    build(
        [str(tmp_path / "folds.pt")], tmp_path / "e.wide", model=lambda: nn.Linear(3, 2),
        inputs=["input=float32[B,3]"], key="*", budget=0, pt2=False, targets=("cpu",),
    )  # fmt: skip
    ens = widepack.load(tmp_path / "e.wide")
    assert tuple(ens.members) == ("0", "1", "2")
    x = torch.randn(5, 3)
    for y, state in zip(ens(x), STATES, strict=True):
        torch.testing.assert_close(y, nn.functional.linear(x, state["weight"], state["bias"]))


@pytest.mark.parametrize(
    ("content", "keys"),
    [(BY_FOLD, ("0", "*")), ({"models": BY_FOLD, "epoch": 3}, ("models.0", "models.*"))],
)
def test_without_a_key_the_message_names_it(tmp_path: Path, content: object, keys: tuple[str, str]) -> None:
    torch.save(content, tmp_path / "all.pt")
    with pytest.raises(RefusedFile) as caught:
        open_file(str(tmp_path / "all.pt"))
    assert str(caught.value).endswith(f"--key {keys[0]}, or all of them as members: --key '{keys[1]}'.")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({("a", 1): STATES[0], ("a", 2): STATES[1]}, r"at the key \('a', 1\), a tuple"),
        ({"models": {("a", 1): STATES[0], ("a", 2): STATES[1]}}, r"at the key \('a', 1\), a tuple"),
        ({True: STATES[0], False: STATES[1]}, "at the key True, a bool"),
        ({0.5: STATES[0], 0.1: STATES[1]}, "at the key 0.5, a float"),
    ],
)
def test_the_message_names_the_kind_of_other_keys(tmp_path: Path, content: object, text: str) -> None:
    path = str(tmp_path / "all.pt")
    torch.save(content, path)
    with pytest.raises(RefusedFile, match=text):
        open_file(path)
    with pytest.raises(widepack.CheckpointError, match=text):
        open_all(places_of([path], "*"))
    with pytest.raises(RefusedFile, match="has no '1'"):
        open_file(path, "1")


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "all.pt")
    torch.save({0: STATES[0], "0": STATES[1]}, path)
    for key in ("0", "*"):
        with pytest.raises(widepack.CheckpointError, match="has the keys 0 and '0' in one dict"):
            open_all(places_of([path], key))
    torch.save({"state_dict": STATES[0], "labels": {0: "cat", "0": "dog"}}, path)
    assert set(open_file(path).tensors()) == {"weight", "bias"}


def test_the_numbers_of_an_optimizer_are_no_members(tmp_path: Path) -> None:
    path, net = str(tmp_path / "all.pt"), nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**content, "moments": optimizer.state_dict()["state"]}, path)
    assert torch.equal(open_file(path).get("weight"), net.weight)
