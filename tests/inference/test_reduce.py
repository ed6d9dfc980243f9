"""Tests `reduce` of loaded models: leaves, members, states, entries, patterns, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import saved
from paths import ROOT
from torch import Tensor, nn

import widepack
from widepack import InputError, UsageError
from widepack.inference.loaded_entry import ModelCalls
from widepack.inference.model import WideModel
from widepack.reduction.figures import FIGURES
from widepack.reduction.reduce import Stream
from widepack.system.gate import Gate


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        y = self.fc(input)
        return {"hidden": y.tanh(), "logits": y, "labels": y.argmax(-1)}

    def first(self, input: Tensor) -> Tensor:
        y: Tensor = self.fc(input)
        return y[:, 0]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    folder = tmp_path_factory.mktemp("head")
    specs = [f"{name}:input=float32[B,6]" for name in ("forward", "first")]
    return saved(Head, folder, *specs, entries=["forward", "first"])


def test_figures_of_one_forward(head: WideModel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 6)
    y = head(x)["logits"]
    runs: list[int] = []
    run = Gate.run

    def counted(self: Gate, *args: Any) -> Any:
        runs.append(1)
        return run(self, *args)

    monkeypatch.setattr(Gate, "run", counted)
    r = head.reduce(x, "mean", "std", "vote", "entropy", "quantile(0.25)", of="softmax")
    assert list(r) == ["mean", "std", "vote", "entropy", "quantile(0.25)"] and len(runs) == 1
    p = y.softmax(-1)
    torch.testing.assert_close(r["mean"], p.mean(0))
    torch.testing.assert_close(r["std"], p.std(0, correction=0))
    torch.testing.assert_close(r["quantile(0.25)"], p.quantile(0.25, 0))
    torch.testing.assert_close(r["vote"], y.argmax(-1).mode(0).values)
    torch.testing.assert_close(r["entropy"], torch.special.entr(p.mean(0)).sum(-1))


def test_leaves_are_chosen_by_name_or_number(head: WideModel) -> None:
    x = torch.randn(5, 6)
    y = head(x)
    torch.testing.assert_close(head.mean(x), y["logits"].mean(0))
    torch.testing.assert_close(head.mean(x, output="hidden"), y["hidden"].mean(0))
    torch.testing.assert_close(head.mean(x, output=0), y["hidden"].mean(0))
    with pytest.raises(UsageError, match="output='hiden' is unknown; the members answer hidden, logits"):
        head.mean(x, output="hiden")
    with pytest.raises(InputError, match="the members' answers are int64: they have no mean"):
        head.mean(x, output="labels")


def test_members_and_weights(head: WideModel) -> None:
    x = torch.randn(5, 6)
    y = head(x)["logits"]
    torch.testing.assert_close(head.mean(x, members=[2, "m0"]), (y[2] + y[0]) / 2)
    torch.testing.assert_close(head.mean(x, members=[2, 0], weights=[3, 1]), (3 * y[2] + y[0]) / 4)
    for members, words in (([], "names each member once, and at least one"), ([1, 1], "each member once")):
        with pytest.raises(UsageError, match=words):
            head.mean(x, members=members)
    wrong: Any
    for wrong in (0, "m0", torch.tensor(1)):
        with pytest.raises(UsageError, match="reduce takes a list of numbers or names"):
            head.mean(x, members=wrong)
    with pytest.raises(UsageError, match="m9"):
        head.mean(x, members=["m9"])
    with pytest.raises(UsageError, match="4 weights for 2 members"):
        head.mean(x, members=[0, 1], weights=[1, 1, 1, 1])


def test_one_number_for_each_row_has_no_classes(head: WideModel) -> None:
    """It took the maximum over the rows of the batch, and answered one number."""
    x = torch.randn(5, 6)
    first = head.entry("first")
    y = first(x)
    torch.testing.assert_close(first.mean(x), y.mean(0))
    torch.testing.assert_close(first.reduce(x, "vote", of="sigmoid")["vote"], ((y > 0).sum(0) > 2).long())
    calls: list[Any] = [lambda: first.vote(x), lambda: first.mean(x, of="softmax")]
    for call in calls:
        with pytest.raises(InputError, match="of the members' answers is the batch"):
            call()


def test_inputs_by_name_and_for_each_member(head: WideModel) -> None:
    xs = torch.randn(4, 5, 6)
    torch.testing.assert_close(head.reduce("mean", input=xs[0])["mean"], head.mean(xs[0]))
    y = head.each(xs)["logits"]
    torch.testing.assert_close(head.mean(widepack.each(xs)), y.mean(0))
    with pytest.raises(UsageError, match="needs the names of figures after the inputs"):
        head.reduce(xs[0])
    with pytest.raises(UsageError, match=r"no figure 'meam' \(did you mean 'mean'"):
        head.reduce(xs[0], "meam")
    with pytest.raises(UsageError, match="of='softmax' for the scores of classes"):
        head.reduce(xs[0], "entropy")
    with pytest.raises(InputError):
        head.reduce(xs[0][:, :4], "mean")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.conv(input)
        return y


def test_classes_in_another_dim(tmp_path: Path) -> None:
    ens = saved(Images, tmp_path, "input=float32[B,3,H,W]")
    x = torch.randn(2, 3, 5, 7)
    y = ens(x)
    r = ens.reduce(x, "vote", "votes", "entropy", of="softmax", dim=1)
    assert r["vote"].shape == r["entropy"].shape == (2, 5, 7) and r["votes"].shape == (2, 4, 5, 7)
    torch.testing.assert_close(r["vote"], y.argmax(2).mode(0).values)
    torch.testing.assert_close(r["entropy"], torch.special.entr(y.softmax(2).mean(0)).sum(1))
    with pytest.raises(UsageError, match="dim=4: a member's answer has 4 dims, so dim is -4 to 3"):
        ens.reduce(x, "vote", dim=4)
    with pytest.raises(UsageError, match="is not a whole number"):
        ens.reduce(x, "vote", dim=1.0)  # type: ignore[arg-type]  # the test is about it


class Distribution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 2)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(input)
        return y[:, 0], nn.functional.softplus(y[:, 1])


def test_mixture(tmp_path: Path, head: WideModel) -> None:
    ens = saved(Distribution, tmp_path, "input=float32[B,6]")
    x = torch.randn(5, 6)
    means, variances = ens(x)
    r = ens.reduce(x, "mixture", "mean")
    mean, variance = r["mixture"]
    torch.testing.assert_close(mean, means.mean(0))
    torch.testing.assert_close(r["mean"], means.mean(0))
    torch.testing.assert_close(variance, (variances + means**2).mean(0) - mean**2)
    with pytest.raises(InputError, match="mixture needs members that answer two tensors"):
        head.reduce(torch.randn(5, 6), "mixture")
    with pytest.raises(UsageError, match="without of= and output="):
        ens.reduce(x, "mixture", of="softmax")


NAMES = (
    *("mean", "var", "std", "min", "max", "vote", "votes", "entropy", "expected_entropy"),
    *("mutual_information", "disagreement", "variation_ratio"),
)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("large", [0, 2**40])
def test_loop_plans_are_reduced_while_they_run(
    large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are those of the whole tensor, whether answers are added one by one or kept."""
    saved(Images, tmp_path, "input=float32[B,3,H,W]")
    ens = widepack.load(tmp_path / "e.wide", strategies="loop")
    wide = widepack.load(tmp_path / "e.wide")
    monkeypatch.setattr("widepack.inference.reduced_answer.LARGE", large)
    taken: list[int] = []
    take = Stream.take

    def counted(self: Stream, member: int, answer: Tensor) -> None:
        taken.append(member)
        take(self, member, answer)

    monkeypatch.setattr(Stream, "take", counted)
    x = torch.randn(2, 3, 5, 7)
    options: list[dict[str, Any]] = [{}, {"members": [3, 1]}, {"weights": [1, 0, 2, 1]}]
    for more in options:
        names = [n for n in NAMES if "weights" not in more or FIGURES[n].weighted]
        found = ens.reduce(x, *names, of="softmax", dim=1, **more)
        want = wide.reduce(x, *names, of="softmax", dim=1, **more)
        assert list(found) == names
        for name in names:
            torch.testing.assert_close(found[name], want[name], rtol=1e-4, atol=1e-6, msg=name)
    assert taken == ([] if large else [0, 1, 2, 3] * len(options))
    torch.testing.assert_close(ens.reduce(x, "median")["median"], wide(x).quantile(0.5, 0))
    with pytest.raises(UsageError, match="dim=9"):
        ens.reduce(x, "vote", dim=9)
    with pytest.raises(InputError):
        ens.reduce(x[:, :2], "mean")


def test_a_swap_is_seen_by_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(Images, tmp_path, "input=float32[B,3,H,W]")
    ens = widepack.load(tmp_path / "e.wide", strategies="loop")
    monkeypatch.setattr("widepack.inference.reduced_answer.LARGE", 0)
    x = torch.randn(1, 3, 4, 4)
    before = ens.mean(x)
    ens.swap(0, tmp_path / "m1.pt")
    assert not torch.equal(ens.mean(x), before)
    torch.testing.assert_close(ens.mean(x), ens(x).mean(0), rtol=1e-5, atol=1e-6)


def test_gradients_pass_through_figures_that_have_them(head: WideModel) -> None:
    r = head.reduce(torch.randn(5, 6), "mean", "std", of="softmax")
    assert not r["mean"].requires_grad
    r["mean"].add_(1)  # the caller owns the figures


def test_the_docstring_and_the_page_have_every_figure() -> None:
    page = (ROOT / "docs" / "how-to" / "reduce.md").read_text(encoding="utf-8")
    for name in (*FIGURES, "mixture"):
        word = "quantile(" if name == "quantile" else f"`{name}`"
        assert word in (ModelCalls.reduce.__doc__ or "") and word in page, name
