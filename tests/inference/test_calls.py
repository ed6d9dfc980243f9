"""Tests calls of a loaded model.

They cover refused calls and their messages, forms of inputs and results, mixed patterns, members, threads,
imports and the probe.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import shutil
import struct
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from loaded import built
from small_builds import loaded
from support import Artifacts, fresh, leaves, must, quick_first, run, stack
from torch import Tensor, nn

import cases
import widepack
from widepack import load
from widepack.distributed.device_load import LoadArguments
from widepack.errors import ArtifactError, InputError, UsageError, VerificationError
from widepack.inference.load import load as load_here
from widepack.inference.model import WideModel
from widepack.inference.output import Output
from widepack.verification import probe

Pair = namedtuple("Pair", "low high")


class Forms(nn.Module):
    """Has inputs and results of every form."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(4, 3)
            self.register_buffer("offset", torch.randn(3))

    def forward(
        self,
        x: Tensor,
        state: tuple[Tensor, Tensor],
        more: dict[str, Tensor],
        mask: Tensor | None = None,
        scale: float = 2.0,
    ) -> dict[str, Any]:
        y = self.fc(x) * scale + self.offset
        low, high = state
        return {
            "y": y,
            "inner": (y + low, None, [torch.tanh(y) * high]),
            "pair": Pair(y.amin(-1), y.amax(-1)),
            "input": x + more["a"],
            "positive": y > 0,
            "scale": scale,
        }


def forms_call(batch: int = 3, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    x, low, high, a = (torch.randn(batch, n, generator=g) for n in (4, 3, 3, 4))
    return (x, (low, high)), {"more": {"a": a}, "scale": 3.0}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    args, kwargs = forms_call()
    folder, members = tmp_path_factory.mktemp("forms"), [Forms(i) for i in range(3)]
    return load(built(folder, Forms, members, sample=args, sample_kwargs=kwargs))


@pytest.fixture(scope="module")
def mlp(artifacts: Artifacts) -> WideModel:
    return load(artifacts("mlp"))


@pytest.fixture(scope="module")
def bert(artifacts: Artifacts) -> WideModel:
    return load(artifacts("bert"))


# Refusals


X, STATE, MORE = forms_call()[0][0], forms_call()[0][1], forms_call()[1]["more"]


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            (X, STATE, MORE, None, 3.0, X),
            {},
            ["takes 5 inputs by position (x, state, more, mask, scale)", "gives 6"],
        ),
        ((X, STATE), {"more": MORE, "scale": 3.0, "h": X}, ["no input 'h'", "x, state, more"]),
        ((X, STATE), {"more": MORE, "scale": 3.0, "x": X}, ["x is given twice", "by position and by name"]),
        ((X,), {"more": MORE, "scale": 3.0}, ["state is missing"]),
        ((X.tolist(), STATE), {"more": MORE}, ["x is a list of 3", "takes a tensor float32[B,4]"]),
        ((X.double().numpy(), STATE), {"more": MORE}, ["x is float64", ".astype('float32')"]),
        (({"x": X}, STATE), {"more": MORE}, ["x is a dict with the keys x", "by name: ens(**inputs)"]),
        ((X, STATE), {"ids": X, "types": X}, ["no input 'ids', 'types'", "Leave them out of the call"]),
        ((None, STATE), {"more": MORE}, ["x is None", "takes a tensor"]),
        ((X, STATE), {"more": MORE, "scale": 4.0}, ["scale is 4.0", "built with 3.0"]),
        ((X, STATE), {"more": MORE, "scale": X}, ["scale is a Tensor", "built with 3.0"]),
        ((X, STATE), {"more": MORE, "scale": X.numpy()}, ["scale is a ndarray", "built with 3.0"]),
        ((X, STATE[:1]), {"more": MORE}, ["state needs a tuple of 2", "got a tuple of 1"]),
        ((X, X), {"more": MORE}, ["state needs a tuple of 2", "got a Tensor"]),
        ((X, STATE), {"more": {"b": X}}, ["more needs a dict with the keys a; got a dict with the keys b"]),
        ((X, STATE), {"more": X}, ["more needs a dict with the keys a", "got a Tensor"]),
        ((X.double(), STATE), {"more": MORE}, ["x is float64", "takes float32", ".to(torch.float32)"]),
        ((X, (STATE[0], STATE[1].long())), {"more": MORE}, ["state.1 is int64", "takes float32"]),
        ((X.to("meta"), STATE), {"more": MORE}, ["x is on meta", "the model on cpu"]),
        ((X[0], STATE), {"more": MORE}, ["x has 1 dims, [4]", "float32[B,4], 2 dims"]),
        ((torch.stack([X] * 3), STATE), {"more": MORE}, ["x has 3 dims", "ens.each"]),
        ((X[:, :3], STATE), {"more": MORE}, ["x has 3 at axis 1", "takes 4 there"]),
        ((X[:2], STATE), {"more": MORE}, ["B = 3 at axis 0", "input x has B = 2", "equal sizes"]),
        ((widepack.each(X), STATE), {"more": MORE}, ["x has 1 dims, [4]", "float32[B,4], 2 dims"]),
        (
            (widepack.each(torch.stack([X] * 2)), STATE),
            {"more": MORE},
            ["x has shape [2, 3, 4]", "3 members", "[3, B,4]"],
        ),
        (
            (widepack.each([X, X]), STATE),
            {"more": MORE},
            ["x: one value for each member needs 3 tensors of one shape", "got a list of 2"],
        ),
        (
            (widepack.each([X, X, X[:2]]), STATE),
            {"more": MORE},
            ["x: one value for each member needs 3 tensors of one shape"],
        ),
        (
            (widepack.each([X, X, None]), STATE),
            {"more": MORE},
            ["x: one value for each member needs 3 tensors"],
        ),
        ((widepack.each([]), STATE), {"more": MORE}, ["x: one value for each member needs 3 tensors"]),
        (([X, X, X], STATE), {"more": MORE}, ["x is a list of 3", "takes a tensor"]),
    ],
)
def test_wrong_inputs_are_refused_with_one_sentence(
    forms: WideModel, args: Any, kwargs: Any, words: list[str]
) -> None:
    if "scale" not in kwargs and len(args) < 5:
        kwargs = {**kwargs, "scale": 3.0}
    with pytest.raises(InputError) as caught:
        forms(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_sizes_between_inputs_are_refused(bert: WideModel) -> None:
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    with pytest.raises(
        InputError, match=r"attention_mask has T = 7 at axis 1, but input input_ids has T = 8; equal letters"
    ):
        bert(ids, mask)
    with pytest.raises(InputError, match=r"T = 1 .*2 <= T <= 64"):
        bert(ids[:, :1], mask[:, :1])
    with pytest.raises(InputError, match=r"input_ids is bool, the model takes int64"):
        bert(ids.bool(), mask)


class Pairs(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.avg_pool1d(x, 2).mean(-1))


def test_sizes_that_are_no_multiple_of_a_factor_are_refused(tmp_path: Path) -> None:
    ens = loaded(lambda: Pairs(3, 2), tmp_path, "x=float32[B,3,2*T]")
    with pytest.raises(InputError, match=r"x has 7 at axis 2; the model takes 2\*T, a multiple of 2"):
        ens(torch.zeros(1, 3, 7))


def test_a_refused_call_runs_nothing(mlp: WideModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for bound in mlp.entry("forward").programs.of("shared"):
        monkeypatch.setattr(bound, "run", lambda *x: ran.append(x))
    with pytest.raises(InputError):
        mlp(torch.zeros(2, 63))
    assert not ran


def test_a_member_refuses_like_the_ensemble(mlp: WideModel) -> None:
    with pytest.raises(InputError, match="has 63 at axis 1"):
        mlp.member(0)(torch.zeros(2, 63))
    with pytest.raises(InputError, match="no input 'y'"):
        mlp.member(0)(y=torch.zeros(2, 64))


class Skips(nn.Module):
    """Has an optional second input, which a build may omit."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(4, 3)

    def forward(
        self, x: Tensor, first: Tensor | None = None, second: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        y = self.fc(x) * scale
        y = y if first is None else y + first
        return y if second is None else y * second


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "call", [lambda ens, x, other: ens(x, other, scale=2.0), lambda ens, x, other: ens(x, second=other)]
)
def test_an_argument_is_never_passed_to_another_input(call: Any, tmp_path: Path) -> None:
    """The entry is built from `forward(x, first, second, scale=1)` with x, second and scale=2.

    A second argument by position means `first`, and a call without scale means 1. Both calls are refused.
    """
    g = torch.Generator().manual_seed(0)
    x, other = torch.randn(3, 4, generator=g), torch.randn(3, 3, generator=g)
    kwargs = {"second": other, "scale": 2.0}
    ens = load(built(tmp_path, Skips, map(Skips, range(2)), sample=(x,), sample_kwargs=kwargs))
    close(
        ens(x, second=other, scale=2.0),
        torch.stack([run(Skips(i), (x,), {"second": other, "scale": 2.0}) for i in range(2)]),
    )
    with pytest.raises(InputError):
        call(ens, x, other)


# Forms


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_results_have_the_form_of_a_members_result(forms: WideModel) -> None:
    for seed, batch in ((0, 3), (1, 1), (2, 9)):
        args, kwargs = forms_call(batch, seed)
        y = forms(*args, **kwargs)
        assert type(y) is dict
        assert list(y) == ["y", "inner", "pair", "input", "positive", "scale"]
        assert type(y["inner"]) is tuple
        assert y["inner"][1] is None
        assert type(y["inner"][2]) is list
        assert y["scale"] == 3.0
        pair = y["pair"]
        assert isinstance(pair, Output)
        assert pair.kind == "Pair"
        assert list(pair) == ["low", "high"]
        assert pair[0] is pair["low"] is pair.low
        assert pair[-1] is pair.high
        with pytest.raises(AttributeError, match="Pair has no 'middle'; it has low, high"):
            _ = pair.middle
        with pytest.raises(KeyError):
            _ = pair["middle"]
        assert y["input"].shape == (3, batch, 4)  # Shared, expanded when the call returns
        assert y["positive"].dtype == torch.bool
        for i in range(3):
            alone = run(Forms(i).eval(), args, kwargs)
            for a, b in zip(_tensors(y), leaves(alone), strict=True):
                assert a.shape == (3, *b.shape)
                close(a[i], b)
            for a, b in zip(_tensors(forms.member(i)(*args, **kwargs)), leaves(alone), strict=True):
                close(a, b)


def _tensors(result: Any) -> list[Tensor]:
    return leaves(dict(result) if isinstance(result, Output) else result)


def test_nested_inputs_with_one_value_for_each_member(forms: WideModel) -> None:
    calls = [forms_call(2, 10 + i) for i in range(3)]
    args, kwargs = stack([a for a, _ in calls]), {"more": stack([k["more"] for _, k in calls]), "scale": 3.0}
    y = forms.each(*args, **kwargs)
    as_lists = forms.each(
        [a[0] for a, _ in calls],
        tuple([a[1][k] for a, _ in calls] for k in range(2)),
        more={"a": [k["more"]["a"] for _, k in calls]},
        scale=3.0,
    )
    for i in range(3):
        alone = leaves(run(Forms(i).eval(), *calls[i]))
        for a, b, c in zip(_tensors(y), alone, _tensors(as_lists), strict=True):
            close(a[i], b)
            assert torch.equal(a, c)


@pytest.mark.extended
def test_mixed_patterns_are_lowered_on_demand(bert: WideModel) -> None:
    case = cases.load("bert")
    ids = case.sample(3, 0)[1]["input_ids"]
    masks = [case.sample(3, 50 + i)[1]["attention_mask"] for i in range(case.N)]
    y = bert(ids, attention_mask=widepack.each(torch.stack(masks)))
    assert torch.equal(y.logits, bert(ids, widepack.each(masks)).logits)
    z = bert(input_ids=widepack.each(torch.stack([ids] * 3)), attention_mask=masks[0])
    for i in range(case.N):
        close(y.logits[i], run(case.member(i), (ids, masks[i]), {}).logits)
        close(z.logits[i], run(case.member(i), (ids, masks[0]), {}).logits)
    both = bert(widepack.each(torch.stack([ids] * 3)), widepack.each(torch.stack(masks)))
    assert torch.equal(both.logits, bert.each(torch.stack([ids] * 3), torch.stack(masks)).logits)
    assert "Each" not in repr(bert)
    assert repr(widepack.each(1)) == "widepack.each(1)"


def test_a_leaf_of_a_nested_input_with_one_value_for_each_member(forms: WideModel) -> None:
    (x, (low, _)), kwargs = forms_call(2, 0)
    highs = [forms_call(2, 20 + i)[0][1][1] for i in range(3)]
    y = forms(x, (low, widepack.each(highs)), **kwargs)
    for i in range(3):
        for a, b in zip(_tensors(y), leaves(run(Forms(i).eval(), (x, (low, highs[i])), kwargs)), strict=True):
            close(a[i], b)


def test_strides_of_inputs_do_not_change_answers(mlp: WideModel) -> None:
    x = torch.randn(4, 64)
    y = mlp(x)
    assert torch.equal(mlp(input=x), y)
    close(mlp(x.t().contiguous().t()), y)  # on some machines a product runs another kernel for this memory
    assert torch.equal(mlp(torch.stack([x, x], dim=2)[..., 0]), y)
    with torch.no_grad():
        assert torch.equal(mlp(x.clone().requires_grad_()), y)
    with torch.inference_mode():
        assert torch.equal(mlp(x.clone()), y)
    close(mlp(x[:1].expand(4, 64)), mlp(x[:1]).expand(-1, 4, -1))
    close(mlp.each(x.expand(8, 4, 64)), y)
    before = x.clone()
    mlp(x)
    assert torch.equal(x, before)


# Members


@pytest.mark.parametrize("name", quick_first(cases.NAMES))
def test_state_dicts_are_returned_bit_for_bit(name: str, artifacts: Artifacts) -> None:
    case = cases.load(name)
    ens = load(artifacts(name), warmup=False)
    assert ens.members == tuple(f"{i}" for i in range(case.N)) or ens.members == tuple(
        f"{name}-{i}" for i in range(case.N)
    )
    assert len(ens) == case.N
    for i, key in enumerate(ens.members):
        want = case.member(i).state_dict()
        got = ens.state_dict(key)
        assert set(got) == set(want)
        for k, v in want.items():
            assert got[k].dtype == v.dtype
            assert torch.equal(
                got[k].contiguous().view(-1).view(torch.uint8), v.contiguous().view(-1).view(torch.uint8)
            ), k
        fresh_one = case.model(state_dict=want) if name == "ragged_heads" else case.model()
        fresh_one.load_state_dict(got)
        args, kwargs = case.sample(3, 5)
        alone = run(fresh_one.eval(), args, kwargs)
        for a, b in zip(_tensors(ens[key](*args, **kwargs)), leaves(alone), strict=True):
            close(a, b)


def test_members_by_number_and_name(mlp: WideModel) -> None:
    x = torch.randn(2, 64)
    assert isinstance(mlp.member(3), nn.Module)
    assert torch.equal(mlp.member(3)(x), mlp[mlp.members[3]](x))
    assert torch.equal(mlp[-1](x), mlp[7](x))
    assert [m.name for m in mlp] == list(mlp.members)
    for wrong in (8, -9):
        with pytest.raises(UsageError, match=rf"there is no member {wrong}; there are 8"):
            mlp.member(wrong)
    with pytest.raises(UsageError, match=r"no member is called 'fold9'; the members are mlp-0"):
        mlp["fold9"]
    with pytest.raises(UsageError, match="no member is called"):
        mlp.state_dict("fold9")
    assert re.match(
        r"WideModel\(8 members: mlp-0, .* and 4 more; inputs input=float32\[B,64\]; cpu, eager\)", repr(mlp)
    )


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["mlp", "bert", "frozen_trunk", "ragged_heads"])
def test_load_of_some_members(name: str, artifacts: Artifacts) -> None:
    case = cases.load(name)
    path = artifacts(name)
    ens = load(path)
    some = load(path, members=[2, ens.members[0]])
    assert some.members == (ens.members[2], ens.members[0])
    assert len(some) == 2
    calls = [case.sample(3, i) for i in range(2)]
    answers = [
        _tensors(some(*calls[0][0], **calls[0][1])),
        _tensors(some.each(*stack([a for a, _ in calls]), **stack([k for _, k in calls]))),
    ]
    if name == "ragged_heads":
        answers = [[some(*calls[0][0])], [some.each(*stack([a for a, _ in calls]))]]
    for at, i in enumerate((2, 0)):
        for answer, call in zip(answers, (calls[0], calls[at])):
            for a, b in zip(answer, leaves(run(case.member(i), *call)), strict=True):
                close(a[at], b)
        assert all(torch.equal(v, case.member(i).state_dict()[k]) for k, v in some.state_dict(at).items())
    one = load(path, members=[ens.members[1]])
    alone = run(case.member(1), *calls[0])
    answer = one(*calls[0][0], **calls[0][1])
    for a, b in zip([answer] if name == "ragged_heads" else _tensors(answer), leaves(alone), strict=True):
        close(a[0], b)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"members": []}, "members is empty"),
        ({"members": [8]}, "there is no member 8"),
        ({"members": [-1]}, "there is no member -1"),
        ({"members": ["a"]}, "no member is called 'a'"),
        ({"members": [0, "mlp-0"]}, "named twice"),
        ({"strategies": "fastest"}, "unknown strategy 'fastest'; known: .*loop"),
        ({"strategies": ["wide", "loop"]}, "exclude each other"),
        ({"verify": "all"}, "verify='all' is unknown; known: sizes, hashes, off"),
        ({"backend": "tpu"}, "backend='tpu' is unknown"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"device": "cpu:3"}, "there is one CPU"),
    ],
)
def test_wrong_options_of_load(options: dict[str, Any], words: str, artifacts: Artifacts) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(artifacts("mlp"), **options)
    assert "\n" not in str(caught.value)


def test_the_options_of_a_load_have_one_default() -> None:
    """Those of `widepack.load` are those of a load on one device."""
    inner = ("gate", "trusted")
    defaults = [
        {name: p.default for name, p in inspect.signature(function).parameters.items() if name not in inner}
        for function in (load, load_here)
    ]
    assert defaults[0] == defaults[1]
    assert set(LoadArguments.__annotations__) == set(defaults[0]) - {"path", "device"}


def test_the_first_cpu_is_the_cpu(artifacts: Artifacts) -> None:
    """Launchers name a device by its kind and a number."""
    model = load(artifacts("mlp"), device="cpu:0", warmup=False)
    x = torch.randn(4, 64)
    assert model(x).device == x.to("cpu:0").device


def test_a_folder_without_an_artifact_is_refused(artifacts: Artifacts, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="it does not exist"):
        load(tmp_path / "none.wide")
    with pytest.raises(ArtifactError, match=r"without manifest\.json is not an artifact"):
        load(tmp_path)
    with pytest.raises(ArtifactError, match="expected the artifact sha256:0"):
        load(artifacts("mlp"), expect="sha256:" + "0" * 64)
    digest = load(artifacts("mlp"), warmup=False).manifest.digest
    assert load(artifacts("mlp"), expect=digest, warmup=False).manifest.digest == digest


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["mlp", "encoder", "lstm"])
def test_strategies_at_load(name: str, artifacts: Artifacts) -> None:
    case = cases.load(name)
    args, kwargs = case.sample(3, 1)
    auto, wide, loop = (load(artifacts(name), strategies=s) for s in (None, "wide", "loop"))
    assert {r.strategy for r in wide.plan.regions} == {"wide"}
    assert "loop" in {r.strategy for r in loop.plan.regions}
    want = [leaves(run(case.member(i), args, kwargs))[0] for i in range(case.N)]
    for ens in (auto, wide, loop):
        close(_tensors(ens(*args, **kwargs))[0], torch.stack(want))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strategy", [None, "loop"])
@pytest.mark.parametrize("name", ["frozen_trunk", "resnet18", "encoder", "ragged_heads"])
def test_load_without_simplification(name: str, strategy: str | None, artifacts: Artifacts) -> None:
    """Programs without simplification keep the nodes that it removes, and give the same answers."""
    case = cases.load(name)
    args, kwargs = case.sample(3, 1)
    simplified, plain = load(artifacts(name)), load(artifacts(name), strategies=strategy, simplify=False)
    for answer, captured in zip(_tensors(simplified(*args, **kwargs)), _tensors(plain(*args, **kwargs))):
        close(answer, captured)
    simple, captured_ops = (
        Counter(_ops_of(ens)) for ens in (load(artifacts(name), strategies=strategy or "auto"), plain)
    )
    assert captured_ops != simple
    if strategy == "loop":
        norm = "aten._native_batch_norm_legit_no_training.default"
        assert (norm in captured_ops) is (name != "encoder") and norm not in simple


def _ops_of(ens: WideModel) -> list[str]:
    """Returns the ops of the program of pattern `shared`, including those in the bodies of loops."""
    nodes = ens.entry("forward").programs.of("shared")[0].program.nodes
    return [inner.op for n in nodes for inner in (n.body.nodes if n.body else (n,))]


def test_simplify_is_true_or_false(artifacts: Artifacts) -> None:
    with pytest.raises(UsageError, match="simplify='no' is unknown; known: True, and False"):
        load(artifacts("mlp"), simplify="no")  # type: ignore[call-overload]


# Ensembles


def test_mean_std_and_vote(mlp: WideModel) -> None:
    """`tests/inference/test_reduce.py` has the options."""
    x = torch.randn(6, 64)
    y = mlp(x)
    p = y.softmax(-1)
    close(mlp.mean(x), y.mean(0))
    close(mlp.mean(x, of="sigmoid"), y.sigmoid().mean(0))
    weights = [1.0, 0, 0, 2.0, 0, 0, 0, 1.0]
    close(mlp.mean(x, of="softmax", weights=weights), (p[0] + 2 * p[3] + p[7]) / 4)
    close(mlp.std(x), y.std(0, correction=0))
    chosen = y.argmax(-1)
    want = [min(set(c.tolist()), key=lambda k: (-c.tolist().count(k), k)) for c in chosen.unbind(1)]
    assert mlp.vote(x).tolist() == want


def test_a_closed_model_is_refused_with_a_message(artifacts: Artifacts) -> None:
    ens = load(artifacts("mlp"))
    ens.close()
    ens.close()
    with pytest.raises(UsageError, match="closed"):
        ens(torch.zeros(1, 64))


# Threads


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["mlp", "bert"])
def test_calls_from_many_threads(name: str, artifacts: Artifacts) -> None:
    case = cases.load(name)
    ens = load(artifacts(name), warmup=False)  # the first calls also compete to bind the programs
    batches = [1, 2, 3, 200 if name == "mlp" else 40]
    calls = [case.sample(b, b) for b in batches]

    def ask(k: int) -> Tensor:
        args, kwargs = calls[k % len(calls)]
        if k % 3 == 0:
            args, kwargs = stack([args] * case.N), stack([kwargs] * case.N)
            return _tensors(ens.each(*args, **kwargs))[0]
        if name == "bert" and k % 3 == 1:
            return _tensors(
                ens(kwargs["input_ids"], widepack.each(stack([kwargs["attention_mask"]] * case.N)))
            )[0]
        return _tensors(ens(*args, **kwargs))[0]

    def work(thread: int) -> list[Tensor]:
        return [ask(thread + k) for k in range(50)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    for thread, answers in enumerate(found):
        for k, answer in enumerate(answers):
            assert torch.equal(answer, ask(thread + k))


# What is imported


def test_import_widepack_imports_no_torch() -> None:
    out = must(
        fresh(
            "import sys, widepack; print(*sorted({m.partition('.')[0] for m in sys.modules}"
            " & {'torch', 'safetensors', 'click', 'numpy'}))"
        )
    )
    assert out.strip() == ""


@pytest.mark.extended
def test_public_names_do_not_depend_on_the_order_of_imports() -> None:
    code = (
        "import widepack; widepack.BuildReport, widepack.WideModel; from widepack.inference.load import "
        "load; "
        "from widepack.building.build import build; print(callable(widepack.build), callable(widepack.load))"
    )
    assert must(fresh(code)).split() == ["True", "True"]


@pytest.mark.extended
def test_the_loader_imports_no_strategies_until_it_lowers(artifacts: Artifacts) -> None:
    code = """
import sys, torch, widepack
def rules():
    rooms = ("registry", "primitives", "capture", "lowering", "simplify", "checkpoints", "building", "tuning",
             "revision", "fused", "layers", "exporters", "optim")
    names = {m.split(".")[1] for m in sys.modules if m.startswith("widepack.")}
    others = {"click", "transformers", "widepack_cli", "widepack_bench", "cases"}
    return sorted(names.intersection(rooms)) + sorted(others & set(sys.modules))
ens = widepack.load(sys.argv[1])
x = torch.zeros(2, 64)
ens(x), ens.each(x.expand(8, 2, 64)), ens.mean(x), ens.member(0)(x), ens.state_dict(0)
print(rules())
widepack.load(sys.argv[1], strategies="loop")
print(rules())
"""
    before, after = must(fresh(code, artifacts("mlp"))).splitlines()
    assert before == "[]"
    assert {"'lowering'", "'primitives'", "'registry'"} <= set(after.strip("[]").split(", "))
    assert "'capture'" not in after
    assert "'building'" not in after


def test_the_modules_named_in_import_tests_exist() -> None:
    """A test that a module is not imported proves nothing if no module has this name."""
    rooms = {m.name for m in pkgutil.iter_modules(widepack.__path__) if m.ispkg}
    assert {
        "registry",
        "primitives",
        "capture",
        "lowering",
        "simplify",
        "checkpoints",
        "building",
        "tuning",
        "revision",
    } <= rooms
    assert {
        "fused",
        "layers",
        "exporters",
        "optim",
        "inference",
        "verification",
        "runtime",
        "ir",
        "spec",
        "system",
    } <= rooms


@pytest.mark.extended
def test_no_module_hides_a_public_function() -> None:
    """Importing a submodule sets an attribute of the package, so no submodule may be named as a function."""
    code = (
        "import importlib, pkgutil, widepack\n"
        "for m in pkgutil.walk_packages(widepack.__path__, 'widepack.'):\n"
        "    importlib.import_module(m.name)\n"
        "print([n for n in widepack.__all__ if n[0].islower() and not callable(getattr(widepack, n))])"
    )
    assert must(fresh(code)).strip() == "[]"


# The probe


def tampered(artifact: Path, folder: Path, stem: str, change: Any) -> Path:
    """Copies an artifact and changes the floating-point numbers of one tensor file, but no size."""
    shutil.copytree(artifact, folder)
    (path,) = folder.glob(f"{stem}-*.safetensors")
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        for name, row in header.items():
            if name == "__metadata__" or row["dtype"] not in ("F32", "F64"):
                continue
            start, end = row["data_offsets"]
            file.seek(8 + length + start)
            dtype = torch.float32 if row["dtype"] == "F32" else torch.float64
            values = torch.frombuffer(bytearray(file.read(end - start)), dtype=dtype)
            file.seek(8 + length + start)
            file.write(change(name, values).numpy().tobytes())
    return folder


def off(name: str, values: Tensor) -> Tensor:
    """Changes one number of one member's answers in the probe by a thousandth."""
    if ".y" in name and name.endswith(".1"):
        values = values.clone()
        values[1] *= 1.001
    return values


def other_weight(name: str, values: Tensor) -> Tensor:
    values = values.clone()
    if name == "0.weight":
        values[-1] += 1.0  # of the last member
    return values


@pytest.mark.parametrize(("stem", "change", "member"), [("probe", off, "1"), ("weights", other_weight, "7")])
def test_a_tampered_artifact_is_refused_at_load(
    stem: str, change: Any, member: str, artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tampered(artifacts("mlp"), tmp_path / "e.wide", stem, change)
    for _ in range(2):  # a refusal is not stored as a pass
        with pytest.raises(
            VerificationError, match=rf"probe: output .* of member .*{member}.* is off by"
        ) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    late = load(path, warmup=False)
    with pytest.raises(VerificationError):
        late(torch.zeros(1, 64))
    with pytest.raises(VerificationError):
        late.each(torch.zeros(8, 1, 64))
    with pytest.raises(VerificationError):
        load(path, strategies="loop")
    with pytest.raises(ArtifactError, match=rf"{stem}-.*safetensors"):
        load(path, verify="hashes")
    load(path, verify="off")(torch.zeros(1, 64))


def test_a_passed_probe_is_stored(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checked: list[str] = []
    check = probe.check

    def counted(tensors: Any, pattern: str, *rest: Any) -> None:
        checked.append(pattern)
        check(tensors, pattern, *rest)

    monkeypatch.setattr(probe, "check", counted)
    path = artifacts("mlp")
    ens = load(path)
    classes = len(ens.plans())
    assert checked == ["shared"] * classes
    assert len(list((tmp_path / "cache" / "widepack" / "probes").iterdir())) == classes
    ens(torch.zeros(1, 64))
    load(path)(torch.zeros(1, 64))
    assert checked == ["shared"] * classes
    load(path).each(torch.zeros(8, 1, 64))
    assert checked == ["shared"] * classes + ["each"] * len(ens.plans("each"))
    load(path, strategies="loop")  # another program
    assert checked[-1] == "shared"
    count = len(checked)
    load(path, strategies="loop")
    load(path, prologue=False)
    assert len(checked) == count + classes
    load(path, verify="off")
    assert len(checked) == count + classes
    ens.probe()
    assert len(checked) > count + classes  # an explicit probe runs again


def test_a_cache_that_cannot_be_written_is_ignored(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    load(artifacts("mlp"))(torch.zeros(1, 64))


def test_without_the_prologue_answers_are_the_same(artifacts: Artifacts) -> None:
    x = torch.randn(2, 3, 32, 32)
    close(load(artifacts("frozen_trunk"), prologue=False)(x), load(artifacts("frozen_trunk"))(x))


def test_a_field_of_an_output_hides_an_attribute_of_the_same_name() -> None:
    y = Output("Out", [("kind", 1), ("values", 2), ("logits", 3)])
    assert [y.kind, y.values, y.logits, y["kind"], y[2]] == [1, 2, 3, 1, 3]
    assert repr(y) == "Output(Out: kind=int, values=int, logits=int)"
    again = pytree.tree_map(lambda v: v + 1, y)
    assert isinstance(again, Output) and dict(again) == {"kind": 2, "values": 3, "logits": 4}
    with pytest.raises(AttributeError, match="Out has no 'other'; it has kind, values, logits"):
        y.other  # noqa: B018
    assert Output("Pair", [("a", 1)]).kind == "Pair"
