"""Tests members that accept some numbers only, have ops without a derivative, or read memory by strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import draw
from loaded import built
from torch import Tensor, nn

import widepack
from widepack.spec.draws import InputSource
from widepack.spec.draws import draw as draw_input

close = torch.testing.assert_close


class Calls(nn.Module):
    """Calls a function on a weight and the inputs."""

    def __init__(self, function: Callable[..., Any], weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, **inputs: Tensor) -> Any:
        return self.function(self.weight, **inputs)


def fused(
    function: Callable[..., Any], weights: list[Tensor], inputs: dict[str, Tensor]
) -> tuple[Any, list[Calls]]:
    members = [Calls(function, w) for w in weights]
    return widepack.fuse(members, (), sample_kwargs=inputs), members


def test_inputs_are_drawn_in_the_domain_of_the_members() -> None:
    """A loss over probabilities refuses a target outside of 0 and 1, a decomposition a matrix that is not
    positive definite.
    """
    target = torch.tensor([[0.0, 1.0, 0.9], [1.0, 0.0, 0.1]])

    def loss(weight: Tensor, target: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(weight.sigmoid(), target)

    model, members = fused(loss, [draw(2, 3, seed=i) for i in range(3)], {"target": target})
    close(model(target=target), torch.stack([m(target=target) for m in members]))
    assert model(target=target).requires_grad

    root = draw(2, 4, 4)
    matrix = root @ root.mT + 0.01 * torch.eye(4)

    def factor(weight: Tensor, a: Tensor) -> Tensor:
        y: Tensor = torch.linalg.cholesky(a) @ weight
        return y

    model, members = fused(factor, [draw(4, 4, seed=i) for i in range(3)], {"a": matrix})
    close(model(a=matrix), torch.stack([m(a=matrix) for m in members]), rtol=1e-4, atol=1e-4)


def test_noise_of_drawn_floats() -> None:
    example = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    values = {
        noise: torch.stack(
            [
                draw_input(InputSource("x", "float32[B,2]", None, None, example, noise), {"B": 2}, seed)
                for seed in range(50)
            ]
        )
        for noise in ("within", "none")
    }
    assert float(values["within"].min()) >= 0
    assert float(values["within"].max()) <= 1
    assert len(set(values["within"].flatten().tolist())) > 100
    assert set(values["none"].flatten().tolist()) == {0.0, 0.25, 0.5, 1.0}
    one = InputSource("x", "float32[]", None, None, torch.tensor(-3.0))
    assert len({float(draw_input(one, {}, seed)) for seed in range(5)}) == 5


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "function",
    [
        lambda weight, x: torch.floor_divide(weight, x),
        lambda weight, x: torch.igamma(weight.abs() + 1, x),
    ],
)
def test_a_member_without_gradients_is_fused(function: Callable[..., Any]) -> None:
    x = draw(3, 4).abs() + 1
    model, members = fused(function, [draw(3, 4, seed=1 + i) for i in range(3)], {"x": x})
    close(model(x=x), torch.stack([m(x=x) for m in members]))


def test_strided_writes_stay_in_a_members_own_memory() -> None:
    def scattered(weight: Tensor, x: Tensor, src: Tensor) -> Tensor:
        return torch.as_strided_scatter(x, src, (2, 2), (4, 2), 1) * weight

    inputs = [{"x": draw(2, 4, seed=i), "src": draw(2, 2, seed=9 + i)} for i in range(3)]
    model, members = fused(scattered, [draw(2, 4, seed=20 + i) for i in range(3)], inputs[0])
    stacked = {n: torch.stack([row[n] for row in inputs]) for n in ("x", "src")}
    expected = torch.stack([m(**row) for m, row in zip(members, inputs)])
    with torch.no_grad():
        close(model.each(**stacked), expected)
    stacked["x"][1] = torch.nan
    with torch.no_grad():
        close(model.each(**stacked)[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-6)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_whose_decomposition_in_torch_fails(reduction: str) -> None:
    def loss(weight: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        ranking = nn.functional.margin_ranking_loss(x * weight, x, target, 0.3, reduction=reduction)
        return ranking, nn.functional.hinge_embedding_loss(x * weight, target, 0.7, reduction=reduction)

    inputs = {"x": draw(5), "target": torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])}
    model, members = fused(loss, [draw(5, seed=1 + i) for i in range(3)], inputs)
    with torch.no_grad():
        for wide, *own in zip(model(**inputs), *(m(**inputs) for m in members)):
            close(wide, torch.stack(own))


def test_a_table_that_is_an_input_has_any_number_of_rows() -> None:
    def look_up(weight: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        return nn.functional.embedding(ids, table) * weight

    inputs = {"ids": torch.tensor([2, 0, 1]), "table": draw(4, 5)}
    model, members = fused(look_up, [draw(5, seed=i) for i in range(3)], inputs)
    tables = draw(3, 4, 5, seed=2)
    ids = torch.tensor([[0, 3, 1], [1, 2, 3], [3, 3, 0]])
    expected = torch.stack([m(ids=i, table=t) for m, i, t in zip(members, ids, tables)])
    close(model.each(ids=ids, table=tables), expected)


@pytest.mark.xfail(reason="the bound knows the kernel of one number only", raises=widepack.VerificationError)
def test_a_single_number_is_compared_with_the_kernels_of_many() -> None:
    """The kernels of one number and of vectors round in other ways, for example those of gelu."""
    values = [torch.tensor(v) for v in (-3.9, -4.1, -3.7)]
    model, members = fused(lambda weight: nn.functional.gelu(weight), values, {})
    close(model(), torch.stack([m() for m in members]), rtol=1e-3, atol=1e-7)


def test_a_build_whose_weights_decide_a_size_ends_in_an_error_of_widepack(tmp_path: Path) -> None:
    members = [Calls(torch.nonzero, torch.tensor([0.0, 1.0, i])) for i in range(2)]
    out = tmp_path / "e.wide"
    try:
        built(tmp_path, lambda: Calls(torch.nonzero, torch.zeros(3)), members, sample=())
    except widepack.WidepackError:
        assert not out.exists()
    else:
        answers = widepack.load(out)()
        assert [a.tolist() for a in answers] == [m().tolist() for m in members]
