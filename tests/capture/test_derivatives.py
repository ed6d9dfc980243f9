"""Tests members whose forward takes derivatives by its inputs: forces, Jacobians, products with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import QUICK, agree, loaded, member, refused, saved
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from widepack import build, fuse, load

N, WIDTH = 3, 16
SIZES = ((12, 4), (1, 9), (13, 2))
SIZES_OF_PAIRS = [(4 + k, 9 * k % 31) for k in range(1, 12)]
Style = Callable[["Potential", Tensor, Tensor], Any]


def by_grad(net: Potential, z: Tensor, x: Tensor) -> Any:
    x = x.requires_grad_(True)
    energy = net.energy(z, x)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=net.training)
    return {"energy": energy, "forces": -slope}


def by_grad_inside_enable_grad(net: Potential, z: Tensor, x: Tensor) -> Any:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        energy = net.energy(z, x)
        (slope,) = torch.autograd.grad([energy], [x], [torch.ones_like(energy)])
    return energy.detach(), -slope


def by_func_grad(net: Potential, z: Tensor, x: Tensor) -> Any:
    def total(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        energy = net.energy(z, x)
        return energy.sum(), energy

    both: Any = torch.func.grad_and_value(total, has_aux=True)(x, z)
    slope, (_, energy) = both
    return energy, -slope, torch.func.grad(lambda z, x: net.energy(z, x).sum(), argnums=1)(z, x)


def by_vjp(net: Potential, z: Tensor, x: Tensor) -> Any:
    both: Any = torch.func.vjp(lambda x: net.energy(z, x), x)
    energy, pull = both
    return energy, pull(torch.ones_like(energy))[0]


def by_jvp(net: Potential, z: Tensor, x: Tensor) -> Any:
    return torch.func.jvp(lambda x: net.energy(z, x), (x,), (x.sin(),))


def by_jacrev(net: Potential, z: Tensor, x: Tensor) -> Any:
    """The derivative of the features of one distance by it, and its own derivative."""
    r = x[0, 0].square().sum().reshape(1)
    return torch.func.jacrev(net.features)(r), torch.func.hessian(net.features)(r)


def twice(net: Potential, z: Tensor, x: Tensor) -> Any:
    """The curvature along a direction: a derivative of a derivative."""
    x = x.requires_grad_(True)
    (slope,) = torch.autograd.grad(net.energy(z, x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad((slope * x.detach().cos()).sum(), x)
    return slope, curvature


STYLES: dict[str, Style] = {
    "grad": by_grad,
    "enable_grad": by_grad_inside_enable_grad,
    "func": by_func_grad,
    "vjp": by_vjp,
    "jvp": by_jvp,
    "jacrev": by_jacrev,
    "twice": twice,
}


class Potential(nn.Module):
    """A small SchNet: features of distances, messages between all pairs, an energy of each sample."""

    def __init__(self, style: Style = by_grad, norm: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.table = nn.Embedding(10, WIDTH)
        rest = [nn.LayerNorm(WIDTH)] if norm else []
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), *rest, nn.Softplus(), nn.Linear(WIDTH, 1))
        self.style = style

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        diagonal = torch.eye(x.shape[1], dtype=x.dtype)
        r = ((x[:, :, None] - x[:, None]).square().sum(-1) + diagonal).sqrt()
        pairs = self.features(r.unsqueeze(-1)) * (1 - diagonal).unsqueeze(-1)
        h = self.table(z)
        found: Tensor = self.readout(h + (pairs * h[:, None]).sum(2)).sum((1, 2))
        return found

    def forward(self, z: Tensor, x: Tensor) -> Any:
        return self.style(self, z, x)


class OfPairs(nn.Module):
    """Messages along a list of neighbours, added up by index_add. Numbers of atoms and pairs are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)
        self.filter = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.register_buffer("centers", torch.linspace(0.0, 4.0, 8))
        self.centers: Tensor

    def forward(self, z: Tensor, x: Tensor, i: Tensor, j: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_(True)
        r = (x[i] - x[j]).norm(dim=-1)
        h = self.table(z)
        messages = self.filter(torch.exp(-((r[:, None] - self.centers) ** 2))) * h[j]
        h = h + torch.zeros_like(h).index_add(0, i, messages)
        h = h + torch.zeros_like(h).scatter_add(0, i[:, None].expand(-1, WIDTH), messages.tanh())
        energy = self.readout(h).sum()
        return {"energy": energy, "forces": -torch.autograd.grad(energy, x)[0]}


def members(make: Callable[[], nn.Module]) -> list[nn.Module]:
    return [member(make, i) for i in range(N)]


def exact(net: nn.Module, make: Callable[[], nn.Module], given: tuple[Tensor, ...]) -> Any:
    twin = make().eval().double()
    twin.load_state_dict(net.state_dict())
    return twin(*(v.double() if v.is_floating_point() else v for v in given))


def check(ens: Any, nets: list[nn.Module], make: Callable[[], nn.Module], calls: list[Any]) -> None:
    """Compares both patterns with the members' own modules, in units of their own errors against float64."""
    errors: dict[
        int, list[tuple[Tensor, Tensor, Tensor]]
    ] = {}  # by output: ours, the member's own, the truth
    for call in calls:
        shared, own = [call(0)] * N, [call(i) for i in range(N)]
        each = ens.each(*(torch.stack(v) for v in zip(*own)))
        for answer, given in ((ens(*shared[0]), shared), (each, own)):
            for i, net in enumerate(nets):
                alone = pytree.tree_leaves(net(*(v.clone() for v in given[i])))
                truth = pytree.tree_leaves(exact(net, make, given[i]))
                for k, (y, a, t) in enumerate(zip(pytree.tree_leaves(answer), alone, truth)):
                    assert y[i].shape == a.shape and y.dtype == a.dtype
                    parts = (v.detach().double().flatten() for v in (y[i] - t, a - t, t))
                    errors.setdefault(k, []).append(tuple(parts))
    for found in errors.values():
        ours, theirs, exactly = (torch.cat(parts) for parts in zip(*found))
        ulp = torch.finfo(torch.float32).eps * exactly.square().mean().sqrt()
        assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + ulp
        assert ours.abs().max() <= 4 * theirs.abs().max() + 4 * ulp


@pytest.mark.parametrize(
    "style", ["jacrev", *(pytest.param(s, marks=pytest.mark.extended) for s in STYLES if s != "jacrev")]
)
def test_members_answer_with_derivatives(style: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Potential(STYLES[style])

    inputs = ("z=int64[B,A]:0..9", "x=float32[B,A,3]")
    report = build(
        saved(make, tmp_path, N), tmp_path / "a.wide", model=make, inputs=inputs, budget=0, **QUICK
    )
    assert report.wide_share == 1.0

    def call(batch: int, atoms: int) -> Any:
        def drawn(i: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(31 * i + atoms)
            z = torch.randint(0, 10, (batch, atoms), generator=generator)
            return z, torch.randn(batch, atoms, 3, generator=generator) * 2

        return drawn

    check(load(tmp_path / "a.wide"), members(make), make, [call(*s) for s in SIZES])


@pytest.mark.extended
def test_atoms_and_pairs_are_dynamic(tmp_path: Path) -> None:
    paths = saved(OfPairs, tmp_path, N)
    inputs = ("z=int64[A]:0..9", "x=float32[A,3]", "i=int64[E]:0..0", "j=int64[E]:1..1")
    report = build(paths, tmp_path / "a.wide", model=OfPairs, inputs=inputs, budget=0, **QUICK)
    assert report.wide_share == 1.0

    def call(atoms: int, pairs: int) -> Any:
        def drawn(k: int) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(7 * k + pairs)
            i = torch.randint(0, atoms // 2, (pairs,), generator=generator)
            j = torch.randint(atoms // 2, atoms, (pairs,), generator=generator)
            z = torch.randint(0, 10, (atoms,), generator=generator)
            return z, torch.randn(atoms, 3, generator=generator), i, j

        return drawn

    check(load(tmp_path / "a.wide"), members(OfPairs), OfPairs, [call(a, e) for a, e in SIZES_OF_PAIRS])


def forces_of(answer: Any) -> tuple[Tensor, Tensor]:
    return answer["energy"], answer["forces"]


@pytest.mark.extended
def test_a_fused_module_answers_in_eval_mode() -> None:
    nets = members(Potential)
    z, x = torch.randint(0, 10, (2, 5)), torch.randn(2, 5, 3)
    fused = fuse(nets, (z, x)).eval()
    for batch in (z, x), (z[:1], x[:1]):
        for answer in (fused(*batch), torch.no_grad()(fused)(*batch)):
            for i, net in enumerate(nets):
                torch.testing.assert_close(answer["forces"][i], net(batch[0], batch[1].clone())["forces"])


@pytest.mark.extended
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_members_train_by_their_forces(norm: bool) -> None:
    """A loss of forces has gradients through the derivative. Twenty steps are the members' own."""
    nets = members(lambda: Potential(by_grad, norm).double())
    z, x = torch.randint(0, 10, (2, 5)), torch.randn(2, 5, 3, dtype=torch.float64)
    target = torch.randn(2, 5, 3, dtype=torch.float64)
    before = {name: value.detach().clone() for name, value in nets[0].named_parameters()}
    fused = fuse(nets, (z, x)).train()
    ours = torch.optim.SGD(fused.parameters(), lr=1e-4)
    theirs = [torch.optim.SGD(net.train().parameters(), lr=1e-4) for net in nets]
    for _ in range(20):
        ours.zero_grad()
        energy, forces = forces_of(fused(z, x))
        loss = (forces - target).square().sum() + energy.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        ours.step()
        for net, optimizer in zip(nets, theirs):
            optimizer.zero_grad()
            energy, forces = forces_of(net(z, x.clone()))
            loss = (forces - target).square().sum() + energy.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    found = dict(fused.named_parameters())
    for i, net in enumerate(nets):
        for name, value in net.named_parameters():
            torch.testing.assert_close(found[name][i], value, rtol=1e-9, atol=1e-11)
    moved = {name: (value - before[name]).abs().max() for name, value in nets[0].named_parameters()}
    assert sum(m > 1e-5 for m in moved.values()) > len(moved) // 2


class Stopped(nn.Module):
    """Stops gradients in each of the ways that there are, beside a derivative."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 1)
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_(True)
        h = torch.tanh(self.inner(x))
        if self.how == "detach":
            h = h + torch.exp(self.inner(x)).detach()
        elif self.how == "data":
            h = h + torch.exp(self.inner(x)).data
        elif self.how == "no_grad":
            with torch.no_grad():
                more = torch.exp(self.inner(x))
            h = h + more
        energy = self.outer(h).sum(-1)
        create = self.how != "retain_graph"
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=create, retain_graph=True)
        return energy, slope


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("how", ["none", "detach", "data", "no_grad", "retain_graph"])
def test_what_stops_gradients_in_a_member_stops_them_in_all(how: str) -> None:
    nets = [net.train() for net in members(lambda: Stopped(how))]
    x = torch.randn(5, 3)
    fused = fuse(nets, (x,)).train()
    energy, slope = fused(x)
    (energy.square().sum() + slope.square().sum()).backward()
    found = dict(fused.named_parameters())
    for i, net in enumerate(nets):
        energy, slope = net(x.clone())
        (energy.square().sum() + slope.square().sum()).backward()
        for name, value in net.named_parameters():
            gradient = found[name].grad
            assert gradient is not None
            torch.testing.assert_close(gradient[i], value.grad)


class ConstantSlope(nn.Module):
    """Takes a derivative of which the answer shows nothing but its sign, which an export could fix."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.ones(3, requires_grad=True)
        (slope,) = torch.autograd.grad(self.lin(at).tanh().sum(), at)
        y: Tensor = self.lin(x) * slope.sign().sum()
        return y


def test_a_derivative_at_a_constant_belongs_to_each_member(tmp_path: Path) -> None:
    agree(loaded(ConstantSlope, tmp_path, "x=float32[B,3]", count=N), ConstantSlope, torch.randn(4, 3))


class ByVmap(Potential):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda z, x: self.energy(z[None], x[None])[0], argnums=1)
        found: Tensor = torch.vmap(slope)(z, x)
        return found


@pytest.mark.extended
def test_vmap_of_a_derivative_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refused(ByVmap, tmp_path, inputs=("z=int64[B,A]:0..9", "x=float32[B,A,3]"))
    assert "fixes a size" in message and "test_derivatives.py" in message
