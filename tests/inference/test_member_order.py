"""Tests loads of all members in another order. The programs in a file are for the order of the file only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack
from widepack import load
from widepack.inference.model import WideModel

ORDER = [2, 0, 1]


class Ragged(nn.Module):
    """Has a state, and a head whose size differs by member and is a literal in its program."""

    mean: Tensor

    def __init__(self, state_dict: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.classes = 3 if state_dict is None else len(state_dict["head.bias"])
        self.body, self.head = nn.Linear(6, 10), nn.Linear(10, self.classes)
        self.register_buffer("mean", torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(torch.relu(self.body(x))).sum(-1) / self.classes
        before = self.mean
        self.mean = 0.5 * before + y.mean()
        return torch.as_tensor(y - before.sum())


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("ragged")
    states = []
    for i, classes in enumerate((3, 4, 5)):
        torch.manual_seed(i)
        states.append(Ragged({"head.bias": torch.zeros(classes)}).state_dict())
    built(folder, Ragged, states, "x=float32[B,6]", state=["mean"])
    return folder, states


def check_answers(
    ens: WideModel, states: list[dict[str, Tensor]], order: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    """Checks that both patterns answer as each member alone in float64."""
    x = torch.randn(3, 4, 6)
    begun = ens.state()
    y, after = ens(x[0].to(dtype), state=begun)
    each, _ = ens.each(x.to(dtype), state=begun)
    for place, number in enumerate(order):
        alone = Ragged(states[number])
        alone.load_state_dict(states[number])
        alone.double()
        before = alone.mean.clone()
        torch.testing.assert_close(y[place].double(), alone(x[0].double()), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(after["mean"][place].double(), alone.mean, rtol=tolerance, atol=tolerance)
        alone.mean = before
        torch.testing.assert_close(
            each[place].double(), alone(x[place].double()), rtol=tolerance, atol=tolerance
        )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(None, 1e-5), pytest.param("bf16", 0.1, marks=pytest.mark.slow)]
)
def test_members_in_another_order_answer_as_alone(
    ragged: tuple[Path, list[dict[str, Tensor]]], dtype: str | None, tolerance: float
) -> None:
    folder, states = ragged
    load(folder / "e.wide").probe()  # a stored pass for the order of the file is not valid for another order
    ens = load(folder / "e.wide", members=ORDER, dtype=dtype)
    assert ens.members == ("m2", "m0", "m1")
    check_answers(ens, states, ORDER, torch.bfloat16 if dtype else torch.float32, tolerance)
    ens.probe()


def test_members_named_in_the_order_of_the_file_run_its_programs(
    ragged: tuple[Path, list[dict[str, Tensor]]],
) -> None:
    folder, states = ragged
    ens = load(folder / "e.wide", members=["m0", "m1", "m2"])
    assert all(b.content for b in ens.entry("forward").programs.of("shared"))
    assert not any(
        b.content for b in load(folder / "e.wide", members=ORDER).entry("forward").programs.of("shared")
    )
    check_answers(ens, states, [0, 1, 2], torch.float32, 1e-5)


def test_members_of_one_head_size_answer_in_the_form_of_the_artifact(tmp_path: Path) -> None:
    def make(state_dict: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, len(state_dict["1.weight"])))

    own = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, classes)) for classes in (3, 5, 3)]
    built(tmp_path, make, own, "input=float32[B,4]")
    x = torch.randn(2, 4)
    for chosen in ([0, 2], [1], [1, 0]):
        ens = load(tmp_path / "e.wide", members=chosen)
        right = [own[i](x).detach() for i in chosen]
        for y in (ens(x), ens.each([x] * len(chosen))):
            assert type(y) is list
            torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-6)
        if len({y.shape for y in right}) == 1:
            torch.testing.assert_close(ens.mean(x, of=None), torch.stack(right).mean(0), rtol=1e-5, atol=1e-6)
        else:
            with pytest.raises(widepack.InputError, match="differ in shape"):
                ens.mean(x)


def test_a_swap_in_another_order(ragged: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path) -> None:
    folder, states = ragged
    new = {n: v + 0.1 for n, v in states[1].items()}
    torch.save(new, tmp_path / "new.pt")
    ens = load(folder / "e.wide", members=ORDER)
    ens.swap(2, tmp_path / "new.pt")
    check_answers(ens, [states[0], new, states[2]], ORDER, torch.float32, 1e-5)
    ens.probe()


@pytest.mark.slow
def test_an_export_of_another_order(ragged: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path) -> None:
    exported = widepack.export(
        ragged[0] / "e.wide", tmp_path / "x.pt2", to="pt2", members=ORDER, pattern="each"
    )  # the export checks it against the probe
    assert exported.members == ("m2", "m0", "m1")
