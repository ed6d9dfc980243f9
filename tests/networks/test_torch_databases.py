"""Tests widepack with the samples of torch's own test databases, and compares the outcomes with the table in
bench/results/torch-databases.json.

scripts/stress/torch_databases.py makes the table and runs the cases. A case that was right must stay right.
"""

from __future__ import annotations

import json
from typing import Any

import database_cases
import database_check
import pytest
import torch
import torch_databases
from torch import Tensor, nn

SHARDS = 40
MOST_REFUSED = 0.06
TABLE: dict[str, Any] = json.loads(torch_databases.OUT.read_text(encoding="utf-8"))


def total(outcome: str) -> int:
    return sum(row[outcome] for row in TABLE["counts"].values())


def test_the_table_has_no_wrong_answer_and_few_refusals() -> None:
    assert not TABLE["wrong"]
    assert not TABLE["crash"]
    compared = sum(total(name) for name in ("right", "wrong", "refused", "crash"))
    assert compared > 3000
    assert total("refused") <= MOST_REFUSED * compared
    for name in ("wrong", "refused", "crash", "apart"):
        assert len(TABLE[name]) == total(name)
        assert all(TABLE[name].values()), "each exception has a reason"


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_case_ends_as_in_the_table(shard: int) -> None:
    entries = torch_databases.entries()[shard::SHARDS]
    found: dict[str, list[str]] = {}
    for numbers in ([0], [0, 1], [0, 1, 2]):
        names = [n for n in entries if TABLE["samples"].get(n) == numbers]
        found |= torch_databases.run(names, numbers)
    unexpected = {
        key: outcome
        for key, outcome in found.items()
        if outcome[0] != "right" and key not in (*TABLE["refused"], *TABLE["apart"])
    }
    assert found
    assert not unexpected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.argmax(1)


def linear_case() -> database_cases.Case:
    members: list[nn.Module] = []
    for i in range(3):
        database_cases.seed(i)
        members.append(Net().train())
    inputs: Any = [((torch.randn(5, 4),), {}) for _ in members]
    return database_cases.Case("module/net/0/fuse train", members, inputs, gradients=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("output 0", lambda v: v * 1.00001),
        ("output 0", lambda v: v.index_fill(1, torch.tensor([2]), float("nan"))),
        ("output 0", lambda v: v.double()),
        ("output 1", lambda v: 2 - v),
        ("gradient of layer.weight", lambda v: v * 1.00001),
        ("gradient of input 0", lambda v: v.flip(0)),
        ("buffer calls", lambda v: v + 1),
    ],
)
def test_the_comparison_finds_a_wrong_tensor(name: str, change: Any) -> None:
    case = linear_case()
    own, wide = database_check.run_alone(case), database_check.run_alone(case)
    database_check.compare(case, own, wide)
    if name.startswith("output"):
        result = list(wide[1].result)
        result[int(name[-1])] = change(result[int(name[-1])])
        wide[1].result = tuple(result)
    else:
        wide[1].tensors[name] = change(wide[1].tensors[name])
    with pytest.raises(database_check.Differs, match=name):
        database_check.compare(case, own, wide)


def test_outcomes() -> None:
    assert database_check.outcome_of(linear_case).name == "right"

    class Branches(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x if x.sum() > 0 else -x)

    def of(module: type[nn.Module], attribute: bool = False) -> database_check.Outcome:
        case = linear_case()
        case.members = [module() for _ in case.members]
        if attribute:
            vars(case.members[1])["scale"] = 2.0
        return database_check.outcome_of(lambda: case)

    class Fails(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            raise ValueError("no")

    class Scaled(Net):
        scale = 1.0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x * self.scale)

    assert of(Branches).name == "apart"
    assert of(Fails) == database_check.Outcome("apart", "the member fails alone: ValueError: no")
    assert of(Scaled).name == "right"
    refused = of(Scaled, attribute=True)
    assert refused.name == "refused"
    assert "scale" in refused.why
