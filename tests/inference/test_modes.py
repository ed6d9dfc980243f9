"""Tests loaded and fused models under modes of torch: default dtype and device, deterministic algorithms,
hooks, derivatives, torch.func and torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from default_dtype import double_by_default
from fusing import members
from torch import Tensor, nn
from torch.autograd import forward_ad as untyped_forward_ad

import widepack
from widepack import InputError, UsageError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.fc(x)).relu())
        return y


@pytest.fixture(scope="module")
def own() -> list[Any]:
    return members(Net)


@pytest.fixture(scope="module")
def path(own: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("modes") / "e.wide"
    widepack.fuse(own, X).save(path, pt2=False)
    return path


forward_ad: Any = untyped_forward_ad
first_level = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch compiles scripts there


def close(y: Any, right: Any) -> None:
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "mode", [double_by_default, deterministic, lambda: torch.device("meta"), lambda: torch.device("cpu")]
)
def test_modes_of_the_process_change_no_answer(
    mode: Callable[[], Any], own: list[Any], path: Path, tmp_path: Path
) -> None:
    """The meta device stands for a GPU: an op that ran on the default device would fail."""
    right = torch.stack([m(X) for m in own]).detach()
    xs = torch.stack([X] * 3)
    loaded = widepack.load(path)
    with mode():
        ens, again = widepack.load(path), widepack.load(path, strategies="loop")
        fused = widepack.fuse(own, X)
        for y in (ens(X), ens.each(xs), ens[0](X)[None].expand(3, 5, 3), again(X), loaded(X), fused(X)):
            assert y.dtype == torch.float32 and y.device.type == "cpu"
        for y in (ens(X), ens.each(xs), again(X), loaded(X), fused(X), fused.each(xs)):
            close(y.detach(), right)
        ens.probe()
        fused.train()(X).sum().backward()
        fused.eval().save(tmp_path / "s.wide", pt2=False)


def test_inputs_that_require_grad_are_refused_unless_gradients_are_off(path: Path) -> None:
    ens = widepack.load(path)
    x: Any = X.clone()
    x.requires_grad_()
    close(ens(X), ens(x.detach()))
    with torch.no_grad():
        close(ens(x), ens(X))
    words = "input x requires grad, and a loaded artifact gives no gradients: .*no_grad.*widepack.fuse"
    calls: list[Callable[[], Any]] = [
        lambda: ens(x),
        lambda: ens.each(torch.stack([x] * 3)),
        lambda: ens.mean(x),
    ]
    for call in calls:
        with pytest.raises(InputError, match=words):
            call()
    assert ens[0](x).requires_grad


def test_torch_func_over_a_fused_module_is_that_over_the_members(own: list[Any]) -> None:
    fused = widepack.fuse(own, X)
    func = torch.func
    parameters: dict[str, Any] = dict(fused.named_parameters())
    close(func.functional_call(fused, parameters, (X,)), fused(X))
    gradients = func.grad(lambda p: func.functional_call(fused, p, (X,)).square().sum())(parameters)
    for i, m in enumerate(own):
        alone: dict[str, Any] = dict(m.named_parameters())
        right = func.grad(lambda p, m=m: func.functional_call(m, p, (X,)).square().sum())(alone)
        for name, value in right.items():
            torch.testing.assert_close(gradients[name][i], value, rtol=1e-4, atol=1e-4)
    close(func.vmap(fused)(X[:, None]), fused(X).transpose(0, 1)[:, :, None])
    jacobian = func.jacrev(fused)(X)
    close(jacobian, torch.stack([func.jacrev(m)(X) for m in own]))


@first_level
@pytest.mark.parametrize("trains", [True, False], ids=["no_grad", "frozen"])
def test_torch_func_without_gradients_over_a_fused_module(trains: bool, own: list[Any]) -> None:
    """Weights that are bound to a program have no rules of the transforms."""
    fused, func = widepack.fuse(own, X).requires_grad_(trains), torch.func
    parameters: dict[str, Any] = {n: p.detach() for n, p in fused.named_parameters()}
    two = {n: torch.stack([p, 2 * p]) for n, p in parameters.items()}

    def members_in_turn(x: Tensor) -> Tensor:
        return torch.stack([m(x) for m in own])

    with torch.set_grad_enabled(not trains):
        close(fused(X), members_in_turn(X))
        inputs = torch.stack([X, 2 * X])
        close(func.vmap(fused)(inputs), torch.stack([members_in_turn(x) for x in inputs]))
        close(func.jvp(fused, (X,), (X,)), func.jvp(members_in_turn, (X,), (X,)))
        close(func.functionalize(fused)(X), members_in_turn(X))
        mapped = func.vmap(lambda p: func.functional_call(fused, p, (X,)))(two)
        close(mapped[0], members_in_turn(X))
        twice = {n: p[1] for n, p in two.items()}
        close(mapped[1], func.functional_call(fused, twice, (X,)))


def test_torch_func_over_a_loaded_model_is_refused(path: Path) -> None:
    ens = widepack.load(path)
    for _ in range(2):  # before and after a call of these sizes was seen
        with pytest.raises(InputError, match="input x is inside a transform of torch.func, which"):
            torch.func.vmap(ens)(torch.stack([X, X]))
        with pytest.raises(InputError, match="input x is inside a transform of torch.func"):
            torch.func.grad(lambda x: ens(x).sum())(X)
        ens(X)


def test_torch_func_over_a_route_is_refused(path: Path) -> None:
    """What `route` refuses does not depend on earlier calls."""
    ens, members = widepack.load(path), [0] * len(X)

    def route(x: Tensor) -> Tensor:
        found: Tensor = ens.route(x, member=members)
        return found

    for _ in range(2):
        for transformed in (torch.func.vmap(route), torch.func.vmap(ens)):
            with pytest.raises(InputError, match=r"input x is inside a transform of torch\.func, which"):
                transformed(torch.stack([X, X]))
        with pytest.raises(InputError, match="input x is inside a transform"):
            torch.func.functionalize(route)(X)
        with pytest.raises(InputError, match="member is inside a transform"):
            torch.func.vmap(lambda m: ens.route(X, member=m))(torch.zeros(2, len(X), dtype=torch.int64))
        route(X)


@first_level
def test_forward_mode_over_a_loaded_model_is_refused(path: Path) -> None:
    """The answer would have no tangent."""
    ens = widepack.load(path)
    want = ens(X)
    with forward_ad.dual_level():
        with pytest.raises(InputError, match=r"input x has a tangent of torch\.autograd\.forward_ad"):
            ens(forward_ad.make_dual(X, torch.ones_like(X)))
        assert torch.equal(ens(X), want)


@first_level
def test_forward_mode_over_a_fused_module(own: list[Any]) -> None:
    fused = widepack.fuse(own, X)
    tangents = []
    for module in [fused, *own]:
        with forward_ad.dual_level():
            answer = module(forward_ad.make_dual(X, torch.ones_like(X)))
            tangents.append(forward_ad.unpack_dual(answer).tangent)
    close(tangents[0], torch.stack(tangents[1:]))


def test_hooks_of_a_fused_module_run_and_those_of_its_parts_are_refused(own: list[Any]) -> None:
    fused = widepack.fuse(own, X)
    right = fused(X).detach()
    handles = [
        fused.register_forward_hook(lambda module, args, y: 2 * y),
        fused.register_forward_pre_hook(lambda module, args: (args[0] + 0,)),
    ]
    close(fused(X), 2 * right)
    for handle in handles:
        handle.remove()
    hooks = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    for hook in hooks:
        with pytest.raises(UsageError, match="Linear is a part of a fused module.*hook on the fused module"):
            getattr(fused.fc, f"register_{hook}")(lambda *args: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_call_answers_as_the_loaded_model(path: Path) -> None:
    ens = widepack.load(path)
    close(torch.compile(ens, backend="eager")(X), ens(X))
    close(torch.compile(lambda x: 2 * ens(x), backend="eager")(X), 2 * ens(X))
