"""Tests the forms of options for each member: parameter groups, switches, messages."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import widepack
from optim.stepping import DECAY, LR, N, numbers, parameters, steps
from widepack import UsageError, fuse
from widepack.optim import (
    SGD,
    Adam,
    AdamW,
    PerMember,
    PerMemberScheduler,
    RAdam,
    RMSprop,
    Rprop,
)


@pytest.mark.parametrize(
    "make",
    [tuple, numpy.array, torch.tensor, lambda v: list(numpy.array(v)), lambda v: list(torch.tensor(v))],
    ids=["tuple", "array", "tensor", "list of NumPy numbers", "list of tensors"],
)
def test_options_may_be_arrays_and_tensors(make: Any) -> None:
    params = parameters()
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
    group = SGD(parameters(), lr=numpy.float32(0.5), momentum=numpy.int64(0)).param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.0)
    assert type(group["lr"]) is type(group["momentum"]) is float


@pytest.mark.parametrize("lr", [numpy.array([[0.1] * 3] * 2), [torch.ones(2)] * 3, numpy.array([True] * 3)])
def test_arrays_that_are_not_one_number_a_member_are_refused(lr: Any) -> None:
    with pytest.raises(UsageError, match=r"a sequence, array or tensor \[N\]"):
        Adam(parameters(), lr=lr)


@pytest.mark.parametrize("switch", ["maximize", "amsgrad", "nesterov", "centered", "decoupled_weight_decay"])
@pytest.mark.parametrize("value", [[True, False, True], torch.tensor([True, False]), "yes"], ids=str)
def test_a_switch_is_one_for_all_members(switch: str, value: Any) -> None:
    classes = {"nesterov": SGD, "centered": RMSprop, "decoupled_weight_decay": widepack.optim.NAdam}
    make: Any = classes.get(switch, Adam)
    with pytest.raises(UsageError, match=f"{switch} is .*; it is True or False for all members"):
        make(parameters(), **{switch: value})
    with pytest.raises(UsageError, match=f"{switch} is .*; it is True or False for all members"):
        make([{"params": [nn.Parameter(torch.zeros(N))], switch: value}])
    of_numpy: Any = numpy.bool_(True)
    assert make([nn.Parameter(torch.zeros(N))], maximize=of_numpy).param_groups[0]["maximize"]


@pytest.mark.parametrize(
    "rates", [[0.1, 0.02, 0.5], (0.1, 0.02, 0.5), torch.tensor(LR), numpy.array(LR), PerMember(LR)], ids=type
)
def test_rates_that_are_set_by_hand(rates: Any) -> None:
    """As a warm-up loop sets them. They are taken as those at construction are."""
    ours, own = parameters(), parameters()
    by_hand, given = Adam(ours, lr=1.0), Adam(own, lr=LR)
    for k in range(3):
        by_hand.param_groups[0]["lr"] = rates
        for optimizer, params in ((by_hand, ours), (given, own)):
            steps(optimizer, params, 1, k)
    for a, b in zip(ours, own, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rates", ["0.1", [0.1, 0.2], [0.1, -1.0, 0.2]])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_wrong_rates_that_are_set_by_hand_change_nothing(kind: Any, rates: Any) -> None:
    params = parameters()
    optimizer = kind(params, lr=LR)
    steps(optimizer, params, 1)
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    optimizer.param_groups[0]["lr"] = rates
    with pytest.raises(UsageError, match="lr"):
        steps(optimizer, params, 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(before[1][key][name]))


def test_groups_hooks_and_closures() -> None:
    weight, shared = nn.Parameter(numbers(0)[1]), nn.Parameter(torch.ones(5, dtype=torch.float64))
    optimizer = Adam([{"params": [weight], "lr": LR}, {"params": [shared]}], lr=0.5)
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
        SGD(fused.named_parameters(), lr=LR)
    stacked = [p for n, p in fused.named_parameters() if n.startswith("2.")]
    shared = [p for n, p in fused.named_parameters() if n.startswith("0.")]
    optimizer = SGD([{"params": stacked, "lr": LR}, {"params": shared}], lr=0.1)
    before = [p.detach().clone() for p in (*stacked, *shared)]
    y = fused(torch.randn(5, 4))
    y.square().sum().backward()
    optimizer.step()
    each, one = torch.tensor(LR), torch.tensor(0.1)
    for p, b, rate in zip((*stacked, *shared), before, (each.reshape(N, 1, 1), each.reshape(N, 1), one, one)):
        assert p.grad is not None
        torch.testing.assert_close(p, b - rate * p.grad)


def test_rates_of_another_number_than_the_members() -> None:
    fused = widepack.fuse([nn.Linear(4, 3) for _ in range(4)], torch.randn(5, 4))
    with pytest.raises(
        UsageError, match="lr has 3 numbers, .* of 4 members. Give 4 numbers, or one"
    ) as found:
        SGD(fused.parameters(), lr=LR)
    assert "group with" not in str(found.value)
    SGD(fused.parameters(), lr=[*LR, 0.1])
    SGD(fused.parameters(), lr=0.1)


WEIGHT, SHARED = nn.Parameter(torch.zeros(N, 2)), nn.Parameter(torch.zeros(5))
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("SGD", {"lr": [0.1, 0.2]}, "whose axis 0 has 3. If this is the member axis, give 3"),
    ("SGD", {"lr": LR, "weight_decay": [0.1, 0.2]}, "lr has 3 numbers, weight_decay has 2 numbers"),
    ("SGD", {"lr": [0.1, -1, 0.2]}, "SGD: lr is -1 for member 1; it cannot be below zero"),
    ("SGD", {"lr": float("nan")}, "SGD: lr is nan"),
    ("SGD", {"lr": "0.1"}, "give a number, or a sequence, array or tensor [N]"),
    ("SGD", {"lr": []}, "give a number"),
    ("SGD", {"nesterov": True}, "nesterov needs a momentum"),
    ("SGD", {"momentum": [0.9, 0.0, 0.1], "nesterov": True}, "nesterov needs a momentum above"),
    ("Adam", {"betas": (0.9, 1.0)}, "betas are (0.9, 1.0)"),
    ("Adam", {"betas": (0.9,)}, "betas are (0.9,); give a pair"),
    ("Adam", {"betas": ([0.9, 1.0, 0.5], 0.9)}, "each must be at least 0 and below 1"),
    ("Adam", {"betas": ([0.9, 0.5], 0.9)}, "betas has 2 numbers, one for each member"),
    ("Adam", {"eps": -1.0}, "eps is -1.0"),
    ("Adadelta", {"rho": 1.5}, "rho is 1.5"),
    ("Adamax", {"eps": [1e-8, 0.0, 1e-3]}, "eps is PerMember([1e-08, 0.0, 0.001]); it must be above 0"),
    ("NAdam", {"betas": (0.9, 1.0)}, "NAdam: betas are (0.9, 1.0); each must be at least 0"),
    ("NAdam", {"momentum_decay": [0.1, 0.2]}, "whose axis 0 has 3. If this is the member axis, give 3"),
    ("RAdam", {"eps": -1.0}, "RAdam: eps is -1.0"),
    (
        "Rprop",
        {"etas": (1.2, 0.5)},
        "Rprop: etas are (1.2, 0.5); the first must be between 0 and 1",
    ),
    ("Rprop", {"etas": ([0.5, 1.0, 0.5], 1.2)}, "the first must be between 0 and 1"),
    ("Rprop", {"etas": 0.5}, "Rprop: etas are 0.5; give a pair"),
    ("Rprop", {"step_sizes": (0.1, [1.0, 0.05, 1.0])}, "the first cannot be above the second"),
    ("ASGD", {"t0": [1.0, -1.0, 2.0]}, "ASGD: t0 is -1.0 for member 1"),
    ("ASGD", {"lr": LR, "alpha": [1.0, 2.0]}, "lr has 3 numbers, alpha has 2 numbers"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED)
def test_an_option_that_is_not_valid_is_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as found:
        getattr(widepack.optim, name)([WEIGHT], **options)
    assert words in str(found.value) and "\n" not in str(found.value)


def test_a_parameter_without_a_member_axis_is_named() -> None:
    who = (
        "SGD: lr has 3 numbers, one for each member, and parameter 1 of its group is [5], whose axis 0 has 5"
    )
    calls: list[tuple[Any, str]] = [
        (lambda: SGD([WEIGHT, SHARED], lr=LR), who),
        (lambda: AdamW([("a", WEIGHT), ("trunk.weight", SHARED)], weight_decay=DECAY), "trunk.weight is [5]"),
        (lambda: Adam([nn.Parameter(torch.tensor(1.0))], lr=LR), "is []"),
        (lambda: RAdam([WEIGHT, SHARED], lr=LR), "parameter 1 of its group is [5]"),
        (
            lambda: Rprop([WEIGHT, SHARED], step_sizes=([1e-6] * 3, 50)),
            "{'params': shared, 'step_sizes': (1e-6, 50)}",
        ),
    ]
    for make, words in calls:
        with pytest.raises(UsageError) as found:
            make()
        assert words in str(found.value) and "\n" not in str(found.value)


def test_states_and_groups_of_other_forms_are_refused() -> None:
    optimizer, other = SGD([WEIGHT], lr=LR), torch.zeros(1)
    calls: list[tuple[Any, str]] = [
        ({}, "SGD.load_state_dict: the state has nothing, and a state of"),
        ({"weight": other}, "the state has 'weight', and a state of an"),
        (other, "give what its state_dict() returned"),
    ]
    for state, words in calls:
        with pytest.raises(UsageError) as found:
            optimizer.load_state_dict(state)
        assert words in str(found.value) and "\n" not in str(found.value)
    with pytest.raises(UsageError, match="whose axis 0 has 3"):
        optimizer.load_state_dict(
            {
                **optimizer.state_dict(),
                "param_groups": [{**optimizer.state_dict()["param_groups"][0], "lr": [0.1] * 4}],
            }
        )
    with pytest.raises(UsageError, match="whose axis 0 has 5"):
        optimizer.add_param_group({"params": [SHARED]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match="rates of 3 members and of 2 cannot be combined"):
        _ = PerMember(LR) * PerMember([1, 2])
