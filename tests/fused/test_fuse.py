"""Tests answers, modes, gradients and weights of fused modules, with shared and tied weights."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import Cnn, First, Mlp, copies, draw, gradients, members, same_gradients, stacked
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import widepack
from widepack import MemberMismatch, UsageError

close = torch.testing.assert_close


def test_eval_answers_are_those_of_the_members() -> None:
    modules = members(Cnn, 2)
    fused = widepack.fuse(modules, draw(4, 3, 8, 8))
    x, xs = draw(7, 3, 8, 8, seed=1), draw(2, 2, 3, 8, 8, seed=2)
    with torch.no_grad():
        close(fused(x), torch.stack([m(x) for m in modules]), rtol=1e-5, atol=1e-6)
        close(fused.each(xs), torch.stack([m(v) for m, v in zip(modules, xs)]), rtol=1e-5, atol=1e-6)
        close(fused(widepack.each(xs)), fused.each(xs), rtol=0, atol=0)
    assert not fused.training
    assert len(fused) == 2


@pytest.mark.extended
def test_eval_runs_the_program_that_load_would() -> None:
    """Norms are folded, and derived weights are computed again only when a weight has changed."""
    modules = members(Cnn)
    x = draw(4, 3, 8, 8)
    fused = widepack.fuse(modules, x, validate=False)
    with torch.no_grad():
        before = fused(x)
        (runner,) = fused.current_entry().runners
        assert not any("batch_norm" in n.op for n in runner.program.nodes)
        fused.norm1.running_mean[1] += 1.0
        fused.conv2.weight[2] *= 2.0
        after = fused(x)
        assert torch.equal(after[0], before[0])
        close(after, torch.stack([m(x) for m in fused]), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(after[1], before[1])
        fused.head.weight.data[0].zero_()
        fused.eval()
        close(fused(x)[0], modules[0].head.bias.expand(4, 4))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {}])
def test_eval_answers_follow_an_optimizer(how: dict[str, Any]) -> None:
    """The fused kernel of an optimizer writes into weights but does not increase their version counter."""
    fused = widepack.fuse(
        members(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), 2),
        draw(5, 4),
        validate=False,
    )
    optimizer = torch.optim.Adam(fused.parameters(), lr=0.1, **how)
    for _ in range(2):
        fused(draw(5, 4)).square().sum().backward()
        with torch.no_grad():
            fused(draw(5, 4))
        optimizer.step()
        with torch.no_grad():
            close(fused(draw(5, 4)), torch.stack([m(draw(5, 4)) for m in fused]))


def test_the_result_may_have_another_form_in_train_mode() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return {"a": self.a(x), "b": self.b(x)} if self.training else self.a(x)

    (modules,) = members(Auxiliary, 1)
    fused = widepack.fuse([modules], draw(5, 4))
    assert fused(draw(2, 4)).shape == (1, 2, 3)
    y = fused.train()(draw(2, 4))
    close(y["b"][0], modules.b(draw(2, 4)))


def test_gradients_in_eval_and_train_mode_are_those_of_the_members_in_float64() -> None:
    modules = members(Cnn, dtype=torch.float64)
    x = draw(4, 3, 8, 8, dtype=torch.float64)
    fused = widepack.fuse(modules, x, validate=False)
    for mode in (False, True):
        fused.train(mode).zero_grad()
        (fused(x) * draw(3, 4, 4, seed=5, dtype=torch.float64)).sum().backward()
        for m, g in zip(modules, draw(3, 4, 4, seed=5, dtype=torch.float64)):
            m.train(mode).zero_grad()
            (m(x) * g).sum().backward()
        same_gradients(fused, modules, rtol=1e-9, atol=1e-10)
    for name, value in stacked(modules).items():
        close(fused.state_dict()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.extended
def test_train_mode_writes_the_statistics_of_each_member() -> None:
    modules = members(Cnn)
    x = draw(6, 3, 8, 8)
    fused = widepack.fuse([m.train() for m in modules], x, validate=False)
    xs = draw(3, 5, 3, 8, 8, seed=3)
    handle = fused.norm1.running_mean
    with torch.no_grad():
        fused.each(xs)
        fused(x)
        for m, v in zip(modules, xs):
            m.train()(v)
            m(x)
    assert fused.norm1.running_mean is handle
    for name in ("norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked"):
        close(fused.state_dict()[name], stacked(modules)[name])
    assert fused.norm1.num_batches_tracked.tolist() == [2, 2, 2]
    fused.norm1.eval()
    with torch.no_grad():
        fused(x)
    assert fused.norm1.num_batches_tracked.tolist() == [2, 2, 2]


def test_a_fused_module_is_an_nn_module(tmp_path: Path) -> None:
    modules = members(Mlp)
    x = draw(2, 4)
    fused = widepack.fuse(modules, draw(5, 4), validate=False)
    assert {n: list(v.shape) for n, v in fused.state_dict().items()} == {
        n: list(v.shape) for n, v in stacked(modules).items()
    }
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in modules[0].named_parameters()]
    other = copy.deepcopy(fused)
    with torch.no_grad():
        other.get_parameter("layers.3.bias").add_(1.0)
        close(other(x), fused(x) + 1.0)
        torch.save(fused.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        close(other(x), fused(x), rtol=0, atol=0)
        whole = pickle.loads(pickle.dumps(fused))
        close(whole(x), fused(x))
        doubled = fused.double()
        close(doubled(x.double()).float(), other(x), rtol=1e-5, atol=1e-6)
        assert doubled(x.double()).dtype == torch.float64
    assert repr(fused).startswith(
        "Fused3Mlp(\n  (layers): Sequential(\n    (0): Linear(weight=[3, 6, 4], bias=[3, 6])\n"
    )


def test_members_are_copied_and_given_back_bit_for_bit() -> None:
    modules = members(Cnn)
    before = [copy.deepcopy(m.state_dict()) for m in modules]
    fused = widepack.fuse([m.train() for m in modules], draw(4, 3, 8, 8), validate=False)
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
    fused(draw(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    back: list[Any] = fused.unfuse()
    assert all(type(m) is Cnn and m.training for m in back)
    for i, m in enumerate(back):
        for name, value in m.state_dict().items():
            assert torch.equal(value, fused.state_dict()[name][i])
            assert torch.equal(modules[i].state_dict()[name], before[i][name])
        assert not torch.equal(m.conv1.weight, modules[i].conv1.weight)
    back[0].head.weight.data.zero_()
    assert fused.head.weight[0].abs().sum() > 0


def test_shared_weights_are_one_and_equal_ones_are_not() -> None:
    modules = members(Mlp, dtype=torch.float64)
    for m in modules[1:]:
        m.layers[0].load_state_dict(modules[0].layers[0].state_dict())
    x = draw(5, 4, dtype=torch.float64)
    tied = widepack.fuse(modules, x, share=["layers.0.*"])
    apart = widepack.fuse(modules, x, validate=False)
    assert tied.get_parameter("layers.0.weight").shape == (6, 4)
    assert apart.get_parameter("layers.0.weight").shape == (3, 6, 4)
    for m in (tied, apart):
        m(x).square().sum().backward()
    gradient = apart.get_parameter("layers.0.weight").grad
    assert gradient is not None
    close(tied.get_parameter("layers.0.weight").grad, gradient.sum(0), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        close(tied(x), apart(x))
    assert torch.equal(tied.unfuse()[2].get_parameter("layers.0.weight"), modules[2].layers[0].weight)
    with pytest.raises(
        MemberMismatch,
        match=r"share: 2 weights are not equal to member 0's: layers.3.weight in member 1, "
        r"layers.3.weight in member 2",
    ):
        widepack.fuse(modules, x, share=["layers.3.weight"])
    with pytest.raises(
        UsageError, match=r"share: nothing\.\* is not a parameter; the parameters are layers.0.bias, "
    ):
        widepack.fuse(modules, x, share=["nothing.*"])


class Tied(nn.Module):
    """A module with a tied weight, a module with two names, a frozen weight, and names of nn.Module."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.train_ = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.again = self.train_
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.scale = torch.tensor([scale, 1.0, 2.0, 3.0])
        self.register_module("forward_", nn.Tanh())
        self.register_buffer("seen", torch.randn(4), persistent=False)

    def forward(self, x: Tensor, deep: dict[str, Tensor], twice: bool = False) -> dict[str, Tensor]:
        y = self.b(torch.tanh(self.a(x))) + self.again(self.train_(deep["h"])) * self.scale
        with torch.no_grad():
            still = self.a(x)
        return {"y": y * self.frozen + self.seen, "z": (y + still).detach() * y + still}


def test_ties_frozen_weights_constants_and_stopped_gradients() -> None:
    scales = iter((0.5, 2.0, 3.0))
    modules = members(lambda: Tied(next(scales)), dtype=torch.float64)
    for m in modules:
        m.scale = m.scale.double()
    x, h = draw(5, 4, dtype=torch.float64), draw(3, 5, 4, seed=1, dtype=torch.float64)
    fused = widepack.fuse(modules, (x,), sample_kwargs={"deep": {"h": h[0]}})
    assert fused.a.weight is fused.b.weight
    assert fused.again is fused.train_
    assert not fused.frozen.requires_grad
    assert set(fused.state_dict()) == set(modules[0].state_dict())
    y = fused(x, deep={"h": widepack.each(h)})
    (y["y"].square().sum() + y["z"].sum()).backward()
    for i, m in enumerate(modules):
        z = m(x, {"h": h[i]})
        close(y["y"][i], z["y"])
        close(y["z"][i], z["z"])
        (z["y"].square().sum() + z["z"].sum()).backward()
    for name, g in gradients([*modules]).items():
        if name != "frozen":
            close(dict(fused.named_parameters())[name].grad, g, rtol=1e-10, atol=1e-10)
    back: list[Any] = fused.unfuse()
    assert back[1].a.weight is back[1].b.weight
    assert not back[1].frozen.requires_grad
    assert torch.equal(back[1].scale, modules[1].scale)
    assert torch.equal(back[2].seen, modules[2].seen)


@pytest.mark.extended
def test_a_recurrent_network_trains() -> None:
    """widepack replaces its ops without a derivative by other ops."""

    modules = members(lambda: nn.Sequential(nn.GRU(3, 4, batch_first=True), First()))
    x = draw(2, 3, 3)
    fused = widepack.fuse([m.train() for m in modules], x)
    for m in (fused, *modules):
        m(x).square().sum().backward()
    same_gradients(fused, modules, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_parametrized_weights_train() -> None:
    """Tests weight norm and spectral norm. The buffers of spectral norm change in train mode."""

    def make() -> nn.Module:
        return nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 5)),
            nn.Tanh(),
            parametrizations.spectral_norm(nn.Linear(5, 3)),
        )

    modules = members(make, 2, dtype=torch.float64)
    x = draw(5, 4, dtype=torch.float64)
    fused = widepack.fuse([m.train() for m in modules], x)
    trained = copies(modules)
    for m in (fused, *trained):
        m(x).square().sum().backward()
    same_gradients(fused, trained, rtol=1e-9, atol=1e-10)
    for name, value in stacked(trained).items():
        close(fused.state_dict()[name], value, rtol=1e-12, atol=1e-12)


def test_gradients_of_inputs() -> None:
    modules = members(Mlp)
    x, xs = draw(3, 4).requires_grad_(), draw(3, 2, 4).requires_grad_()
    fused = widepack.fuse(modules, draw(5, 4), validate=False).requires_grad_(False)
    (g,) = torch.autograd.grad(fused(x).sum(), x)
    close(g, sum(torch.autograd.grad(m(x).sum(), x)[0] for m in modules))
    (g,) = torch.autograd.grad(fused.each(xs).sum(), xs)
    close(g, torch.stack([torch.autograd.grad(m(v).sum(), v)[0] for m, v in zip(modules, xs)]))


def test_dropout_draws_for_each_member() -> None:
    one = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    fused = widepack.fuse([copy.deepcopy(one) for _ in range(4)], draw(5, 4), validate=False)
    y = fused(draw(5, 4))
    assert all(not torch.allclose(y[i], y[j]) for i in range(4) for j in range(i))
    assert not torch.allclose(y, fused(draw(5, 4)))
    y.sum().backward()
    fused.eval()
    with torch.no_grad():
        y = fused(draw(5, 4))
        close(y, y[:1].expand_as(y))


class NamedAsOurs(nn.Module):
    """A module with a parameter and a submodule with names that a fused module also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.each = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.each(x @ self.weight.T)
        return answer


def test_a_parameter_may_be_called_weight() -> None:
    members = [NamedAsOurs().eval() for _ in range(2)]
    fused, x = widepack.fuse(members, torch.randn(2, 4)), torch.randn(5, 4)
    assert torch.equal(fused.weight[1], members[1].weight)
    for i, member in enumerate(members):
        close(fused(x)[i], member(x))
        close(fused.each(x.expand(2, 5, 4))[i], member(x))
