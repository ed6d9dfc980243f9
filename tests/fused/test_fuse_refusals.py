"""Tests the calls that `widepack.fuse` refuses, and their messages."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusing import Cnn, Mlp, Transformer, draw, ids, members
from torch import Tensor, nn

import widepack
from widepack import CaptureError, InputError, MemberMismatch, UsageError, VerificationError
from widepack.fused import captures as fused_captures
from widepack.fused.captures import capture_member


def test_one_error_names_all_differences_of_architecture() -> None:
    modules = members(Mlp, 4)
    modules[1] = Mlp(width=7).eval()
    modules[2].layers[2] = nn.ReLU()
    modules[2].layers[0].bias.requires_grad_(False)
    modules[3] = modules[3].double()
    modules[3].layers[3].train()
    modules[3].layers[3].extra = nn.Identity()
    with pytest.raises(MemberMismatch) as e:
        widepack.fuse(modules, draw(5, 4))
    for message in (
        "the members differ from member 0: (1) member 1: layers.0.weight is float32[7, "
        "4] on cpu, in member 0 float32[6, 4] on cpu; (2) member 1: layers.0.bias is",
        "member 2: layers.2 is a torch.nn.modules.activation.ReLU, in member 0 a "
        "torch.nn.modules.activation.GELU; ",
        "member 2: layers.0.bias is a parameter that is frozen, in member 0 a parameter that trains; ",
        "member 3: layers.3 is in train mode, in member 0 in eval mode; ",
        "member 3: layers.3.extra is a torch.nn.modules.linear.Identity, in member 0 not there; ",
        "member 3: layers.3.bias is float64[3] on cpu, in member 0 float32[3] on cpu. "
        "Members of one module differ in the values of their weights only",
    ):
        assert message in str(e.value)


def test_ties_are_compared() -> None:
    modules = [
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).eval() for _ in range(2)
    ]
    modules[1][1].weight = modules[1][0].weight
    with pytest.raises(
        MemberMismatch,
        match=r"member 1: 1.weight is the same tensor as 0.weight, in member 0 a separate tensor",
    ):
        widepack.fuse(modules, draw(2, 3))


def test_constants_that_make_another_program_are_refused_and_others_are_not() -> None:
    modules = members(lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU()), 4)
    modules[1].note = "the second"
    modules[2][1].eps = 1e-3
    modules[3][2].approximate = "tanh"
    with pytest.raises(MemberMismatch) as e:
        widepack.fuse(modules, draw(5, 4))
    assert (
        "in eval mode members have other programs than member 0: (1) member 2: aten.layer_norm.default"
        in str(e.value)
    )
    assert (
        "has 0.001 in it, 1e-05 in the captured program; its modules differ in 1.eps: "
        "1e-05 in member 0, 0.001 in member 2; (2) member 3: " in str(e.value)
    )
    assert "2.approximate: 'none' in member 0, 'tanh' in member 3" in str(e.value)
    assert "member 1" not in str(e.value)


class Flagged(nn.Module):
    """Computes one of two functions. `read` selects it."""

    def __init__(self, read: Any, **attributes: Any) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 3), read
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if self.read(self) else y


def flag_of(m: Any) -> bool:
    return bool(m.flag == 9)


def flag_if_there(m: Any) -> bool:
    return bool(getattr(m, "flag", 0) == 9)


def flag_in_the_dict(m: Any) -> bool:
    return bool(vars(m).get("flag") == 9)


def flag_in_a_config(m: Any) -> bool:
    return bool(m.config["inner"].flag == 9)


def flag_of_a_copy(m: Any) -> bool:
    return bool(copy.copy(m).flag == 9)


def flag_behind_another(m: Any) -> bool:
    return bool(m.first == 1 and m.flag == 9)


def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets one item for every capture."""
    calls: list[int] = []
    original = capture_member

    def counted(*args: Any) -> Any:
        calls.append(len(calls))
        return original(*args)

    monkeypatch.setattr(fused_captures, "capture_member", counted)
    return calls


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("read", "attributes", "count"),
    [
        (flag_of, [{"flag": k} for k in (0, 1, 2, 3, 1, 9)], 5),
        pytest.param(flag_if_there, [{}, {"flag": 0}, {"flag": 9}], 3, marks=pytest.mark.slow),
        pytest.param(flag_in_the_dict, [{"flag": 0}, {"flag": 9}], 2, marks=pytest.mark.slow),
        (flag_of_a_copy, [{"flag": 0}, {"flag": 9}], 2),
        pytest.param(
            flag_in_a_config,
            [{"config": {"inner": SimpleNamespace(flag=k)}} for k in (0, 1, 9)],
            3,
            marks=pytest.mark.slow,
        ),
        (flag_behind_another, [{"first": k, "flag": f} for k, f in ((0, 0), (0, 9), (1, 0), (1, 9))], 3),
    ],
)
def test_every_differing_flag_is_found(
    read: Any, attributes: list[dict[str, Any]], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag is found after several members with harmless values, and without a comparison of answers."""
    captured = captures(monkeypatch)
    modules = [Flagged(read, **a).eval() for a in attributes]
    with pytest.raises(
        MemberMismatch,
        match=rf"other programs than member 0: \(1\) member {len(modules) - 1}: .*flag: .* 9 in member",
    ):
        widepack.fuse(modules, draw(5, 4), validate=False)
    assert len(captured) == count


class Hidden(nn.Module):
    """Stores a module, which has a submodule, in a plain list."""

    def __init__(self, flag: float) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(4, 3), [nn.Sequential(nn.Softplus(beta=flag))]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.hidden[0](self.layer(x))
        return y


def hooked(flag: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].register_forward_hook(lambda m, i, o: o * flag)
    return module


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Hidden, r"hidden.0.0.beta: 1.0 in member 0, 9.0 in member 2"),
        (hooked, r"0._forward_hooks.0.flag: 1.0 in member 0, 9.0 in member 2"),
    ],
)
def test_modules_in_plain_attributes_and_hooks_are_compared(make: Any, message: str) -> None:
    with pytest.raises(MemberMismatch, match=rf"\(1\) member 2: .*{message}"):
        widepack.fuse([make(1.0).eval(), make(1.0).eval(), make(9.0).eval()], draw(5, 4), validate=False)


def test_attributes_that_are_not_read_need_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captures(monkeypatch)
    modules = [
        Flagged(flag_of, flag=min(k, 1), name=f"fold {k}", seed=k, notes={"lr": k / 10}) for k in range(8)
    ]
    before = nn.Module.__getattribute__
    widepack.fuse(modules, draw(5, 4), validate=False)
    assert len(captured) == 2  # one for each flag
    assert nn.Module.__getattribute__ is before


def test_all_attributes_that_differ_are_named() -> None:
    modules = [
        Flagged(flag_of, flag=9 * k, **{f"a{j}": f"{k} " + "x" * 250 for j in range(12)}) for k in range(2)
    ]
    with pytest.raises(MemberMismatch) as e:
        widepack.fuse(modules, draw(5, 4), validate=False)
    for j in range(12):
        assert f"a{j}: '0 {'x' * 250}' in member 0, '1 {'x' * 250}' in member 1" in str(e.value)
    assert " more" not in str(e.value)


def test_a_difference_of_several_members_is_reported_once() -> None:
    modules = members(Mlp, 20)
    for k in (*range(3, 10), 12, 19):
        modules[k].layers[1].eps = 1e-3
    with pytest.raises(MemberMismatch) as e:
        widepack.fuse(modules, draw(5, 4))
    assert "member 0: (1) members 3-9, 12, 19: aten.layer_norm.default" in str(e.value)
    assert "layers.1.eps: 1e-05 in member 0, 0.001 in member 3. Members" in str(e.value)
    modules[4:6] = modules[18:20] = [Mlp(width=7).eval(), Mlp(width=7).eval()]
    with pytest.raises(MemberMismatch) as e:
        widepack.fuse(modules, draw(5, 4))
    assert (
        "from member 0: (1) members 4-5, 18-19: layers.0.weight is float32[7, 4] on cpu, "
        "in member 0 float32[6, 4] on cpu; (2) members 4-5," in str(e.value)
    )


def test_a_constant_that_differs_in_train_mode_is_refused_in_train_mode() -> None:
    chances = iter((0.1, 0.2))
    fused = widepack.fuse(
        members(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(next(chances))), 2),
        draw(5, 4),
        validate=False,
    )
    with pytest.raises(
        MemberMismatch,
        match=r"in train mode members have other programs than member 0: \(1\) member 1: .*its "
        r"modules differ in 1.p: 0.1 in member 0, 0.2",
    ):
        fused.train()(draw(5, 4))


def test_calls_must_agree_with_the_sample() -> None:
    fused = widepack.fuse(members(Mlp), draw(5, 4), validate=False)
    with pytest.raises(
        InputError, match=r"input x has 5 at axis 1, \[2, 5\]; the model takes 4 there, float32\[B,4\]"
    ):
        fused(draw(2, 5))
    with pytest.raises(InputError, match=r"one value for each member means a first axis of 3 members"):
        fused.each(draw(2, 5, 4))
    with pytest.raises(InputError, match=r"input x is float64, the model takes float32"):
        fused(draw(2, 4, dtype=torch.float64))


ONE, X = Mlp(), draw(5, 4)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: widepack.fuse([], X), "models is an empty list; give at least one module"),
    (lambda: widepack.fuse(Mlp, X), "models is not a list of modules"),
    (lambda: widepack.fuse([Mlp, Mlp], X), "models is not a list of modules"),  # type: ignore[list-item]
    (lambda: widepack.fuse(Mlp(), X), "models is one module; give a list of members, or n=8"),
    (lambda: widepack.fuse(members(Mlp), X, n=3), "n is given with a list of members"),
    (lambda: widepack.fuse(Mlp(), X, n=0), "n is 0; give the number of members, at least 1"),
    (lambda: widepack.fuse(lambda: ONE, X, n=2), "the factory returned one module twice"),
    (
        lambda: widepack.fuse(lambda: 3, X, n=2),  # type: ignore[arg-type,return-value]
        "the factory returned 3; a factory must return",
    ),
    (
        lambda: widepack.fuse(Transformer(), ids(4, 5), n=3),
        r"n=3: parts of Transformer have parameters, but no reset_parameters\(\) to initialize them again: "
        r"the module itself \(Transformer: place\)\. .*a factory",
    ),
    (
        lambda: widepack.fuse([nn.LazyLinear(3), nn.LazyLinear(3)], X),
        "member 0: weight has no size yet; run a lazy module once",
    ),
    (
        lambda: widepack.fuse(members(Mlp), X, share="layers"),
        r"share is a text; give a list of names, share=\['layers'\]",
    ),
    (
        lambda: widepack.fuse(members(Cnn), draw(4, 3, 8, 8), share=["norm1.running_mean"]),
        "share: norm1.running_mean is a buffer, and each member has its own",
    ),
    (lambda: widepack.fuse(members(Mlp), X, strategy="widest"), "unknown strategy 'widest'"),
    (
        lambda: widepack.fuse(members(Mlp), X, dynamic={"input": {0: "B"}}),
        "dynamic names input, which forward does not take; it takes x",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_arguments_that_are_not_valid_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


def test_numbers_of_members_that_do_not_exist_are_refused() -> None:
    fused = widepack.fuse(members(Mlp), X, validate=False)
    wrong: Any = "0"
    with pytest.raises(UsageError, match=r"there is no member '0'; there are 3, counted from 0"):
        fused.member(wrong)
    with pytest.raises(UsageError, match=r"there is no member 3; there are 3, counted from 0"):
        fused.copy_(0, 3)


def test_members_that_differ_outside_of_attributes_are_refused() -> None:
    """The members differ in a number in a closure. Only their answers show it."""
    factors = iter((1.0, 2.0))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            scales[id(self)] = next(factors)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            copy = nn.Module.__new__(type(self))
            memo[id(self)] = copy
            import copy as copying

            copy.__dict__.update(copying.deepcopy(self.__dict__, memo))
            scales[id(copy)] = scales[id(self)]
            return copy

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) * scales[id(self)]
            return y

    scales: dict[int, float] = {}
    with pytest.raises(
        VerificationError,
        match="the captured program gives other answers than the members: output output, member 1",
    ):
        widepack.fuse([Scaled().eval(), Scaled().eval()], draw(5, 4))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Adversary(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 3), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Reversed.apply(self.drop(self.layer(x)))  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["plain", "a program that draws"])
def test_a_custom_gradient_is_refused(dropout: float) -> None:
    with pytest.raises(
        (VerificationError, CaptureError),
        match=r"the gradient of layer\.weight of member 0 is not its own|autograd.Function",
    ):
        widepack.fuse([m.train() for m in members(lambda: Adversary(dropout))], draw(5, 4))


def test_random_numbers_of_another_source_are_found() -> None:
    class Jitter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            import random

            y: Tensor = torch.nn.functional.dropout(self.layer(x), 0.5, self.training) * random.uniform(
                0.5, 2
            )
            return y

    with pytest.raises(
        VerificationError,
        match="differs from the module of member 0, with the same seed of torch: .* The module draws from "
        "the generator of Python's random, and its captured program does not",
    ):
        widepack.fuse([m.train() for m in members(Jitter)], draw(5, 4))


class Keeps(nn.Module):
    """Draws, and keeps a count or a generator of its own."""

    def __init__(self, generator: bool = False) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0
        self.own = random.Random(3) if generator else None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = self.own.random() if self.own is not None else self.calls
        return torch.nn.functional.dropout(self.layer(x), 0.5, self.training) * factor


@pytest.mark.parametrize("generator", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_members_that_draw_and_keep_something_else(generator: bool) -> None:
    with pytest.raises(VerificationError, match="the next call reads: member 0 answers otherwise"):
        widepack.fuse([Keeps(generator).train() for _ in range(2)], draw(5, 4))


def test_a_mode_is_reported_once_and_hides_no_constant() -> None:
    modules = members(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), nn.Dropout(0.1)), 3
    )
    modules[1].train()[0][1].eps = 1e-3
    modules[2][0].train()
    with pytest.raises(MemberMismatch) as e:
        widepack.fuse(modules, draw(5, 4))
    assert (
        "(1) member 1: it is in train mode, in member 0 in eval mode; (2) member 1: "
        "0.1.eps is 0.001, in member 0 1e-05; (3) member 2: 0 is in" in str(e.value)
    )
    assert "(4)" not in str(e.value)


@pytest.mark.extended
def test_lines_in_train_mode_are_those_of_the_members() -> None:
    modules = members(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)), 2)
    modules[1][1].eps = 1e-3
    with pytest.raises(
        MemberMismatch, match=r"aten.layer_norm.default \(normalization.py:\d+ in forward\) has 0.001 in it"
    ):
        widepack.fuse([m.train() for m in modules], draw(5, 4))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("mode", [False, True])
def test_a_flag_that_changes_no_answer_is_accepted(mode: bool) -> None:
    flags = iter((False, True))
    modules = members(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(next(flags)), nn.Flatten(), nn.Linear(64, 2)
        ).train(mode),
        2,
    )
    assert len(widepack.fuse([m.train(mode) for m in modules], draw(4, 3, 6, 6))) == 2


def test_classes_of_one_name_with_other_code() -> None:
    def one() -> nn.Module:
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        return Net(4, 3)

    def other() -> nn.Module:
        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).relu()

        Net.__qualname__ = type(one()).__qualname__
        return Net(4, 3)

    with pytest.raises(MemberMismatch, match=r"Net, in member 0 too, with other code in forward\."):
        widepack.fuse([one(), other()], draw(5, 4))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"max_norm": 1.0}, "has max_norm=1.0: torch writes"), ({"sparse": True}, "has sparse gradients")],
)
def test_embeddings_that_cannot_be_trained_fused(option: dict[str, Any], message: str) -> None:
    modules = members(lambda: nn.Sequential(nn.Embedding(11, 4, **option), nn.Linear(4, 3)))
    x = torch.arange(8).reshape(4, 2)
    fused = widepack.fuse(modules, x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in modules]), rtol=1e-5, atol=1e-6)
    for mode in (False, True):
        with pytest.raises(UsageError, match=rf"0 \(Embedding\) {message}"):
            fused.train(mode)(x)
    fused.eval().get_parameter("0.weight").requires_grad_(False)
    torch.autograd.backward(fused(x).sum())


def test_weights_that_forward_changes_in_train_mode() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.teacher.weight.lerp_(self.student.weight, 0.1)
            y: Tensor = self.student(x) - self.teacher(x)
            return y

    fused = widepack.fuse(members(Teacher), draw(5, 4), validate=False)
    with pytest.raises(
        CaptureError,
        match="changes its parameters teacher.weight at every call of forward in train mode; "
        ".* make them buffers, which a fused module keeps for each member",
    ):
        fused.train()(draw(5, 4))


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: -self.fc(x), (x,))


def test_control_flow_of_torch_is_named() -> None:
    with pytest.raises(CaptureError, match="Cond uses torch's cond, control flow .* choose with torch.where"):
        widepack.fuse(members(Cond), draw(5, 4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), torch.jit.script(nn.GELU())), "1"),
        (lambda: torch.jit.script(nn.Linear(4, 3)), "the member"),
    ],
)
def test_scripted_parts_are_named(make: Callable[[], nn.Module], where: str) -> None:
    with pytest.raises(CaptureError, match=f"contains {where}, compiled by torch.jit, .* Use plain modules"):
        widepack.fuse(members(make), draw(5, 4))
