"""Tests the twelve networks: they are built here, loaded in a new process without their code, and compared
with each member alone in float64.

The new process reads inputs from a file and writes its answers to a file. It imports widepack only, as a
service does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Artifacts, Bound, double, fresh, leaves, must, run, stack

import cases
from widepack import InputError, load

SERVE = """
import sys
import torch, widepack

def plain(y):
    if not isinstance(y, widepack.Output):
        return y
    for k, (key, value) in enumerate(y.items()):
        assert y[key] is value and y[k] is value and getattr(y, key) is value
    return ["Output", y.kind, dict(y)]

ens = widepack.load(sys.argv[1])
answers = []
for pattern, args, kwargs in torch.load(sys.argv[2]):
    answers.append(plain(ens(*args, **kwargs) if pattern == "shared" else ens.each(*args, **kwargs)))
torch.save(answers, sys.argv[3])
assert not {"cases", "transformers", "click"} & set(sys.modules)
"""
Call = tuple[str, Any, Any]
OTHER_SIZES: dict[str, list[dict[str, int]]] = {
    "bert": [{"length": t} for t in (2, 37, 64)],
    "gpt2": [{"length": t} for t in (2, 33, 64)],
    "encoder": [{"length": t} for t in (2, 17, 48)],
    "textcnn": [{"length": t} for t in (6, 7, 64)],
    "unet": [{"height": 2, "width": 2}, {"height": 5, "width": 11}, {"height": 16, "width": 3}],
}


def served(artifact: Path, calls: list[Call], folder: Path) -> list[Any]:
    """Returns the answers of a new process in order."""
    torch.save(calls, folder / "calls.pt")
    must(fresh(SERVE, artifact, folder / "calls.pt", folder / "answers.pt"))
    return torch.load(folder / "answers.pt")


def calls_of_members(name: str, batch: int, seed: int, **sizes: int) -> list[tuple[Any, Any]]:
    """Returns one call for each member."""
    case = cases.load(name)
    return [case.sample(batch, seed + 10 * i, **sizes) for i in range(case.N)]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", cases.NAMES)
def test_every_member_answers_as_alone(name: str, artifacts: Artifacts, tmp_path: Path) -> None:
    sizes_of_calls = [(batch, {}) for batch in (1, 2, 5, 100)] + [
        (3, sizes) for sizes in OTHER_SIZES.get(name, [])
    ]
    inputs = [
        calls_of_members(name, batch, 1000 * k, **sizes) for k, (batch, sizes) in enumerate(sizes_of_calls)
    ]
    calls: list[Call] = [("shared", *member_calls[0]) for member_calls in inputs]
    calls += [
        ("each", stack([a for a, _ in member_calls]), stack([k for _, k in member_calls]))
        for member_calls in inputs
    ]
    answers = served(artifacts(name), calls, tmp_path)
    case = cases.load(name)
    bounds: dict[int, Bound] = {}
    for i in range(case.N):
        member, exact = case.member(i), case.member(i).double()
        for member_calls, shared, each in zip(inputs, answers[: len(inputs)], answers[len(inputs) :]):
            for answer, (args, kwargs) in ((shared, member_calls[0]), (each, member_calls[i])):
                alone, truth = run(member, args, kwargs), run(exact, double(args), double(kwargs))
                for k, (wide, answer_alone, expected) in enumerate(
                    zip(wide_leaves(answer, alone, case.N), leaves(alone), leaves(truth), strict=True)
                ):
                    bounds.setdefault(k, Bound()).add(wide[i], answer_alone, expected)
    assert bounds
    for bound in bounds.values():
        bound.check()


def wide_leaves(answer: Any, alone: Any, count: int) -> list[Any]:
    """Returns the leaves of a wide answer, whose structure must be that of the member's answer."""
    if isinstance(alone, torch.Tensor):
        assert len(answer) == count
        assert isinstance(answer, (torch.Tensor, list))  # a list where shapes differ by member
        return [answer]
    form, kind, rows = answer  # a network that does not return a tensor returns a ModelOutput of transformers
    assert (form, kind, list(rows)) == ("Output", type(alone).__name__, list(alone.keys()))
    return list(rows.values())


def test_ragged_heads_return_a_list(artifacts: Artifacts) -> None:
    case = cases.load("ragged_heads")
    args, kwargs = case.sample(4, 0)
    y = load(artifacts("ragged_heads"))(*args, **kwargs)
    assert isinstance(y, list)
    assert [list(part.shape) for part in y] == [[4, c] for c in case.CLASSES]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("name", "fine", "other", "words"),
    [
        ("guard_pad", {"batch": 2, "length": 8}, {"batch": 2, "length": 7}, ["T % 2 == 0", "T = 7"]),
        ("guard_size", {"batch": 100}, {"batch": 101}, ["B <= 100", "B = 101"]),
        ("bert", {"batch": 2, "length": 64}, {"batch": 2, "length": 65}, ["T <= 64", "T = 65"]),
    ],
)
def test_sizes_of_the_other_branch_are_refused_with_a_message(
    name: str,
    fine: dict[str, int],
    other: dict[str, int],
    words: list[str],
    artifacts: Artifacts,
) -> None:
    valid, wrong = calls_of_members(name, seed=0, **fine), calls_of_members(name, seed=0, **other)
    case, ens = cases.load(name), load(artifacts(name))
    args, kwargs = valid[0]
    answers = [ens(*args, **kwargs)]
    args_each, kwargs_each = stack([a for a, _ in valid]), stack([k for _, k in valid])
    answers.append(ens.each(*args_each, **kwargs_each))
    for i in range(case.N):
        member = case.member(i)
        for answer, call in zip(answers, (valid[0], valid[i])):
            alone = run(member, *call)
            (wide,) = wide_leaves(answer, alone, case.N)
            torch.testing.assert_close(wide[i], leaves(alone)[0], rtol=1e-4, atol=1e-5)
    args, kwargs = wrong[0]
    args_each, kwargs_each = stack([a for a, _ in wrong]), stack([k for _, k in wrong])
    for call in (lambda: ens(*args, **kwargs), lambda: ens.each(*args_each, **kwargs_each)):
        with pytest.raises(InputError) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message, message
