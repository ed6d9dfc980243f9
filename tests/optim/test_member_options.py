"""Compares options, schedulers and clipping for each member with torch, member by member."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import widepack
from widepack import UsageError, fuse
from widepack.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    PerMember,
    PerMemberScheduler,
    RMSprop,
    clip_grad_norm_,
)

N = 3
LR = [0.1, 0.02, 0.5]
SHAPES = ((), (4,), (2, 3))


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns random tensors `[N, *shape]`, one for each shape."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn((N, *s), generator=g, dtype=dtype) for s in SHAPES]


def move(optimizer: torch.optim.Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()


def of_member(option: Any, i: int) -> Any:
    """Returns member i's value of an option."""
    if isinstance(option, tuple):
        return tuple(of_member(part, i) for part in option)
    return option[i] if isinstance(option, list) else option


OPTIONS: list[tuple[Any, Any, dict[str, Any]]] = [
    (Adam, torch.optim.Adam, {"lr": 0.1, "betas": ([0.9, 0.5, 0.0], 0.999)}),
    (Adam, torch.optim.Adam, {"lr": LR, "betas": (0.9, [0.999, 0.9, 0.5]), "amsgrad": True}),
    (
        Adam,
        torch.optim.Adam,
        {"lr": LR, "eps": [1e-8, 1e-3, 0.1], "betas": ([0.9, 0.5, 0.1], [0.9, 0.7, 0.99])},
    ),
    (AdamW, torch.optim.AdamW, {"lr": LR, "weight_decay": [0.1, 0.0, 0.2], "betas": ([0.9, 0.8, 0.7], 0.99)}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": [0.9, 0.0, 0.5], "dampening": 0.3}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": [0.1, 0.0, 0.5]}),
    (SGD, torch.optim.SGD, {"lr": LR, "momentum": [0.9, 0.0, 0.5], "dampening": [0.1, 0.2, 0.5]}),
    (SGD, torch.optim.SGD, {"lr": LR, "momentum": [0.9, 0.1, 0.5], "nesterov": True, "weight_decay": 0.1}),
    (Adadelta, torch.optim.Adadelta, {"lr": LR, "rho": [0.9, 0.5, 0.95], "weight_decay": [0.0, 0.1, 0.2]}),
    (Adadelta, torch.optim.Adadelta, {"eps": [1e-6, 1e-3, 0.1], "maximize": True}),
    (RMSprop, torch.optim.RMSprop, {"lr": LR, "alpha": [0.9, 0.5, 0.99], "momentum": [0.9, 0.0, 0.5]}),
    (RMSprop, torch.optim.RMSprop, {"eps": [1e-8, 1e-3, 0.1], "centered": True, "alpha": [0.9, 0.5, 0.99]}),
    (RMSprop, torch.optim.RMSprop, {"lr": LR, "weight_decay": [0.1, 0.0, 0.2], "centered": True}),
    (Adagrad, torch.optim.Adagrad, {"lr": LR, "lr_decay": [0.1, 0.0, 0.5], "weight_decay": [0.0, 0.1, 0.2]}),
    (Adagrad, torch.optim.Adagrad, {"initial_accumulator_value": [0.0, 0.5, 2.0], "eps": [1e-10, 1e-3, 0.1]}),
    (Adamax, torch.optim.Adamax, {"lr": LR, "betas": ([0.9, 0.5, 0.1], [0.9, 0.7, 0.99])}),
    (Adamax, torch.optim.Adamax, {"lr": 0.1, "eps": [1e-8, 1e-3, 0.1], "weight_decay": [0.1, 0.0, 0.2]}),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ours", "torchs", "options"), OPTIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_each_member_moves_by_its_own_options(
    ours: Any, torchs: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    together: list[Tensor] = [nn.Parameter(p) for p in numbers(0, dtype)]
    optimizer = ours(together, **options)
    for k in range(6):
        move(optimizer, together, numbers(1 + k, dtype))
    for i in range(N):
        alone: list[Tensor] = [nn.Parameter(p[i].clone()) for p in numbers(0, dtype)]
        own = torchs(alone, foreach=False, **{k: of_member(v, i) for k, v in options.items()})
        for k in range(6):
            move(own, alone, [g[i] for g in numbers(1 + k, dtype)])
        bound = 0.1 if dtype == torch.bfloat16 else 1e-12
        for p, a in zip(together, alone):
            assert p.dtype == dtype
            torch.testing.assert_close(p[i], a, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "make",
    [tuple, numpy.array, torch.tensor, lambda v: list(numpy.array(v)), lambda v: list(torch.tensor(v))],
    ids=["tuple", "array", "tensor", "list of NumPy numbers", "list of tensors"],
)
def test_options_may_be_arrays_and_tensors(make: Any) -> None:
    params = [nn.Parameter(p) for p in numbers(0)]
    optimizer = Adam(
        params, lr=make([0.5, 0.25, 2.0]), betas=(make([0.5, 0.25, 0.0]), 0.5), eps=make([1, 2, 3])
    )
    group = optimizer.param_groups[0]
    assert group["lr"] == PerMember([0.5, 0.25, 2.0])
    assert group["betas"] == (PerMember([0.5, 0.25, 0.0]), 0.5)
    assert group["eps"] == PerMember([1, 2, 3])
    scheduler = PerMemberScheduler(optimizer, lambda o, i: lr_scheduler.ReduceLROnPlateau(o, patience=0))
    for metrics in ([1.0, 2.0, 3.0], [0.5, 2.0, 3.0]):
        scheduler.step(make(metrics))
    assert list(group["lr"]) == pytest.approx([0.5, 0.025, 0.2])


def test_one_option_may_be_a_numpy_number() -> None:
    group = SGD(
        [nn.Parameter(p) for p in numbers(0)], lr=numpy.float32(0.5), momentum=numpy.int64(0)
    ).param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.0)
    assert type(group["lr"]) is type(group["momentum"]) is float


@pytest.mark.parametrize("lr", [numpy.array([[0.1] * 3] * 2), [torch.ones(2)] * 3, numpy.array([True] * 3)])
def test_arrays_that_are_not_one_number_a_member_are_refused(lr: Any) -> None:
    with pytest.raises(UsageError, match=r"a sequence, array or tensor \[N\]"):
        Adam([nn.Parameter(p) for p in numbers(0)], lr=lr)


def test_adadelta_of_one_rate_equals_torch_bit_for_bit() -> None:
    one, other = ([nn.Parameter(p) for p in numbers(0)] for _ in range(2))
    ours, torchs = (
        Adadelta(one, weight_decay=0.1),
        torch.optim.Adadelta(other, weight_decay=0.1, foreach=False),
    )
    for k in range(4):
        move(ours, list(one), numbers(1 + k))
        move(torchs, list(other), numbers(1 + k))
    assert all(torch.equal(a, b) for a, b in zip(one, other))
    torchs.load_state_dict(ours.state_dict())  # the states have torch's names


def test_betas_of_members_are_lists_in_a_state_dict() -> None:
    params = [nn.Parameter(p) for p in numbers(0)]
    optimizer = Adam(params, betas=([0.9, 0.5, 0.1], 0.99))
    move(optimizer, list(params), numbers(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["param_groups"][0]["betas"] == ([0.9, 0.5, 0.1], 0.99)
    other = Adam(params)
    other.load_state_dict(state)
    assert other.param_groups[0]["betas"] == (PerMember([0.9, 0.5, 0.1]), 0.99)


SCHEDULES: list[tuple[str, Any]] = [
    ("step", lambda o, i: lr_scheduler.StepLR(o, [1, 2, 3][i], [0.5, 0.1, 0.9][i])),
    ("cosine", lambda o, i: lr_scheduler.CosineAnnealingLR(o, [4, 8, 16][i])),
    ("lambda", lambda o, i: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k + i))),
    ("one cycle", lambda o, i: lr_scheduler.OneCycleLR(o, [0.1, 0.2, 0.3][i], total_steps=12)),
    (
        "sequential",
        lambda o, i: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2 + i]
        ),
    ),
]


@pytest.mark.parametrize(("name", "make"), SCHEDULES, ids=[n for n, _ in SCHEDULES])
@pytest.mark.parametrize("lr", [0.3, LR], ids=["one rate", "a rate a member"])
def test_each_member_has_its_own_schedule(name: str, make: Any, lr: Any) -> None:
    params = [nn.Parameter(p) for p in numbers(0)]
    optimizer = Adam(params, lr=lr)
    scheduler = PerMemberScheduler(optimizer, make)
    alone = [torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=of_member(lr, i)) for i in range(N)]
    own = [make(o, i) for i, o in enumerate(alone)]
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        for o, s in zip(alone, own):
            o.step()
            s.step()
        group = optimizer.param_groups[0]
        for i, o in enumerate(alone):
            rate = group["lr"][i] if isinstance(group["lr"], PerMember) else group["lr"]
            beta = group["betas"][0][i] if isinstance(group["betas"][0], PerMember) else group["betas"][0]
            assert (rate, beta) == pytest.approx((o.param_groups[0]["lr"], o.param_groups[0]["betas"][0]))
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def plateau(optimizer: torch.optim.Optimizer, i: int = 0) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def test_a_plateau_of_one_member_reduces_its_rate_only() -> None:
    params = [nn.Parameter(p) for p in numbers(0)]
    optimizer = SGD(params, lr=0.1)
    scheduler = PerMemberScheduler(optimizer, plateau)
    alone = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(N)]
    own = [plateau(o) for o in alone]
    losses = [[1.0, 1.0, 1.0], [1.0, 0.9, 1.0], [1.0, 0.8, 0.5], [1.0, 0.7, 0.6], [float("nan"), 0.6, 0.7]]
    for k, row in enumerate(losses):
        scheduler.step(torch.tensor(row) if k % 2 else row)
        for s, value in zip(own, row):
            s.step(value)
        if k == 2:
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    assert list(optimizer.param_groups[0]["lr"]) == pytest.approx([o.param_groups[0]["lr"] for o in alone])
    assert optimizer.param_groups[0]["lr"] == PerMember([0.025, 0.1, 0.05])

    again = SGD(params, lr=0.1)
    resumed = PerMemberScheduler(again, plateau)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for row in losses[3:]:
        resumed.step(row)
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_groups_of_shared_weights_keep_their_rate() -> None:
    models = [nn.Sequential(nn.Linear(4, N), nn.ReLU(), nn.Linear(N, 2)) for _ in range(N)]
    for m in models[1:]:
        m[0].load_state_dict(models[0][0].state_dict())
    fused = fuse(models, torch.randn(2, 4), share=["0.*"], validate=False)
    own = [p for n, p in fused.named_parameters() if n.startswith("2.")]
    shared = [p for n, p in fused.named_parameters() if n.startswith("0.")]
    with pytest.raises(UsageError, match="every group of the optimizer has a weight without a member axis"):
        PerMemberScheduler(SGD(fused.parameters(), lr=0.1), plateau)
    optimizer = SGD([{"params": own}, {"params": shared}], lr=0.1)
    scheduler = PerMemberScheduler(optimizer, plateau)
    for _ in range(3):
        scheduler.step([1.0, 1.0 / (1 + scheduler.schedulers[1].last_epoch), 1.0])
    assert scheduler.get_last_lr() == [PerMember([0.05, 0.1, 0.05]), 0.1]
    fused(torch.randn(2, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"parameter 0, \[3, 4\], is one weight for all members"):
        clip_grad_norm_(fused.parameters(), 1.0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
@pytest.mark.parametrize("most", [1.0, [0.5, 100.0, 2.0]], ids=["one", "each"])
def test_gradients_are_clipped_by_each_members_own_norm(norm_type: float, most: Any) -> None:
    params = [nn.Parameter(p) for p in numbers(0)]
    unused = nn.Parameter(torch.zeros(N, 2))
    gradients = numbers(5)
    for g in gradients:
        g[1] *= 1e-3
    for p, g in zip(params, gradients):
        p.grad = g.clone()
    norms = clip_grad_norm_([*params, unused], most, norm_type)
    for i in range(N):
        alone = [nn.Parameter(p[i].clone()) for p in numbers(0)]
        for p, g in zip(alone, gradients):
            p.grad = g[i].clone()
        norm = torch.nn.utils.clip_grad_norm_(alone, of_member(most, i), norm_type)
        torch.testing.assert_close(norms[i], norm)
        for p, a in zip(params, alone):
            assert p.grad is not None and a.grad is not None
            torch.testing.assert_close(p.grad[i], a.grad)


def test_a_norm_that_is_not_finite_reaches_no_other_member() -> None:
    p = nn.Parameter(torch.zeros(3, 2))
    gradient = torch.tensor([[torch.inf, 0.0], [3.0, 4.0], [torch.nan, 1.0]])
    p.grad = gradient.clone()
    with pytest.raises(
        UsageError, match=r"the norm of member 0 is inf, and 1 others are not finite; no grad"
    ):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert torch.equal(p.grad.nan_to_num(7), gradient.nan_to_num(7))
    norms = clip_grad_norm_(p, 1.0)
    torch.testing.assert_close(p.grad[1], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    assert norms[1] == 5.0
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0).shape == (0,)


@pytest.mark.parametrize("switch", ["maximize", "amsgrad", "nesterov", "centered", "decoupled_weight_decay"])
@pytest.mark.parametrize("value", [[True, False, True], torch.tensor([True, False]), "yes"], ids=str)
def test_a_switch_is_one_for_all_members(switch: str, value: Any) -> None:
    classes = {"nesterov": SGD, "centered": RMSprop, "decoupled_weight_decay": widepack.optim.NAdam}
    make: Any = classes.get(switch, Adam)
    with pytest.raises(UsageError, match=f"{switch} is .*; it is True or False for all members"):
        make([nn.Parameter(p) for p in numbers(0)], **{switch: value})
    with pytest.raises(UsageError, match=f"{switch} is .*; it is True or False for all members"):
        make([{"params": [nn.Parameter(torch.zeros(N))], switch: value}])
    of_numpy: Any = numpy.bool_(True)
    assert make([nn.Parameter(torch.zeros(N))], maximize=of_numpy).param_groups[0]["maximize"]


def test_messages() -> None:
    weight = nn.Parameter(torch.zeros(N, 2))
    weight.grad = torch.ones(N, 2)
    optimizer = SGD([weight], lr=LR)
    calls: list[tuple[Any, str]] = [
        (lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), ""),
        (
            lambda: Adam([weight], betas=(0.9,)),  # type: ignore[arg-type]
            "betas are (0.9,); give a pair",
        ),
        (lambda: Adam([weight], betas=([0.9, 1.0, 0.5], 0.9)), "each must be at least 0 and below 1"),
        (lambda: Adam([weight], betas=([0.9, 0.5], 0.9)), "betas has 2 numbers, one for each member"),
        (lambda: Adadelta([weight], rho=1.5), "rho is 1.5"),
        (lambda: SGD([weight], momentum=[0.9, 0.0, 0.1], nesterov=True), "nesterov needs a momentum above"),
        (lambda: clip_grad_norm_([weight], [1.0, 2.0]), "give a number of at least 0, or 3 of them"),
        (lambda: clip_grad_norm_([weight], -1.0), "max_norm is -1.0"),
        (lambda: clip_grad_norm_([weight], "a"), "max_norm is 'a'"),  # type: ignore[arg-type]
        (
            lambda: PerMemberScheduler(torch.optim.SGD([weight]), plateau),  # type: ignore[arg-type]
            "has one rate for all members; use an optimizer of widepack.optim",
        ),
        (
            lambda: PerMemberScheduler(SGD([weight, nn.Parameter(torch.zeros(5, 2))]), plateau),
            "the number of members is not known",
        ),
        (
            lambda: PerMemberScheduler(optimizer, plateau).step([1.0, 2.0]),
            "there are 2 numbers for 3 members",
        ),
        (
            lambda: PerMemberScheduler(optimizer, plateau).load_state_dict({"schedulers": [{}]}),
            "the state has schedulers of 1 members, and the optimizer has 3",
        ),
    ]
    for make, words in calls:
        if not words:
            scheduler = make()
            with pytest.raises(UsageError, match=r"widepack.optim.PerMemberScheduler\(optimizer"):
                for _ in range(3):
                    scheduler.step(1.0)
            continue
        with pytest.raises(UsageError) as found:
            make()
        assert words in str(found.value) and "\n" not in str(found.value)
    assert widepack.optim.PerMember(LR)[1] == 0.02


def test_states_and_steps_of_other_forms_are_refused() -> None:
    optimizer = SGD([nn.Parameter(p) for p in numbers(0)], lr=LR)
    scheduler = PerMemberScheduler(optimizer, plateau)
    steps = PerMemberScheduler(optimizer, lambda o, i: lr_scheduler.CosineAnnealingLR(o, 4))
    other: Any = torch.zeros(1)
    named: Any = {"a": other}
    calls: list[tuple[Any, str]] = [
        (lambda: optimizer.load_state_dict({}), "SGD.load_state_dict: the state has nothing, and a state of"),
        (lambda: optimizer.load_state_dict({"weight": other}), "the state has 'weight', and a state of an"),
        (lambda: optimizer.load_state_dict(other), "give what its state_dict() returned"),
        (lambda: scheduler.load_state_dict({}), "the state has no list 'schedulers'"),
        (scheduler.step, "ReduceLROnPlateau of member 0 needs a number for each member"),
        (lambda: clip_grad_norm_(named, 1.0), "parameters is a dict; give a tensor, or tensors as"),
        (lambda: clip_grad_norm_(nn.Linear(2, 2), 1.0), "parameters is a Linear"),  # type: ignore[arg-type]
        (lambda: clip_grad_norm_(["a"], 1.0), "parameters has a str"),  # type: ignore[list-item]
        (lambda: clip_grad_norm_(2.0, 1.0), "parameters is a float"),  # type: ignore[arg-type]
        (lambda: clip_grad_norm_([], 1.0, "two"), "norm_type is 'two'; give a number such as 2.0, or 'inf'"),
    ]
    for call, words in calls:
        with pytest.raises(UsageError) as found:
            call()
        assert words in str(found.value) and "\n" not in str(found.value)
    steps.step()
    assert optimizer.param_groups[0]["lr"] == PerMember(LR) * ((1 + 0.5**0.5) / 2)


def test_the_norm_may_be_the_text_inf() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.tensor([[1.0, -3.0], [2.0, 0.0]])
    assert clip_grad_norm_([p], 10.0, "inf").tolist() == [3.0, 2.0]


@pytest.mark.parametrize(
    "rates", [[0.1, 0.02, 0.5], (0.1, 0.02, 0.5), torch.tensor(LR), numpy.array(LR), PerMember(LR)], ids=type
)
def test_rates_that_are_set_by_hand(rates: Any) -> None:
    """As a warm-up loop sets them. They are taken as those at construction are."""
    ours, own = [p.requires_grad_() for p in numbers(0)], [p.requires_grad_() for p in numbers(0)]
    by_hand, given = Adam(ours, lr=1.0), Adam(own, lr=LR)
    for k in range(3):
        by_hand.param_groups[0]["lr"] = rates
        for optimizer, params in ((by_hand, ours), (given, own)):
            move(optimizer, params, numbers(k + 1))
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rates", ["0.1", [0.1, 0.2], [0.1, -1.0, 0.2]])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_wrong_rates_that_are_set_by_hand_change_nothing(kind: Any, rates: Any) -> None:
    params = [p.requires_grad_() for p in numbers(0)]
    optimizer = kind(params, lr=LR)
    move(optimizer, params, numbers(1))
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    optimizer.param_groups[0]["lr"] = rates
    with pytest.raises(UsageError, match="lr"):
        move(optimizer, params, numbers(2))
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(before[1][key][name]))
