"""Every face is its modules: answers, gradients, statistics, options, errors, and the modules that come out again.

Truth is each module alone in float64, on its own input; members differ in all their numbers.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import widepack
from layer_cases import CASES, Case
from support import fresh, leaves, must, plain_attention
from widepack import primitives
from widepack import InputError, MemberMismatch, UsageError
from widepack.layers.base import Face
from widepack.layers.catalog import FACES
from widepack.registry.registry import REGISTRY, full_name

N = 3
FIRST = {name.partition("-")[0]: name for name in reversed(CASES)}  # one case a module


def members(make: Callable[[], nn.Module], count: int = N) -> list[nn.Module]:
    """Modules in float64 that differ in every number, statistics included."""
    made = []
    for i in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(31 + i)
            module = make().double()
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                with torch.no_grad():
                    t.copy_(
                        torch.full_like(t, 3)
                        if not t.is_floating_point()
                        else torch.rand_like(t) + 0.5
                        if name.endswith("var")
                        else torch.randn_like(t) / 2
                    )
        made.append(module)
    return made


def face_of(modules: list[nn.Module], strategy: str = "auto") -> Face:
    made = getattr(primitives, f"Wide{type(modules[0]).__name__}").from_modules(modules, strategy=strategy)
    assert isinstance(made, Face)
    return made


def calls(case: Case) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """One call a member."""
    made = []
    for i in range(N):
        g = torch.Generator().manual_seed(5 + i)
        made.append((case.draw(g), {**case.call, **dict(case.named(g) if case.named else ())}))
    return made


def stacked(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.stack(values)
    return tuple(stacked(list(v)) for v in zip(*values)) if isinstance(first, tuple) else first


def wide_call(own: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    for place, column in enumerate(zip(*(a for a, _ in own))):
        same = next((j for j in range(place) if column[0] is own[0][0][j]), None)  # one tensor twice stays one
        args.append(stacked(list(column)) if same is None else args[same])
    return args, {k: stacked([kw[k] for _, kw in own]) for k in own[0][1]}


def floats(given: Any) -> list[Tensor]:
    return [t for t in leaves(given) if t.is_floating_point()]


def loss(result: Any) -> Tensor:
    """One number that every output has another share in."""
    total = torch.zeros((), dtype=torch.float64)
    for t in floats(result):
        total = total + (t * torch.linspace(0.5, 2, t.numel(), dtype=t.dtype).reshape(t.shape)).sum()
    return total


def answers(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """A module's answer, and the gradients of its inputs; those of its parameters are in it."""
    given = [a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    for i, a in enumerate(args):
        for j in range(i):
            if args[j] is a:
                given[i] = given[j]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched|dropout option")
        made = module(*given, **kwargs)
    total = loss(made)
    if total.requires_grad:
        torch.autograd.backward(total)
    return made, [t.grad for t in given if isinstance(t, Tensor) and t.grad is not None]


def assert_members(got: Any, want: list[Any], tolerance: float = 1e-11) -> None:
    rows = [leaves(w) for w in want]
    have = leaves(got)
    assert len(have) == len(rows[0])
    for k, wide in enumerate(have):
        torch.testing.assert_close(wide, torch.stack([r[k] for r in rows]), rtol=tolerance, atol=tolerance, equal_nan=True)


def check(case: Case, train: bool, strategy: str = "auto") -> Face:
    """A face against its modules: answer, gradients, buffers."""
    alone = [m.train(train) for m in members(case.make)]
    face = face_of([copy.deepcopy(m) for m in alone], strategy)
    own = calls(case)
    args, kwargs = wide_call(own)
    with plain_attention():
        results = [answers(m, *call) for m, call in zip(alone, own)]
    rows = len(leaves(args)) and N
    made, grads = face_answers(face, args, kwargs)
    assert rows
    assert_members(made, [r for r, _ in results])
    for k, grad in enumerate(grads):
        assert_members(grad, [g[k] for _, g in results])
    for name, p in face.named_parameters():
        assert p.grad is not None, name
        assert_members(p.grad, [m.get_parameter(name).grad for m in alone])
    for name, b in face.named_buffers():
        assert_members(b, [m.get_buffer(name) for m in alone])
    return face


def face_answers(face: Face, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """As `answers`; the loss of every member apart."""
    given: list[Any] = [a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    for i, a in enumerate(args):
        for j in range(i):
            if args[j] is a:
                given[i] = given[j]
    made = face(*given, **kwargs)
    total = sum((loss([t[i] for t in leaves(made)]) for i in range(N)), torch.zeros(()))
    if total.requires_grad:
        torch.autograd.backward(total)
    return made, [t.grad for t in given if isinstance(t, Tensor) and t.grad is not None]


@pytest.mark.parametrize("name", CASES)
def test_a_face_is_its_modules(name: str) -> None:
    for train in (True, False) if "Norm" in name else (True,):
        check(CASES[name], train)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_of_a_face_is_its_modules(name: str) -> None:
    case = CASES[name]
    ran = []
    for train in (True, False):
        for strategy in face_of(members(case.make)).strategies:
            try:
                check(case, train, strategy)
                ran.append(strategy)
            except UsageError as e:
                assert "those that do" in str(e) or "gives no weights" in str(e)
    assert {"auto", "sequential"} <= set(ran)


@pytest.mark.parametrize("name", ["Linear", "Conv2d-groups", "Embedding", "GroupNorm", "LSTM-all", "GRU", "MultiheadAttention-self-no-weights"])
def test_strategies_that_are_named_run(name: str) -> None:
    """Without gradients, so that all do; float64, which some are not for."""
    case = CASES[name]
    alone = [m.eval() for m in members(case.make)]
    args, kwargs = wide_call(calls(case))
    with torch.no_grad(), plain_attention():
        want = [m(*a, **k) for m, (a, k) in zip(alone, calls(case))]
        face, ran = face_of(alone), []
        for strategy in face.strategies:
            face.strategy = strategy
            try:
                assert_members(face(*args, **kwargs), want)
                ran.append(strategy)
            except UsageError as e:
                assert "those that do: " in str(e) and "sequential, auto" in str(e)
    assert len(ran) > 2


def test_every_module_of_the_list_has_a_face() -> None:
    """The cases and the drawing layers below are all of them, and each says its sizes."""
    covered = {f"Wide{name.partition('-')[0]}" for name in CASES} | {f"Wide{type(m).__name__}" for m in DROPOUTS}
    assert covered == set(FACES)
    assert len(FACES) == 45
    for name in FACES:
        assert issubclass(getattr(primitives, name), Face)
        assert name in dir(primitives)
    with pytest.raises(AttributeError, match="WideNothing"):
        _ = primitives.WideNothing
    assert widepack.primitives is primitives


@pytest.mark.parametrize("name", [n if n in FIRST.values() else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_modules_come_out_as_they_went_in(name: str) -> None:
    alone = [m.eval() for m in members(CASES[name].make)]
    for m in alone:
        for p in list(m.parameters())[:1]:
            p.requires_grad_(False)
    face = face_of(alone)
    assert [n for n, _ in face.named_parameters()] == [n for n, _ in alone[0].named_parameters()]
    assert list(face.state_dict()) == list(alone[0].state_dict())
    for back, m in zip(face.to_modules(), alone, strict=True):
        assert type(back) is type(m) and repr(back) == repr(m) and back.training == m.training
        assert {k: v for k, v in vars(back).items() if isinstance(v, (int, float, str, tuple))} == {
            k: v for k, v in vars(m).items() if isinstance(v, (int, float, str, tuple))
        }
        for (n, p), (other, q) in zip(back.named_parameters(), m.named_parameters(), strict=True):
            assert n == other and torch.equal(p, q) and p.requires_grad == q.requires_grad and p.data_ptr() != q.data_ptr()
        for (n, b), (other, c) in zip(back.named_buffers(), m.named_buffers(), strict=True):
            assert n == other and torch.equal(b, c)
    args, kwargs = calls(CASES[name])[0]
    assert_members(stacked([answers(face.to_modules()[0], args, kwargs)[0]]), [answers(alone[0], args, kwargs)[0]], 0.0)


def test_modules_that_come_out_have_what_was_trained() -> None:
    face = face_of(members(lambda: nn.BatchNorm1d(4)))
    before = face.to_modules()
    face.train()(torch.randn(N, 5, 4, dtype=torch.float64)).sum().backward()
    torch.optim.SGD(face.parameters(), 0.1).step()
    after = face.to_modules()
    assert all(not torch.equal(a.bias, b.bias) and not torch.equal(a.running_mean, b.running_mean) for a, b in zip(after, before))  # type: ignore[arg-type]
    assert torch.equal(torch.stack([a.bias for a in after]), face.bias)  # type: ignore[arg-type,misc]
    assert all(a.training for a in after)


DROPOUTS = [nn.Dropout(0.4), nn.Dropout1d(0.4), nn.Dropout2d(0.4), nn.Dropout3d(0.4), nn.AlphaDropout(0.4), nn.FeatureAlphaDropout(0.4)]


@pytest.mark.parametrize("module", DROPOUTS, ids=lambda m: type(m).__name__)
def test_dropout_draws_for_each_member(module: nn.Module) -> None:
    rank = {"Dropout1d": 3, "Dropout2d": 4, "Dropout3d": 5}.get(type(module).__name__, 4)
    value = torch.ones((6, 8, 5, 3, 2)[:rank], dtype=torch.float64)
    given = value.expand(N, *value.shape)
    face = face_of([copy.deepcopy(module) for _ in range(N)])
    made = face(given)
    assert made.shape == given.shape
    assert not torch.equal(made[0], made[1]) and not torch.equal(made[1], made[2])
    by_channel = "Dropout" in type(module).__name__ and type(module).__name__ not in ("Dropout", "AlphaDropout")
    same = made.flatten(3).eq(made.flatten(3)[..., :1]).all()
    assert bool(same) == by_channel
    assert torch.equal(face.eval()(given), given)
    face.train().strategy = "sequential"
    torch.manual_seed(3)
    made = face(given)
    torch.manual_seed(3)
    assert torch.equal(made, torch.stack([module(value) for _ in range(N)]))
    assert type(face.to_modules()[1]) is type(module) and repr(face.to_modules()[1]) == repr(module)


@pytest.mark.parametrize(("module", "shape"), [(nn.Dropout1d(0.5), (8, 5)), (nn.Dropout3d(0.5), (8, 3, 2, 2)), (nn.Dropout(0.5), (8,))])
def test_dropout_without_a_batch(module: nn.Module, shape: tuple[int, ...]) -> None:
    face = face_of([copy.deepcopy(module) for _ in range(N)])
    made = face(torch.ones(N, *shape))
    assert made.shape == (N, *shape)
    if len(shape) > 1:
        assert bool(made.flatten(2).eq(made.flatten(2)[..., :1]).all())  # whole channels
    assert 0 < float((made == 0).float().mean()) < 1


def test_dropout_with_one_mask_for_all_where_it_is_named() -> None:
    face = face_of([nn.Dropout(0.4) for _ in range(N)], "shared")
    made = face(torch.ones(N, 50, 4))
    assert torch.equal(made[0], made[1]) and 0 < float((made == 0).float().mean()) < 1


def test_dropout_inside_of_layers_draws_for_each_member() -> None:
    for module, args in (
        (nn.LSTM(4, 6, 2, dropout=0.5), (torch.randn(5, 2, 4),)),
        (nn.MultiheadAttention(8, 2, dropout=0.5), (torch.randn(5, 2, 8),) * 3),
    ):
        face = face_of([copy.deepcopy(module) for _ in range(N)])
        made = [leaves(face(*(a.expand(N, *a.shape) for a in args), **({} if "LSTM" in face.name else k)))[0] for k in ({}, {"need_weights": False})]
        for y in made:
            assert not torch.equal(y[0], y[1])
        face.eval()
        y = leaves(face(*(a.expand(N, *a.shape) for a in args)))[0]
        assert torch.equal(y[0], y[1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(layer: type[nn.Module]) -> None:
    """Lengths are the members' alike, data their own; states go in and out in the caller's order."""
    alone = members(lambda: layer(4, 6, 2, bidirectional=True))
    face = face_of(alone)
    batch, lengths = torch.randn(N, 5, 3, 4, dtype=torch.float64), torch.tensor([2, 5, 3])
    own = [pack_padded_sequence(b, lengths, enforce_sorted=False) for b in batch]
    given = PackedSequence(torch.stack([p.data for p in own]), own[0].batch_sizes, own[0].sorted_indices, own[0].unsorted_indices)
    states = [torch.randn(N, 4, 3, 6, dtype=torch.float64) for _ in range(2 if layer is nn.LSTM else 1)]
    for start in (None, tuple(states) if layer is nn.LSTM else states[0]):
        made, ends = face(given) if start is None else face(given, start)
        for i, m in enumerate(alone):
            mine = None if start is None else tuple(s[i] for s in start) if layer is nn.LSTM else start[i]
            want, last = m(own[i], mine)
            torch.testing.assert_close(made.data[i], want.data)
            assert torch.equal(made.batch_sizes, want.batch_sizes)
            for e, w in zip(leaves(ends), leaves(last)):
                torch.testing.assert_close(e[i], w)


def for_all(value: Any) -> Any:
    """An input of one member as that of all."""
    if isinstance(value, Tensor):
        return value.expand(N, *value.shape)
    return tuple(map(for_all, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", [n if n in FIRST.values() else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_an_input_for_all_members_gives_each_its_own_answer(name: str) -> None:
    case = CASES[name]
    (args, kwargs), *_ = calls(case)
    wide = [for_all(a) for a in args]
    for j, a in enumerate(args):
        wide[j] = next((wide[i] for i in range(j) if args[i] is a), wide[j])
    for train in (True, False):
        alone = [m.train(train) for m in members(case.make)]
        face = face_of([copy.deepcopy(m) for m in alone])
        with plain_attention():
            want = [m(*args, **kwargs) for m in alone]
        assert_members(face(*wide, **{k: for_all(v) for k, v in kwargs.items()}), want)
        for key, b in face.named_buffers():
            assert_members(b, [m.get_buffer(key) for m in alone])


@pytest.mark.parametrize("name", [n if n in FIRST.values() else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_what_one_member_lost_changes_no_other(name: str) -> None:
    """NaN in all of member 1: not a bit of the others' answers and statistics, in every strategy."""
    args, kwargs = wide_call(calls(CASES[name]))
    well = face_of(members(CASES[name].make))
    sick = copy.deepcopy(well)
    with torch.no_grad():
        for t in (*sick.parameters(), *sick.buffers()):
            if t.is_floating_point():
                t[1] = float("nan")
    for strategy in well.strategies:
        one, other = copy.deepcopy(well), copy.deepcopy(sick)
        one.strategy = other.strategy = strategy
        try:
            made = leaves(one(*args, **kwargs))
        except UsageError:
            continue
        for a, b in zip((*made, *one.buffers()), (*leaves(other(*args, **kwargs)), *other.buffers()), strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2]), strategy


def test_a_call_is_not_taken_for_another() -> None:
    """Steps are kept by sizes, strides, dtypes, kinds and options; a second call of each is the first one's equal."""
    alone = members(lambda: nn.Conv2d(4, 6, 3))
    face = face_of(alone)
    base = torch.randn(N, 2, 4, 8, 8, dtype=torch.float64)
    turned = base.transpose(3, 4)
    for given in (base, turned, base[:, :1], base.expand(N, 2, 4, 8, 8), base[0].expand(N, 2, 4, 8, 8), base[..., ::2, :], base[:, :0]):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                want = [m(g) for m, g in zip(alone, given)]
                for _ in range(2):
                    assert_members(face(given), want)
    pooled, other = face_of([nn.MaxPool2d(2)] * N), face_of([nn.MaxPool2d(2, stride=1)] * N)
    assert pooled(base).shape != other(base).shape
    before = face(base)
    with torch.no_grad():
        face.weight.mul_(2)  # type: ignore[operator]
        face.bias.zero_()  # type: ignore[operator]
    assert not torch.allclose(face(base), before)
    assert_members(face(base), [m(b) for m, b in zip(face.to_modules(), base)])


def test_an_input_for_all_members_counts_as_one() -> None:
    """Strategies of a Shared input apply to an expanded one; with its gradient asked for it is N inputs."""
    alone = members(lambda: nn.Linear(4, 5))
    face = face_of(alone, "one_gemm")
    value = torch.randn(2, 4, dtype=torch.float64)
    assert_members(face(value.expand(N, 2, 4)), [m(value) for m in alone])
    with pytest.raises(UsageError, match="one_gemm"):
        face(value.repeat(N, 1, 1))
    value.requires_grad_()
    face.strategy = "auto"
    (grad,) = torch.autograd.grad(face(value.expand(N, 2, 4)).sum(), value)
    torch.testing.assert_close(grad, torch.stack([m.weight.sum(0) for m in alone]).sum(0).expand(2, 4))  # type: ignore[operator]


def test_refusals_name_what_they_refuse() -> None:
    three = members(lambda: nn.Linear(4, 5))
    face = face_of(three)
    for call, error, words in (
        (lambda: face(), TypeError, "input"),
        (lambda: face(torch.randn(N, 2, 3).double()), RuntimeError, "got [2, 3] X [4, 5]"),
        (lambda: face(torch.randn(2, 4)), InputError, "WideLinear takes every input as [3, ...], one a member in front, and input 0 is float32[2,4]"),
        (lambda: face_of(three, "bmw"), UsageError, "WideLinear has no strategy 'bmw'; it has one_gemm, "),
        (lambda: primitives.WideLinear.from_modules([]), UsageError, "there are no modules"),
        (
            lambda: primitives.WideLinear.from_modules([nn.Conv1d(1, 1, 1)]),
            UsageError,
            "takes modules of class torch.nn.Linear, and member 0 is of class",
        ),
        (lambda: primitives.WideLinear.from_modules([nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))]), UsageError, "widepack.fuse"),
        (lambda: face_of([nn.Embedding(5, 4, max_norm=1.0)]), UsageError, "max_norm=1.0 changes the weights in every forward"),
        (lambda: face_of([nn.Embedding(5, 4, sparse=True)]), UsageError, "sparse=True"),
        (lambda: face_of([nn.EmbeddingBag(5, 4, max_norm=2.0)]), UsageError, "max_norm=2.0"),
        (lambda: face_of(members(CASES["BatchNorm2d"].make))(torch.randn(N, 2, 1, 3, 3).double()), RuntimeError, ""),
        (
            lambda: face_of(members(CASES["LSTMCell"].make))(
                torch.randn(N, 2, 4).double(), (torch.randn(N, 2, 6).double(), torch.randn(N, 2, 1).double())
            ),
            RuntimeError,
            "",
        ),
        (lambda: face_of(members(CASES["BatchNorm1d"].make))(torch.randn(N, 1, 4).double()), ValueError, "more than 1 value per channel"),
    ):
        with pytest.raises(error) as found:
            call()
        assert words in str(found.value)
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="member 1 has hooks"):
        face_of([nn.Linear(2, 2), hooked])
    changed = members(lambda: nn.MultiheadAttention(4, 2))
    for m in changed:
        vars(m.out_proj)["forward"] = torch.neg
    with pytest.raises(UsageError, match="out_proj of member 0 has a forward of its own"):
        face_of(changed)


def test_weights_of_a_bag_are_for_sums() -> None:
    """As the module says, whatever could be made of them."""
    face: Any = face_of(members(lambda: nn.EmbeddingBag(9, 4, mode="mean")))
    ids = torch.zeros(N, 2, 3, dtype=torch.long)
    for strategy in face.strategies:
        face.strategy = strategy
        with pytest.raises((RuntimeError, UsageError), match="only supported with mode='sum'|does not apply"):
            face(ids, per_sample_weights=torch.ones(N, 2, 3).double())


def test_what_holds_no_tensors_is_refused() -> None:
    face = face_of(members(lambda: nn.Linear(4, 5)))
    for given, words in (((None,), "was given builtins.NoneType"), (([1.0],), "was given builtins.list")):
        with pytest.raises(InputError, match=words):
            face(*given)
    for modules in (None, nn.Linear(4, 5)):
        with pytest.raises(UsageError, match="WideLinear takes a list of modules, not a"):
            type(face).from_modules(modules)  # type: ignore[arg-type]


def test_members_that_differ_are_refused_with_all_differences() -> None:
    one, two, three = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3, stride=2, padding=1).double(), nn.Conv2d(2, 4, 3, bias=False).eval()
    one.weight.requires_grad_(False)
    with pytest.raises(MemberMismatch) as found:
        face_of([one, two, three])
    text = str(found.value)
    assert text.startswith(
        "WideConv2d: the members differ from member 0: (1) member 1: weight is float64[4, 2, 3, 3] on cpu, in member 0 float32[4, 2, 3, 3]"
    )
    for words in (
        "(2) members 1-2: weight is a parameter that trains, in member 0 a parameter that is frozen",
        "member 1: stride.0 is 2, in member 0 1",
        "member 1: padding.1 is 1, in member 0 0",
        "member 2: it is in eval mode, in member 0 in train mode",
        "member 2: bias is not there, in member 0 float32[4] on cpu",
        "(8)",
    ):
        assert words in text, (words, text)
    assert "\n" not in text
    with pytest.raises(MemberMismatch, match=r"\(1\) member 1: it is a torch.nn.modules.conv.Conv1d, in member 0 a torch.nn.modules.conv.Conv2d"):
        face_of([one, nn.Conv1d(2, 4, 3)])


def test_statistics_follow_each_members_own_count() -> None:
    """momentum=None: members that have seen other numbers of batches have other shares."""
    alone = members(lambda: nn.BatchNorm1d(4, momentum=None))
    for i, m in enumerate(alone):
        m.num_batches_tracked.fill_(i)  # type: ignore[operator]
    face = face_of(alone)
    for _ in range(3):
        given = torch.randn(N, 6, 4, dtype=torch.float64)
        assert_members(face(given), [m(g) for m, g in zip(alone, given)])
    for name, b in face.named_buffers():
        assert_members(b, [m.get_buffer(name) for m in alone])


def test_statistics_follow_every_call() -> None:
    """Also the second and third one, which take the steps of the first."""
    for name in ("InstanceNorm2d-all", "BatchNorm2d"):
        alone = members(CASES[name].make)
        face = face_of(alone)
        for _ in range(3):
            given = torch.randn(N, 3, 4, 4, 3, dtype=torch.float64)
            assert_members(face(given), [m(g) for m, g in zip(alone, given)])
            for key, b in face.named_buffers():
                assert_members(b, [m.get_buffer(key) for m in alone])
    dropout = face_of([nn.Dropout(0.5)] * N)
    assert len({tuple(dropout(torch.ones(N, 40)).flatten().tolist()) for _ in range(3)}) == 3


def test_a_face_trains_as_its_modules() -> None:
    alone = members(lambda: nn.Conv1d(4, 6, 3))
    face = face_of(alone)
    wide, own = torch.optim.SGD(face.parameters(), 0.1), [torch.optim.SGD(m.parameters(), 0.1) for m in alone]
    for _ in range(5):
        given = torch.randn(N, 2, 4, 7, dtype=torch.float64)
        wide.zero_grad()
        face(given).square().sum().backward()
        wide.step()
        for m, o, g in zip(alone, own, given):
            o.zero_grad()
            m(g).square().sum().backward()
            o.step()
    for back, m in zip(face.to_modules(), alone):
        for p, q in zip(back.parameters(), m.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-11)


def test_a_face_is_a_module() -> None:
    """Copies, pickles, state dicts, dtypes, a place in other modules; its text."""
    face = face_of(members(lambda: nn.Linear(4, 5)), "bmm")
    assert repr(face) == "WideLinear(3 members, in_features=4, out_features=5, bias=True, strategy='bmm')"
    given = torch.randn(N, 2, 4, dtype=torch.float64)
    face(given)
    for other in (copy.deepcopy(face), pickle.loads(pickle.dumps(face))):
        assert torch.equal(other(given), face(given)) and other.strategy == "bmm"
        assert other.weight is not face.weight
    fresh_one = face_of([nn.Linear(4, 5).double() for _ in range(N)])
    fresh_one.load_state_dict(face.state_dict())
    assert torch.equal(fresh_one(given), face(given))
    single = copy.deepcopy(face).float()
    assert single(given.float()).dtype == torch.float32 and single.to_modules()[0].weight.dtype == torch.float32
    net = nn.Sequential(face, nn.ReLU(), face_of(members(lambda: nn.Linear(5, 2))))
    assert net(given).shape == (N, 2, 2)
    assert "WideLinear(3 members, in_features=5" in repr(net)
    assert "embed_dim=8, num_heads=2, kdim=3" in repr(face_of([nn.MultiheadAttention(8, 2, kdim=3)]))
    assert "WideLSTM(1 members, 4, 6, num_layers=2" in repr(face_of([nn.LSTM(4, 6, 2)]))


def test_one_member_and_an_empty_batch() -> None:
    (alone,) = members(lambda: nn.Linear(4, 5), 1)
    face = face_of([alone])
    assert_members(face(torch.ones(1, 2, 4).double()), [alone(torch.ones(2, 4).double())])
    assert face(torch.ones(1, 0, 4).double()).shape == (1, 0, 5)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "sequential"])
def test_a_batch_norm_of_nothing_is_the_modules(tracked: bool, strategy: str) -> None:
    """torch's own kernel divides by the batch's size in its backward, which ended the process."""
    for training, options in ((True, {}), (True, {"momentum": None}), (False, {})):
        alone = [m.train(training) for m in members(partial(nn.BatchNorm2d, 3, track_running_stats=tracked, **options))]  # type: ignore[arg-type]
        face: Any = type(face_of(alone)).from_modules(alone, strategy)
        given = torch.empty(N, 0, 3, 4, 2).double()
        assert_members(face(given), [m(x) for m, x in zip(alone, given)])
        face(given).sum().backward()
        assert torch.equal(face.weight.grad, torch.zeros(N, 3).double())
        for one, module in zip(face.to_modules(), alone):
            if tracked:
                module(given[0])  # the second call
            assert all(torch.equal(a, b) for a, b in zip(one.buffers(), module.buffers()))


def test_float32_in_inference_is_the_modules() -> None:
    """Where strategies over widepack's own ops run."""
    own = {"LSTM-all": {"packed", "fused"}, "GRU": {"fused"}, "Conv2d": {"packed"}, "Linear": {"packed", "streamed"}}
    for name, least in own.items():
        alone = [m.float().eval() for m in members(CASES[name].make)]
        args = [a.float() for a in wide_call(calls(CASES[name]))[0]]
        with torch.no_grad():
            face, ran = face_of(alone), set()
            want = [m(*(a[i] for a in args)) for i, m in enumerate(alone)]
            for strategy in face.strategies:
                face.strategy = strategy
                try:
                    assert_members(face(*args), want, 1e-5)
                    ran.add(strategy)
                except UsageError as e:
                    assert "those that do: " in str(e)
        assert least | {"sequential", "auto"} <= ran


@pytest.mark.parametrize(
    "name", ["Linear", "Conv2d", "LayerNorm", "GroupNorm", "BatchNorm2d", "LSTM", "LSTMCell", "PReLU", "MultiheadAttention-self"]
)
def test_autocast_is_the_modules_own(name: str) -> None:
    """The dtype that it chooses, and what it makes of an input that a layer before has cast."""
    case = CASES[name]
    alone = [m.float() for m in members(case.make)]
    face = face_of([copy.deepcopy(m) for m in alone])
    for dtype in (torch.float32, torch.bfloat16):
        own = [tuple(a.to(dtype) for a in case.draw(torch.Generator().manual_seed(i))) for i in range(N)]
        own = [(args[0],) * 3 if "Attention" in name else args for args in own]
        for grad in (True, False):
            with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad), plain_attention():
                want = [m(*args) for m, args in zip(alone, own)]
                given = [torch.stack(column) for column in zip(*own)]
                made = face(*(given[:1] * 3 if "Attention" in name else given))
            assert_members(made, want, 0.02)


@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm"])
def test_parameters_may_be_wider_than_the_input(name: str) -> None:
    alone = [m.float() for m in members(CASES[name].make)]
    (given,) = [a.bfloat16() for a in wide_call(calls(CASES[name]))[0]]
    assert_members(face_of(alone)(given), [m(g) for m, g in zip(alone, given)], 0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # it looks behind the cache
def test_a_compiled_face_is_the_face() -> None:
    for name in ("Linear", "LayerNorm", "GroupNorm"):
        face = face_of(members(CASES[name].make))
        (given,) = wide_call(calls(CASES[name]))[0]
        torch.testing.assert_close(torch.compile(face, backend="eager", fullgraph=True)(given), face(given))


def test_the_rules_do_not_bring_the_faces() -> None:
    code = "import sys, widepack.primitives; assert not [m for m in sys.modules if 'face' in m]; import widepack; widepack.primitives.WideLinear; assert 'widepack.layers.base' in sys.modules"
    must(fresh(code))


def test_names_of_strategies_are_registered() -> None:
    for name in FACES:
        face = getattr(primitives, name)
        assert any(full_name(op) in REGISTRY for op in face.ops) or face.draws, name
