"""Tests that members do not leak into each other.

A wrong weight of one member changes no bit of another member's answer. An index that a single member refuses
is refused by all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from isolating import answers, poisoned
from support import Artifacts, run, stack

import cases
from widepack import InputError, load
from widepack.inference.model import WideModel

STRATEGIES = ("wide", "loop")
WITH_IDS = {
    "bert": ("input_ids", 500),
    "gpt2": ("input_ids", 300),
    "encoder": ("ids", 200),
    "lstm": ("ids", 100),
    "textcnn": ("ids", 200),
}


def opened(artifact: Path, strategy: str, programs: dict[str, Any] | None = None) -> WideModel:
    """Loads an artifact of strategy `wide`, or lowers it again.

    programs: the programs of an equal artifact, which are lowered once for all.
    """
    ens = load(artifact, strategies=None if strategy == "wide" else strategy, verify="off", warmup=False)
    if programs is not None:
        source = ens.entry("forward").programs.source
        lower = source.lower

        def once(pattern: str) -> Any:
            if pattern not in programs:
                programs[pattern] = lower(pattern)
            return programs[pattern]

        source.lower = once  # type: ignore[method-assign]
    return ens


IN_LOOPS = {"mlp", "ragged_heads"}
"""Cases that are tried as a loop, too, each time: there members meet nowhere but in the results."""


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
def test_nan_in_one_members_weights_stays_there(
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
                        f"the NaN of member {j} does not reach its own answer: this test proves nothing"
                    )
                else:
                    assert torch.equal(a, b), f"NaN in member {j} changes member {i}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["mlp", "resnet18", "vit"])
def test_nan_in_one_members_input_stays_there(name: str, strategy: str, artifacts: Artifacts) -> None:
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WITH_IDS)
def test_an_index_out_of_range_is_refused_as_alone(name: str, strategy: str, artifacts: Artifacts) -> None:
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
        for i in range(case.N):  # the last member has no next one's rows to read; the first has
            wrong = with_id(args_each, kwargs_each, (i, 1, 3), value)
            with pytest.raises(InputError, match=f"contains {value}, .* looks up one of {rows} rows"):
                ens.each(*wrong[0], **wrong[1])
    ens(*args, **kwargs)  # and afterwards it answers


def _signature(ens: WideModel) -> list[tuple[str, str]]:
    return [(p.name, p.kind) for p in ens.manifest.entries["forward"].signature]
