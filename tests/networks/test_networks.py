"""The twelve networks: built here, loaded in a fresh process that knows nothing of them, and held to each
member alone in float64.

The fresh process gets inputs as a file and leaves its answers as one: what it imports is widepack, as in a
service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Artifacts, Bound, double, fresh, leaves, must, run, stack

import cases

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
    try:
        answers.append(plain(ens(*args, **kwargs) if pattern == "shared" else ens.each(*args, **kwargs)))
    except widepack.InputError as e:
        answers.append(str(e))
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
    """The answers of a fresh process, in order; a refused call is answered by its message."""
    torch.save(calls, folder / "calls.pt")
    must(fresh(SERVE, artifact, folder / "calls.pt", folder / "answers.pt"))
    return torch.load(folder / "answers.pt")


def own_calls(name: str, batch: int, seed: int, **sizes: int) -> list[tuple[Any, Any]]:
    """One call a member."""
    case = cases.load(name)
    return [case.sample(batch, seed + 10 * i, **sizes) for i in range(case.N)]


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_member_answers_as_alone(name: str, artifacts: Artifacts, tmp_path: Path) -> None:
    wanted = [(batch, {}) for batch in (1, 2, 5, 100)] + [(3, sizes) for sizes in OTHER_SIZES.get(name, [])]
    inputs = [own_calls(name, batch, 1000 * k, **sizes) for k, (batch, sizes) in enumerate(wanted)]
    calls: list[Call] = [("shared", *own[0]) for own in inputs]
    calls += [("each", stack([a for a, _ in own]), stack([k for _, k in own])) for own in inputs]
    answers = served(artifacts(name), calls, tmp_path)
    case = cases.load(name)
    bounds: dict[int, Bound] = {}
    for i in range(case.N):
        member, exact = case.member(i), case.member(i).double()
        for own, shared, each in zip(inputs, answers[: len(inputs)], answers[len(inputs) :]):
            for answer, (args, kwargs) in ((shared, own[0]), (each, own[i])):
                alone, truth = run(member, args, kwargs), run(exact, double(args), double(kwargs))
                for k, (wide, mine, right) in enumerate(
                    zip(wide_leaves(answer, alone, case.N), leaves(alone), leaves(truth), strict=True)
                ):
                    bounds.setdefault(k, Bound()).add(wide[i], mine, right)
    assert bounds
    for bound in bounds.values():
        bound.check()


def wide_leaves(answer: Any, alone: Any, count: int) -> list[Any]:
    """The leaves of a wide answer, whose form must be the member's own."""
    if isinstance(alone, torch.Tensor):
        assert len(answer) == count
        assert isinstance(answer, (torch.Tensor, list))  # a list where shapes differ by member
        return [answer]
    form, kind, rows = answer  # the networks that give no tensor give a transformers ModelOutput
    assert (form, kind, list(rows)) == ("Output", type(alone).__name__, list(alone.keys()))
    return list(rows.values())


def test_ragged_heads_give_a_list(artifacts: Artifacts, tmp_path: Path) -> None:
    case = cases.load("ragged_heads")
    (y,) = served(artifacts("ragged_heads"), [("shared", *case.sample(4, 0))], tmp_path)
    assert isinstance(y, list)
    assert [list(part.shape) for part in y] == [[4, c] for c in case.CLASSES]


@pytest.mark.parametrize(
    ("name", "fine", "other", "words"),
    [
        ("guard_pad", {"batch": 2, "length": 8}, {"batch": 2, "length": 7}, ["T % 2 == 0", "T = 7"]),
        ("guard_size", {"batch": 100}, {"batch": 101}, ["B <= 100", "B = 101"]),
        ("bert", {"batch": 2, "length": 64}, {"batch": 2, "length": 65}, ["T <= 64", "T = 65"]),
    ],
)
def test_the_other_branch_is_refused_in_words(
    name: str,
    fine: dict[str, int],
    other: dict[str, int],
    words: list[str],
    artifacts: Artifacts,
    tmp_path: Path,
) -> None:
    right, wrong = own_calls(name, seed=0, **fine), own_calls(name, seed=0, **other)
    calls: list[Call] = []
    for own in (right, wrong):
        calls += [("shared", *own[0]), ("each", stack([a for a, _ in own]), stack([k for _, k in own]))]
    *answers, refused, refused_each = served(artifacts(name), calls, tmp_path)
    case = cases.load(name)
    for i in range(case.N):
        member = case.member(i)
        for answer, call in zip(answers, (right[0], right[i])):
            alone = run(member, *call)
            (wide,) = wide_leaves(answer, alone, case.N)
            torch.testing.assert_close(wide[i], leaves(alone)[0], rtol=1e-4, atol=1e-5)
    for message in (refused, refused_each):
        assert isinstance(message, str)
        assert "\n" not in message
        for word in words:
            assert word in message, message
