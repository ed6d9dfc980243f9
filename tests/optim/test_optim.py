"""Compares optimizers that have a rate for each member with N optimizers of torch on single members."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack import UsageError, fuse, primitives
from widepack.optim import PerMember, optimizers

N = 3
LR = [0.1, 0.02, 0.5]
DECAY = [0.0, 0.3, 0.01]
TORCH: dict[str, Any] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {"momentum": 0.8, "dampening": 0.3}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "eps": 1e-3}),
    ("Adam", {"betas": (0.5, 0.9), "maximize": True}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "betas": (0.0, 0.7)}),
]
SHAPES = ((), (4,), (2, 3))


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns random tensors `[N, *shape]`, one for each shape."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn((N, *s), generator=g, dtype=dtype) for s in SHAPES]


def steps(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    grads: Callable[[int], list[Tensor]],
    count: int,
    first: int = 0,
) -> None:
    for k in range(first, first + count):
        for p, g in zip(params, grads(k), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


def of_member(values: list[Tensor], i: int) -> list[Tensor]:
    return [v[i].clone() for v in values]


def both(
    name: str, options: dict[str, Any], dtype: torch.dtype, count: int = 6, **rates: Any
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Returns the parameters after some steps of all members together, and of single members.

    rates: each a number, or N of them.
    """
    wide = [nn.Parameter(p) for p in numbers(0, dtype)]
    steps(
        getattr(optimizers, name)(wide, **options, **rates),
        list(wide),
        lambda k: numbers(1 + k, dtype),
        count,
    )
    alone = []
    for i in range(N):
        params = [nn.Parameter(p) for p in of_member(numbers(0, dtype), i)]
        member_rates = {k: v[i] if isinstance(v, list) else v for k, v in rates.items()}
        optimizer = TORCH[name](params, foreach=False, **options, **member_rates)
        steps(optimizer, list(params), lambda k, i=i: of_member(numbers(1 + k, dtype), i), count)  # type: ignore[misc]
        alone.append(list(params))
    return list(wide), alone  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
@pytest.mark.parametrize(
    "rates",
    [{"lr": LR}, {"lr": LR, "weight_decay": DECAY}, {"lr": 0.05, "weight_decay": DECAY}],
    ids=["lr", "both", "decay"],
)
def test_each_member_is_updated_as_alone(name: str, options: dict[str, Any], rates: dict[str, Any]) -> None:
    wide, alone = both(name, options, torch.float64, **rates)
    for k, p in enumerate(wide):
        torch.testing.assert_close(
            p, torch.stack([parameters[k] for parameters in alone]), rtol=1e-12, atol=1e-12
        )
        assert not torch.allclose(p, numbers(0)[k])


@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
def test_one_rate_for_all_members_equals_torch_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    wide, reference = ([nn.Parameter(p) for p in numbers(0)] for _ in range(2))
    steps(
        getattr(optimizers, name)(wide, lr=0.1, weight_decay=0.1, **options),
        list(wide),
        lambda k: numbers(1 + k),
        5,
    )
    steps(
        TORCH[name](reference, lr=0.1, weight_decay=0.1, foreach=False, **options),
        list(reference),
        lambda k: numbers(1 + k),
        5,
    )
    assert all(torch.equal(a, b) for a, b in zip(wide, reference))


def of_torch(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], closure: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters after six steps of all members together, and of single members, stacked."""

    def run(values: Callable[[int], list[Tensor]]) -> list[Tensor]:
        params: list[Tensor] = [nn.Parameter(p) for p in values(0)]
        optimizer = make(params)
        for k in range(6):
            for p, g in zip(params, values(1 + k), strict=True):
                p.grad = g
            if closure:
                optimizer.step(lambda: sum(float(p.detach().square().sum()) for p in params))
            else:
                optimizer.step()
        return [p.detach() for p in params]

    alone = [run(lambda k, i=i: of_member(numbers(k), i)) for i in range(N)]  # type: ignore[misc]
    return list(zip(run(numbers), map(torch.stack, zip(*alone))))


BY_NUMBER: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("NAdam", {"momentum_decay": 0.01}),
    ("RAdam", {"lr": 0.1}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Rprop", {}),
    ("ASGD", {"t0": 2.0}),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("name", "options"), BY_NUMBER, ids=[n for n, _ in BY_NUMBER])
def test_elementwise_optimizers_of_torch_update_each_member_as_alone(
    name: str, options: dict[str, Any], foreach: bool
) -> None:
    for k, (wide, alone) in enumerate(
        of_torch(lambda p: getattr(torch.optim, name)(p, foreach=foreach, **options))
    ):
        torch.testing.assert_close(wide, alone, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(wide, numbers(0)[k])


def test_optimizers_that_mix_the_members() -> None:
    """Optimizers with one norm, or one decision, over all members (docs/how-to/rates-per-member.md)."""

    def differ(pairs: list[tuple[Tensor, Tensor]]) -> bool:
        return not all(torch.allclose(a, b, rtol=1e-3) for a, b in pairs)

    assert differ(of_torch(lambda p: torch.optim.Adafactor(p, lr=0.1)))
    assert differ(of_torch(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1), closure=True))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon([nn.Parameter(numbers(0)[2])])

    wide = nn.Parameter(torch.zeros(3, 2))
    wide.grad = torch.tensor([[30.0, 40.0], [0.3, 0.4], [0.0, 0.0]])
    torch.nn.utils.clip_grad_norm_([wide], 1.0)
    # the norm of this member alone is 0.5, which is not clipped
    assert float(wide.grad[1].norm()) < 0.011

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD([wide], lr=1.0)
    scaler.scale(torch.zeros(()))
    wide.grad = torch.tensor([[torch.inf, 0.0], [1.0, 1.0], [1.0, 1.0]])
    scaler.step(optimizer)
    assert not wide.detach().any()


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.complex128, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 0.05)], ids=str
)
def test_other_dtypes(name: str, dtype: torch.dtype, bound: float) -> None:
    wide, alone = both(name, {}, dtype, lr=LR, weight_decay=DECAY)
    for k, p in enumerate(wide):
        assert p.dtype == dtype
        torch.testing.assert_close(
            p, torch.stack([parameters[k] for parameters in alone]), rtol=bound, atol=bound
        )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(1),
        nn.Linear(4 * 16, 3),
    )


class Transformer(nn.Module):
    """A transformer block and a head. The layers may be wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        nn.init.normal_(
            self.attention.in_proj_bias
        )  # the gradient of the keys' bias is rounding error, which Adam turns into steps

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))
        result: Tensor = self.head(x.mean(-2))
        return result


def widened(modules: list[nn.Module]) -> nn.Module:
    """Returns a copy of the first member in which wide layers replace its layers."""
    wide = copy.deepcopy(modules[0])
    for name, child in list(wide.named_children()):
        parts = [m.get_submodule(name) for m in modules]
        if isinstance(child, nn.Flatten):
            setattr(wide, name, nn.Flatten(2))
        elif list(child.parameters()):
            setattr(wide, name, getattr(primitives, f"Wide{type(child).__name__}").from_modules(parts))
    return wide


TWENTY: list[tuple[str, Any, tuple[int, ...], torch.dtype, float, dict[str, Any]]] = [
    (
        "SGD",
        cnn,
        (5, 2, 6, 6),
        torch.float32,
        1e-5,
        {"lr": [0.05, 0.01, 0.02], "momentum": 0.9, "weight_decay": [0.0, 1e-3, 1e-2]},
    ),
    (
        "SGD",
        Transformer,
        (4, 5, 8),
        torch.float32,
        1e-5,
        {"lr": [0.05, 0.01, 0.02], "momentum": 0.9, "weight_decay": [0.0, 1e-3, 1e-2]},
    ),
    (
        "Adam",
        cnn,
        (5, 2, 6, 6),
        torch.float64,
        1e-8,
        {"lr": [1e-2, 1e-3, 3e-3], "weight_decay": [1e-2, 0.0, 1e-3]},
    ),
    (
        "Adam",
        Transformer,
        (4, 5, 8),
        torch.float64,
        1e-8,
        {"lr": [1e-2, 1e-3, 3e-3], "weight_decay": [1e-2, 0.0, 1e-3]},
    ),
    ("AdamW", cnn, (5, 2, 6, 6), torch.float64, 1e-8, {"lr": [1e-2, 1e-3, 3e-3]}),
    (
        "AdamW",
        Transformer,
        (4, 5, 8),
        torch.float64,
        1e-8,
        {"lr": [1e-2, 1e-3, 3e-3], "weight_decay": [1e-2, 0.0, 0.3]},
    ),
]
"""The optimizer, the network, a member's input, the dtype, the bound, and a rate for each member."""
each_network = pytest.mark.parametrize(
    ("name", "make", "shape", "dtype", "bound", "rates"),
    TWENTY,
    ids=[f"{t[0]}-{t[1].__name__}" for t in TWENTY],
)


@each_network
def test_twenty_steps_equal_those_of_each_member_alone(
    name: str, make: Any, shape: Any, dtype: torch.dtype, bound: float, rates: dict[str, Any]
) -> None:
    twenty_steps(
        name, make, shape, dtype, bound, rates, lambda modules, _: widened(modules), lambda wide, x: wide(x)
    )


def twenty_steps(
    name: str,
    make: Any,
    shape: Any,
    dtype: torch.dtype,
    bound: float,
    rates: dict[str, Any],
    widen: Any,
    run: Any,
) -> None:
    modules = []
    for i in range(N):
        torch.manual_seed(i)
        modules.append(make().to(dtype))
    wide = widen(modules, torch.randn(shape).to(dtype))
    optimizer = getattr(optimizers, name)(wide.parameters(), **rates)
    optimizers_of_members = [
        TORCH[name](m.parameters(), **{k: v[i] if isinstance(v, list) else v for k, v in rates.items()})
        for i, m in enumerate(modules)
    ]
    g = torch.Generator().manual_seed(9)
    for _ in range(20):
        x, target = (
            torch.randn((N, *shape), generator=g).to(dtype),
            torch.randint(0, 3, (N, shape[0]), generator=g),
        )
        optimizer.zero_grad()
        y = run(wide, x)
        sum((nn.functional.cross_entropy(y[i], target[i]) for i in range(N)), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for i, m in enumerate(modules):
            optimizers_of_members[i].zero_grad()
            nn.functional.cross_entropy(m(x[i]), target[i]).backward()  # type: ignore[no-untyped-call]
            optimizers_of_members[i].step()
    for key, p in wide.named_parameters():
        torch.testing.assert_close(
            p, torch.stack([m.get_parameter(key) for m in modules]), rtol=bound, atol=bound
        )
    for key, b in wide.named_buffers():
        torch.testing.assert_close(
            b, torch.stack([m.get_buffer(key) for m in modules]), rtol=bound, atol=bound
        )


@pytest.mark.parametrize("name", TORCH)
def test_a_run_continues_from_its_state_dict(name: str) -> None:
    """A new optimizer gets the stored rates from a file that torch reads without running code."""
    rates: dict[str, Any] = {
        "lr": LR,
        "weight_decay": torch.tensor(DECAY),
        **({"momentum": 0.9} if name == "SGD" else {"amsgrad": True}),
    }
    uninterrupted = [nn.Parameter(p) for p in numbers(0)]
    steps(getattr(optimizers, name)(uninterrupted, **rates), list(uninterrupted), lambda k: numbers(1 + k), 6)
    params = [nn.Parameter(p) for p in numbers(0)]
    first = getattr(optimizers, name)(params, **rates)
    steps(first, list(params), lambda k: numbers(1 + k), 3)
    state = first.state_dict()
    assert state["param_groups"][0]["lr"] == LR
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second = getattr(optimizers, name)(params, lr=[1.0] * N)
    second.load_state_dict(torch.load(file, weights_only=True))
    for other in (second, copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert other.param_groups[0]["lr"] == PerMember(LR)
    steps(second, list(params), lambda k: numbers(1 + k), 3, first=3)
    for a, b in zip(params, uninterrupted):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", TORCH)
def test_state_dicts_are_exchanged_with_torchs_optimizers(name: str) -> None:
    wide, reference = ([nn.Parameter(p) for p in numbers(0)] for _ in range(2))
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    one, other = (
        getattr(optimizers, name)(wide, lr=0.1, **options),
        TORCH[name](reference, lr=0.1, foreach=False, **options),
    )
    steps(other, list(reference), lambda k: numbers(1 + k), 3)
    for a, b in zip(wide, reference):
        a.data.copy_(b)
    one.load_state_dict(copy.deepcopy(other.state_dict()))  # torch does not copy the state that it loads
    steps(one, list(wide), lambda k: numbers(4 + k), 3)
    steps(other, list(reference), lambda k: numbers(4 + k), 3)
    assert all(torch.equal(a, b) for a, b in zip(wide, reference))
    back = TORCH[name](reference, lr=0.2, **options)
    back.load_state_dict(one.state_dict())
    assert back.param_groups[0]["lr"] == 0.1 and set(back.state[reference[0]]) == set(
        other.state[reference[0]]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.001),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    ],
)
def test_schedulers_change_every_rate(make: Any) -> None:
    params = [nn.Parameter(p) for p in numbers(0)]
    optimizer = optimizers.SGD(params, lr=LR)
    scheduler = make(optimizer)
    references = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=r) for r in LR]
    reference_schedules = [make(o) for o in references]
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        for o, s in zip(references, reference_schedules):
            o.step()
            s.step()
        assert list(optimizer.param_groups[0]["lr"]) == pytest.approx(
            [o.param_groups[0]["lr"] for o in references]
        )
    file = io.BytesIO()
    torch.save({k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["base_lrs"] == [PerMember(LR)]


@pytest.mark.parametrize("lr", [0.1, LR], ids=["one rate", "a rate a member"])
def test_a_factor_for_each_member_equals_a_schedule_for_each_member(lr: Any) -> None:
    """Compares LambdaLR with a PerMember (docs/how-to/migrate.md) with N optimizers and N schedulers."""
    factors = [0.9, 0.5, 0.1][:N]
    assert len(factors) == N

    def schedule(optimizer: torch.optim.Optimizer, factor: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: factor(k))

    wide = [nn.Parameter(p) for p in numbers(0)]
    ours = optimizers.AdamW(wide, lr=lr)
    moved = schedule(ours, lambda k: PerMember([f**k for f in factors]))
    alone = [[nn.Parameter(p) for p in of_member(numbers(0), i)] for i in range(N)]
    references = [
        torch.optim.AdamW(parameters, lr=lr[i] if isinstance(lr, list) else lr, foreach=False)
        for i, parameters in enumerate(alone)
    ]
    schedules = [schedule(o, lambda k, f=f: f**k) for o, f in zip(references, factors)]
    for step in range(4):
        steps(ours, list(wide), lambda k: numbers(1 + k), 1, step)
        moved.step()
        for i, (o, s) in enumerate(zip(references, schedules)):
            steps(o, list(alone[i]), lambda k, i=i: of_member(numbers(1 + k), i), 1, step)  # type: ignore[misc]
            s.step()
        assert list(ours.param_groups[0]["lr"]) == pytest.approx(
            [o.param_groups[0]["lr"] for o in references]
        )
    for i in range(N):
        for w, parameters in zip(wide, alone[i]):
            torch.testing.assert_close(w[i], parameters, rtol=1e-12, atol=1e-12)


def test_groups_hooks_and_closures() -> None:
    weight, shared = nn.Parameter(numbers(0)[1]), nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = optimizers.Adam([{"params": [weight], "lr": LR}, {"params": [shared]}], lr=0.5)
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum() + shared.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    before = weight.detach().clone()
    first = optimizer.step(closure)
    each = torch.tensor(LR, dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(
        (before - weight).abs(), each.expand(N, 4), rtol=1e-6, atol=0
    )  # the length of Adam's first step is its rate
    torch.testing.assert_close(shared, torch.full((5,), 0.5, dtype=torch.float64), rtol=1e-6, atol=0)
    assert float(optimizer.step(closure)) < float(first) and seen == [1, 1]
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.zeros(N, 2))], "lr": torch.tensor(LR), "weight_decay": 0.1}
    )
    assert len(optimizer.param_groups) == 3
    assert optimizer.param_groups[2]["lr"] == PerMember(torch.tensor(LR).tolist())


def test_a_shared_weight_of_a_fused_module_needs_one_rate() -> None:
    """A parameter whose first axis has length N can also be shared."""
    models = [nn.Sequential(nn.Linear(4, N), nn.ReLU(), nn.Linear(N, 2)) for _ in range(N)]
    for m in models[1:]:
        m[0].load_state_dict(models[0][0].state_dict())
    fused = fuse(models, torch.randn(2, 4), share=["0.*"], validate=False)
    with pytest.raises(
        UsageError, match=r"0.weight is \[3, 4\], one weight for all members. Put it in a group"
    ):
        optimizers.SGD(fused.named_parameters(), lr=LR)
    stacked = [p for n, p in fused.named_parameters() if n.startswith("2.")]
    shared = [p for n, p in fused.named_parameters() if n.startswith("0.")]
    optimizer = optimizers.SGD([{"params": stacked, "lr": LR}, {"params": shared}], lr=0.1)
    before = [p.detach().clone() for p in (*stacked, *shared)]
    y = fused(torch.randn(5, 4))
    y.square().sum().backward()
    optimizer.step()
    each, one = torch.tensor(LR), torch.tensor(0.1)
    for p, b, rate in zip((*stacked, *shared), before, (each.reshape(N, 1, 1), each.reshape(N, 1), one, one)):
        assert p.grad is not None
        torch.testing.assert_close(p, b - rate * p.grad)


@pytest.mark.slow
@each_network
def test_twenty_steps_of_a_fused_module_equal_those_of_each_member_alone(
    name: str, make: Any, shape: Any, dtype: torch.dtype, bound: float, rates: dict[str, Any]
) -> None:
    twenty_steps(
        name,
        make,
        shape,
        dtype,
        bound,
        rates,
        lambda modules, x: fuse(modules, x, validate=False),
        lambda wide, x: wide.each(x),
    )


def test_messages_name_the_refused_value() -> None:
    weight, shared = nn.Parameter(torch.zeros(N, 2)), nn.Parameter(torch.zeros(5))
    for make, words in (
        (
            lambda: optimizers.SGD([weight, shared], lr=LR),
            "SGD: lr has 3 numbers, one for each member, and parameter 1 of its group is [5], "
            "whose axis 0 has 5",
        ),
        (
            lambda: optimizers.AdamW([("a", weight), ("trunk.weight", shared)], weight_decay=DECAY),
            "trunk.weight is [5]",
        ),
        (lambda: optimizers.Adam([nn.Parameter(torch.tensor(1.0))], lr=LR), "is []"),
        (
            lambda: optimizers.SGD([weight], lr=[0.1, 0.2]),
            "whose axis 0 has 3. If this is the member axis, give 3",
        ),
        (
            lambda: optimizers.SGD([weight], lr=LR, weight_decay=[0.1, 0.2]),
            "lr has 3 numbers, weight_decay has 2 numbers",
        ),
        (
            lambda: optimizers.SGD([weight], lr=[0.1, -1, 0.2]),
            "SGD: lr is -1 for member 1; it cannot be below zero",
        ),
        (lambda: optimizers.SGD([weight], lr=float("nan")), "SGD: lr is nan"),
        (lambda: optimizers.SGD([weight], lr="0.1"), "give a number, or a sequence, array or tensor [N]"),
        (lambda: optimizers.SGD([weight], lr=[]), "give a number"),
        (lambda: optimizers.SGD([weight], nesterov=True), "nesterov needs a momentum"),
        (lambda: optimizers.Adam([weight], betas=(0.9, 1.0)), "betas are (0.9, 1.0)"),
        (lambda: optimizers.Adam([weight], eps=-1.0), "eps is -1.0"),
    ):
        with pytest.raises(UsageError) as found:
            make()
        assert words in str(found.value) and "\n" not in str(found.value)
    optimizer = optimizers.SGD([weight], lr=LR)
    with pytest.raises(UsageError, match="whose axis 0 has 3"):
        optimizer.load_state_dict(
            {
                **optimizer.state_dict(),
                "param_groups": [{**optimizer.state_dict()["param_groups"][0], "lr": [0.1] * 4}],
            }
        )
    with pytest.raises(UsageError, match="whose axis 0 has 5"):
        optimizer.add_param_group({"params": [shared]})
    assert len(optimizer.param_groups) == 1
    assert widepack.optim.optimizers is optimizers
    with pytest.raises(UsageError, match="rates of 3 members and of 2 cannot be combined"):
        _ = PerMember(LR) * PerMember([1, 2])
