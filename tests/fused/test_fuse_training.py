"""Compares twenty steps of fused training with the training of each member alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fusing import Cnn, Optimizer, Transformer, draw, ids, members, stacked, train, trained_as_alone
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import widepack

STEPS = 20
CASES: dict[str, tuple[Optimizer, torch.dtype, float]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), torch.float32, 1e-5),
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-3), torch.float64, 1e-8),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), torch.float64, 1e-8),
}


def check(modules: list[Any], inputs: list[Tensor], classes: int, name: str, each: bool) -> None:
    optimizer, _, bound = CASES[name]
    before = stacked(modules)

    def loss(outputs: Tensor, step: int) -> Tensor:
        flat = outputs.flatten(0, -2)
        return cross_entropy(flat, ids(len(flat), seed=100 + step) % classes)

    trained_as_alone(modules, inputs, optimizer, loss, each, {"rtol": bound, "atol": bound}, validate=False)
    for key, value in stacked(modules).items():
        assert (value - before[key]).abs().max() > 10 * bound, key


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("sgd", False),
        pytest.param("adam", True, marks=pytest.mark.slow),
        pytest.param("adamw", False, marks=pytest.mark.slow),
    ],
)
def test_a_cnn_with_batch_norm(name: str, each: bool) -> None:
    dtype, shape = CASES[name][1], (3, 6, 3, 8, 8) if each else (6, 3, 8, 8)
    inputs = [draw(*shape, seed=step, dtype=dtype) for step in range(STEPS)]
    check(members(Cnn, dtype=dtype), inputs, 4, name, each)


@pytest.mark.parametrize(
    "name",
    [pytest.param("sgd", marks=pytest.mark.slow), "adam", pytest.param("adamw", marks=pytest.mark.slow)],
)
def test_a_transformer(name: str) -> None:
    inputs = [ids(3, 4, 5, seed=step) for step in range(STEPS)]
    check(members(Transformer, dtype=CASES[name][1]), inputs, 11, name, True)


def test_a_batch_norm_without_momentum_keeps_the_mean_of_all_batches() -> None:
    modules = members(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)), dtype=torch.float64
    )
    fused = widepack.fuse([m.train() for m in modules], draw(5, 4, dtype=torch.float64))
    for step in range(3):
        xs = draw(3, 6 + step, 4, seed=step, dtype=torch.float64)
        torch.testing.assert_close(
            fused.each(xs), torch.stack([m(x) for m, x in zip(modules, xs)]), rtol=1e-12, atol=1e-12
        )
    for name, value in stacked(modules).items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.extended
def test_a_compiled_fused_module_is_the_fused_module() -> None:
    """The first call makes and compares a program."""
    modules, x = members(Cnn), draw(4, 3, 8, 8)
    fused = widepack.fuse(modules, x)
    compiled = torch.compile(fused, backend="eager")
    for mode in (False, True):
        fused.train(mode)
        right = torch.stack([m.train(mode)(x) for m in modules])
        torch.testing.assert_close(compiled(x), right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        fused.norm1.running_mean, torch.stack([m.norm1.running_mean for m in modules]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # torch's compiler, where it is imported
def test_compiled_programs_train_as_the_others() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3)]
    x = torch.randn(6, 4)
    plain, compiled = widepack.fuse(models, x).train(), widepack.fuse(models, x).train()
    compiled.compile(backend="aot_eager")
    for fused in (plain, compiled):
        train(fused, [x] * 3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # torch's compiler, where it is imported
def test_compile_is_used_by_programs_that_exist_already() -> None:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(len(inputs))
        return graph.forward

    fused = widepack.fuse([nn.Linear(4, 2) for _ in range(2)], torch.randn(3, 4)).train()
    before = fused(torch.ones(3, 4))
    fused.compile(backend=backend)
    torch.testing.assert_close(fused(torch.ones(3, 4)), before)
    assert len(seen) == 1
    fused(torch.ones(3, 4))
    assert len(seen) == 1
    copied = copy.deepcopy(fused)
    torch.testing.assert_close(copied(torch.ones(3, 4)), before)


class AddsIntoRepeated(nn.Module):
    """Adds at positions into a value that repeats its numbers, which torch's compiler gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(24))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        y = x * self.weight
        return y.sum(0).expand(6, 24).index_put((i,), y, accumulate=True)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # torch's compiler, where it is imported
def test_compiled_programs_answer_as_the_others() -> None:
    models = [AddsIntoRepeated() for _ in range(2)]
    x, i = torch.randn(5, 24), torch.tensor([0, 1, 1, -1, 3])
    fused = widepack.fuse(models, (x, i), dynamic={}).train()
    expected = fused(x, i)
    fused.compile()
    torch.testing.assert_close(fused(x, i), expected)


def test_a_compiled_program_that_answers_otherwise_is_not_used() -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *given: [y * 1.01 for y in graph.forward(*given)]

    fused = widepack.fuse([nn.Linear(4, 2) for _ in range(2)], torch.randn(3, 4)).train()
    expected = fused(torch.ones(3, 4))
    fused.compile(backend=wrong)
    with pytest.warns(
        UserWarning, match="other answers than the program without compilation: a result is off"
    ):
        torch.testing.assert_close(fused(torch.ones(3, 4)), expected)
    torch.testing.assert_close(fused(torch.ones(3, 4)), expected)


def test_invalid_options_of_compile_change_nothing() -> None:
    fused = widepack.fuse([nn.Linear(4, 2) for _ in range(2)], torch.randn(3, 4)).train()
    with pytest.raises(Exception, match="nonsense"):
        fused.compile(backend="nonsense")
    fused.eval().train()(torch.ones(3, 4))
    restored = pickle.loads(pickle.dumps(fused))
    torch.testing.assert_close(restored(torch.ones(3, 4)), fused(torch.ones(3, 4)))
