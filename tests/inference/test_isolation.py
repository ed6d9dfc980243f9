"""Tests that members do not leak into each other.

A wrong weight of one member changes no bit of another member's answer. An index that a single member refuses
is refused by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from isolating import answers, poisoned
from loaded import files_of
from small import node, program
from support import Artifacts, run, stack
from torch import Tensor, nn

import cases
import widepack
from widepack import InputError, load
from widepack.inference.model import WideModel
from widepack.inference.programs.failed_call import unknown_row
from widepack_artifacts.program import Ref

STRATEGIES = ("wide", "loop")
WITH_IDS = {
    "lstm": ("ids", 100),
    "bert": ("input_ids", 500),
    "gpt2": ("input_ids", 300),
    "encoder": ("ids", 200),
    "textcnn": ("ids", 200),
}


def opened(artifact: Path, strategy: str, programs: dict[str, Any] | None = None) -> WideModel:
    """Loads an artifact with the strategy `wide`, or lowers it again with another.

    programs: the programs of an equal artifact, so that several artifacts are lowered once.
    """
    ens = load(artifact, strategies=None if strategy == "wide" else strategy, verify="off", warmup=False)
    if programs is not None:
        source = ens.entry("forward").programs.source
        lower = source.lower

        def once(pattern: str, strategies: Sequence[str] = ()) -> Any:
            if pattern not in programs:
                programs[pattern] = lower(pattern, strategies)
            return programs[pattern]

        source.lower = once  # type: ignore[method-assign]
    return ens


IN_LOOPS = {"mlp", "ragged_heads"}
"""Cases that also run as a loop in every run of the tests. There members share nothing but the results."""


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name, strategy, marks=[] if strategy == "wide" or name in IN_LOOPS else [pytest.mark.slow]
        )
        for name in cases.NAMES
        for strategy in STRATEGIES
    ],
)
def test_nan_in_one_members_weights_reaches_no_other_member(
    name: str, strategy: str, artifacts: Artifacts, tmp_path: Path
) -> None:
    programs: dict[str, Any] = {}
    clean = answers(opened(artifacts(name, "wide"), strategy, programs), name)
    for j in range(len(clean)):
        ill = answers(
            opened(poisoned(artifacts(name, "wide"), j, tmp_path / f"{j}"), strategy, programs), name
        )
        for i, (before, after) in enumerate(zip(clean, ill)):
            for a, b in zip(before, after, strict=True):
                if i == j:
                    assert b.isnan().all(), (
                        f"the NaN of member {j} is not in its answer, so the test proves nothing"
                    )
                else:
                    assert torch.equal(a, b), f"NaN in member {j} changes member {i}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mlp", "resnet18", pytest.param("vit", marks=pytest.mark.extended)])
def test_nan_in_one_members_input_reaches_no_other_member(
    name: str, strategy: str, artifacts: Artifacts
) -> None:
    case = cases.load(name)
    ens = opened(artifacts(name, "wide"), strategy)
    x = torch.stack([case.sample(2, 50 + i)[0][0] for i in range(case.N)])
    clean = ens.each(x)
    for j in range(case.N):
        ill = x.clone()
        ill[j] = float("nan")
        y = ens.each(ill)
        assert y[j].isnan().all()
        others = [i for i in range(case.N) if i != j]
        assert torch.equal(y[others], clean[others])


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WITH_IDS)
def test_an_index_that_a_member_refuses_is_refused(name: str, strategy: str, artifacts: Artifacts) -> None:
    case = cases.load(name)
    which, rows = WITH_IDS[name]
    ens = opened(artifacts(name, "wide"), strategy)
    position = [w for w, _ in _signature(ens)].index(which)

    def with_id(args: Any, kwargs: Any, at: tuple[int, ...], value: int) -> tuple[Any, Any]:
        args, kwargs = [a.clone() for a in args], {k: v.clone() for k, v in kwargs.items()}
        (kwargs[which] if which in kwargs else args[position])[at] = value
        return args, kwargs

    args, kwargs = case.sample(2, 0)
    many = [case.sample(2, i) for i in range(case.N)]
    args_each, kwargs_each = stack([a for a, _ in many]), stack([k for _, k in many])
    for value in (rows, case.N * rows - 1, 2**40, -1):
        with pytest.raises((IndexError, RuntimeError)):
            run(case.member(0), *with_id(args, kwargs, (1, 3), value))
        wrong = with_id(args, kwargs, (1, 3), value)
        with pytest.raises(InputError, match=f"contains {value}, .* looks up one of {rows} rows"):
            ens(*wrong[0], **wrong[1])
        for i in range(case.N):  # the last member could not read rows of a next member; the first could
            wrong = with_id(args_each, kwargs_each, (i, 1, 3), value)
            with pytest.raises(InputError, match=f"contains {value}, .* looks up one of {rows} rows"):
                ens.each(*wrong[0], **wrong[1])
    ens(*args, **kwargs)  # later calls answer


class Positions(nn.Module):
    """Looks up a row for each position, and for each whole number after the given one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 4), nn.Embedding(64, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.words(ids + 1) + self.places(torch.arange(mask.shape[1])) * mask[..., None]
        return y


def test_an_index_that_an_input_does_not_contain_is_said_to_be_computed(tmp_path: Path) -> None:
    paths = files_of(tmp_path, [Positions() for _ in range(2)])
    inputs = ["ids=int64[B,T]:0..48", "mask=int64[B,T]:0..1"]
    widepack.build(paths, tmp_path / "e.wide", model=Positions, inputs=inputs, pt2=False)
    ens = widepack.load(tmp_path / "e.wide")
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 70, dtype=torch.int64)
    with pytest.raises(
        InputError, match="an index computed from the input ids contains 50, .* one of 50 rows"
    ):
        ens(ids + 48, mask[:, :5])
    with pytest.raises(InputError, match=r"of the input ids \[2, 70\] contains 64, .* one of 64 .*T=1..64"):
        ens(torch.ones_like(mask), mask)


def test_an_index_that_no_input_determines() -> None:
    nodes = [node("i", "arange", 9), node("y", "embedding", Ref("t"), Ref("i"))]
    net = program({"t": "float32[4,2]"}, {"x": "float32[B,3]"}, nodes, ["y"])
    found = unknown_row("a call", [(net, [torch.ones(4, 2)], [torch.ones(1, 3)])])
    assert "an index that no input determines contains 4, but node y" in str(found)


def _signature(ens: WideModel) -> list[tuple[str, str]]:
    return [(p.name, p.kind) for p in ens.manifest.entries["forward"].signature]
