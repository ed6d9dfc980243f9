"""Tests `ens.cascade`: each answer is the mean of the members that ran on its row, and the right ones ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack
from widepack.errors import InputError, UsageError
from widepack.inference.cascade import CascadeSettings, confidence, stages_from
from widepack.selection.cascade_fit import CascadeData
from widepack.selection.losses import error

MEMBERS = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.inner(x)))
        return 3 * y


def states(count: int = MEMBERS) -> list[dict[str, Tensor]]:
    found = []
    for i in range(count):
        torch.manual_seed(i)
        found.append(Net().state_dict())
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("cascade"), Net, states(), "x=float32[B,6]")


def expected(x: Tensor, stages: tuple[int, ...], until: float) -> tuple[Tensor, Tensor]:
    """Returns the answers and the numbers of members, one row after the other, in float64."""
    nets = []
    for state in states():
        net = Net().double()
        net.load_state_dict(state)
        nets.append(net)
    means, counts = [], []
    with torch.inference_mode():
        for row in x.double():
            for stage in stages:
                mean = torch.stack([net(row.unsqueeze(0))[0].softmax(0) for net in nets[:stage]]).mean(0)
                if float(mean.max()) >= until:
                    break
            means.append(mean)
            counts.append(stage)
    return torch.stack(means), torch.tensor(counts)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("first", [1, 2, 3, MEMBERS])
@pytest.mark.parametrize("until", [0.3, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_rows_are_done_when_the_members_are_sure(path: Path, first: int, until: float, rows: int) -> None:
    ens = widepack.load(path)
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
    found = ens.cascade(x, first=first, until=until)
    means, counts = expected(x, stages_from(first, MEMBERS), until)
    assert torch.equal(found.members, counts)
    torch.testing.assert_close(found.mean.double(), means, rtol=1e-5, atol=1e-6)
    assert found.calls == pytest.approx(float(counts.double().mean()))


def test_a_cascade_by_name_and_over_some_members(path: Path) -> None:
    some = widepack.load(path, members=["m4", "m0", "m2"])
    x = torch.randn(9, 6)
    found = some.cascade(x=x, first=1, until=1.0)
    torch.testing.assert_close(found.mean, some.mean(x, of="softmax"))
    assert found.members.tolist() == [3] * 9


@pytest.mark.extended
def test_a_batch_of_at_least_two_rows_is_filled_up(tmp_path: Path) -> None:
    class Wide(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 1 else super().forward(x) + 1

    ens = widepack.load(built(tmp_path, Wide, states(3), "x=float32[B,6]", "B=2..64"))
    x = torch.randn(8, 6)
    sure = ens.mean(x, of="softmax").amax(1)
    until = float(ens.reduce(x, "mean", of="softmax", members=[0])["mean"].amax(1).sort().values[0]) + 1e-6
    found = ens.cascade(x, first=1, until=min(1.0, until))
    assert found.members.tolist().count(3) + found.members.tolist().count(2) == 1
    assert sure.shape == found.members.shape


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "records no selection"),
        ({"first": 2}, "needs both first= and until="),
        ({"until": 0.5}, "needs both first= and until="),
        ({"first": 0, "until": 0.5}, "first=0 is no number of members from 1 to 7"),
        ({"first": 8, "until": 0.5}, "from 1 to 7"),
        ({"first": True, "until": 0.5}, "first=True"),
        ({"first": 2, "until": 0.0}, "until=0.0 is no confidence"),
        ({"first": 2, "until": float("nan")}, "until=nan"),
        ({"first": 2, "until": 0.5, "of": "sigmoid"}, "of='sigmoid' is unknown for a cascade"),
        ({"first": 2, "until": 0.5, "dim": 0}, "dim"),
    ],
)
def test_wrong_options_are_refused(path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, InputError), match=words):
        widepack.load(path).cascade(torch.randn(3, 6), **options)


def test_inputs_are_checked(path: Path) -> None:
    ens = widepack.load(path)
    with pytest.raises(InputError):
        ens.cascade(torch.randn(3, 5), first=2, until=0.5)
    with pytest.raises(InputError, match="one input"):
        ens.cascade(widepack.each(torch.randn(MEMBERS, 3, 6)), first=2, until=0.5)
    ens.close()
    with pytest.raises(UsageError):
        ens.cascade(torch.randn(3, 6), first=2, until=0.5)


def test_a_swapped_model_is_refused(path: Path) -> None:
    ens = widepack.load(path)
    ens.cascade(torch.randn(3, 6), first=2, until=0.5)
    ens.swap(0, path.parent / "m1.pt")
    with pytest.raises(UsageError, match="a member was swapped"):
        ens.cascade(torch.randn(3, 6), first=2, until=0.5)


def test_dependent_rows_are_refused(tmp_path: Path) -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    ens = widepack.load(built(tmp_path, Mixed, states(2), "x=float32[B,6]"))
    with pytest.raises(UsageError, match="rows are not known to be independent"):
        ens.cascade(torch.randn(3, 6), first=1, until=0.5)


def test_stages_double() -> None:
    assert stages_from(3, 16) == (3, 6, 12, 16)
    assert stages_from(1, 1) == (1,) and stages_from(5, 5) == (5,) and stages_from(1, 4) == (1, 2, 4)
    images = torch.tensor([[[0.9, 0.6], [0.5, 0.8]], [[0.1, 0.4], [0.5, 0.2]]]).transpose(0, 1)
    assert confidence(images).tolist() == pytest.approx([0.6, 0.5])


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": ()},
        {"order": (0, 0)},
        {"order": (0, 3)},
        {"weights": (1.0,)},
        {"weights": (1.0, 0.0)},
        {"weights": (1.0, float("inf"))},
        {"weights": (1.0, float("nan"))},
        {"weights": (1e308, 1e308)},
        {"stages": (1,)},
        {"stages": (2, 1)},
        {"stages": (0, 2)},
        {"stages": ()},
        {"until": 2.0},
    ],
)
def test_settings_of_a_file_are_checked(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"order": (0, 2), "weights": (1.0, 2.0), "stages": (1, 2), "until": 0.5}
    CascadeSettings(**good).check(3)
    with pytest.raises(UsageError):
        CascadeSettings(**{**good, **wrong}).check(3)


def test_a_fit_measures_what_a_cascade_does() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (200,), generator=generator)
    scores = torch.randn(6, 200, 4, generator=generator)
    scores[:, torch.arange(200), targets] += 1.5
    predictions = scores.softmax(2)
    data = CascadeData(predictions, targets, [1.0] * 6, error)
    everything = float(error(predictions.mean(0), targets).mean())
    for allowed in (0.0, 0.01, 0.05):
        found = data.fit(allowed, torch.arange(200))
        assert found.loss <= everything + allowed + 1e-12 and found.calls < 6
        losses, calls = [], []
        for row in range(200):
            for stage in found.stages:
                mean = predictions[:stage, row].mean(0)
                if float(mean.max()) >= found.until:
                    break
            losses.append(float(mean.argmax() != targets[row]))
            calls.append(stage)
        assert sum(losses) / 200 == pytest.approx(found.loss, abs=0.006)
        assert sum(calls) / 200 == pytest.approx(found.calls, abs=0.05)
    loss, calls_out, whole = data.held_out(0.01)
    assert 0 <= loss <= 1 and 1 <= calls_out <= 6 and whole == pytest.approx(everything)
