"""Tests ops of other libraries: `widepack.primitives.register`, and `load(allow_ops=)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import save_members
from paths import ROOT
from support import fresh, must
from torch import Tensor, nn

import widepack
from widepack.errors import ArtifactError, CaptureError, UsageError
from widepack.ir import ops
from widepack.primitives import Draw, Stacked, call, find, register
from widepack.registry.aliases import ALIASES
from widepack.registry.registry import REGISTRY
from widepack.registry.samples import SAMPLES
from widepack_artifacts.opset import EXTRA, OPS
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_bench.selftest import check_primitives

PAGE = ROOT / "docs" / "how-to" / "your-own-ops.md"


@torch.library.custom_op("widepack_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("widepack_tests::wiped", mutates_args=("x",))
def wiped(x: Tensor) -> None:
    x.zero_()


HALVED = "widepack_tests.halved.default"


@pytest.fixture(autouse=True)
def restore_registry() -> Iterator[None]:
    """Removes the registrations of each test after it."""
    yield
    for op in (HALVED, "aten.relu.default"):
        if op in REGISTRY:
            for name in set(REGISTRY[op].strategies) - {"pointwise"}:
                del REGISTRY[op].strategies[name]
    REGISTRY.pop(HALVED, None)
    SAMPLES.pop(HALVED, None)
    EXTRA.clear()
    ops.resolve.cache_clear()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        return halved(self.linear(x))


def built(folder: Path, **more: Any) -> widepack.BuildReport:
    paths, out = save_members(Net, folder, 3), folder / "e.wide"
    how = {"inputs": ["x=float32[B,3]"], "strategy": "wide", "targets": ("cpu",), **more}
    return widepack.build(paths, out, model=Net, **how)


def truth(x: Tensor) -> Tensor:
    answers = []
    for i in range(3):
        torch.manual_seed(i)
        answers.append(Net()(x))
    return torch.stack(answers).detach()


@pytest.mark.extended
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 3
    must(fresh("import os, sys; os.chdir(sys.argv[1])\n" + "\n".join(blocks), tmp_path))


@pytest.mark.extended
def test_an_op_of_another_library_is_built_and_loaded_where_it_is_allowed(tmp_path: Path) -> None:
    @register("widepack_tests::halved", "elementwise", samples_of=lambda draw: [call(draw.normal(5, 3))])
    def elementwise(w: Any, x: Any) -> Any:
        """the op is elementwise"""
        return Stacked(w.call(w.op, x.value))

    assert (
        REGISTRY[HALVED].family == "widepack_tests"
        and REGISTRY[HALVED].strategies["elementwise"].note == "the op is elementwise"
    )
    assert len(SAMPLES[HALVED](Draw(0))) == 1 and find("widepack_tests") == [REGISTRY[HALVED]]
    assert built(tmp_path).strategies["elementwise"] == 1  # the build writes torch.export programs too
    x = torch.randn(5, 3)
    with pytest.raises(
        ArtifactError,
        match=r"'widepack_tests.halved.default', which is not on the list of allowed ops; "
        r".*load\(allow_ops=\)",
    ):
        widepack.load(tmp_path / "e.wide")
    torch.testing.assert_close(
        widepack.load(tmp_path / "e.wide", allow_ops=["widepack_tests::halved"])(x), truth(x)
    )
    some = widepack.load(
        tmp_path / "e.wide", allow_ops=[halved], members=[2, 0], strategies="sequential"
    )  # lowered again
    torch.testing.assert_close(some(x), truth(x)[[2, 0]])
    report = widepack.tune(
        tmp_path / "e.wide", batches=[4], patterns=["shared"], budget_s=0.1, backends=["eager"], write=True
    )
    assert report.rows
    widepack.drop(tmp_path / "e.wide", [1], out=tmp_path / "two.wide")
    torch.testing.assert_close(
        widepack.load(tmp_path / "two.wide", allow_ops=["widepack_tests::halved.default"])(x),
        truth(x)[[0, 2]],
    )


def test_the_selftest_uses_samples_registered_in_this_process() -> None:
    register(halved, "elementwise")(lambda w, x: Stacked(w.call(w.op, x.value)))
    assert check_primitives("ci", [HALVED]) == (
        [],
        [f"{HALVED} elementwise"],
    )  # the check runs no strategy without samples
    register(halved, "wrong", samples_of=lambda draw: [call(draw.normal(5, 3))])(
        lambda w, x: Stacked(w.call("neg", x.value))
    )
    checked, untried = check_primitives("ci", [HALVED])
    assert {c.strategy: bool(c.wrong) for c in checked} == {
        "elementwise": False,
        "wrong": True,
        "sequential": False,
    } and not untried


def test_ops_allowed_for_one_load_are_not_allowed_for_the_next(tmp_path: Path) -> None:
    register("widepack_tests::halved", "elementwise")(lambda w, x: Stacked(w.call(w.op, x.value)))
    built(tmp_path, pt2=False)
    REGISTRY.pop(HALVED)
    EXTRA.clear()
    ens = widepack.load(tmp_path / "e.wide", allow_ops=["widepack_tests::halved"])
    x = torch.randn(5, 3)
    torch.testing.assert_close(ens(x), truth(x))
    with pytest.raises(ArtifactError, match="not on the list"):
        widepack.load(tmp_path / "e.wide")
    torch.testing.assert_close(
        ens.each(torch.stack([x] * 3)), truth(x)
    )  # a program that is read later is checked with the allow_ops of this load


def test_an_op_that_nobody_registered_is_refused_at_build(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"widepack_tests.halved.default.*an op that widepack does not know"
    ):
        built(tmp_path)


@pytest.mark.slow
def test_an_op_runs_once_for_each_member_where_no_strategy_applies(tmp_path: Path) -> None:
    register(halved, "never", when=lambda w, x: False)(lambda w, x: x)
    assert built(tmp_path, pt2=False).strategies["sequential"] == 1
    x = torch.randn(2, 3)
    torch.testing.assert_close(widepack.load(tmp_path / "e.wide", allow_ops=[halved])(x), truth(x))


def test_a_wrong_strategy_is_refused_at_build(tmp_path: Path) -> None:
    register(halved, "wrong")(lambda w, x: Stacked(w.call("neg", x.value)))
    with pytest.raises(widepack.VerificationError):
        built(tmp_path, pt2=False)
    assert not (tmp_path / "e.wide").exists()


def test_a_users_strategy_for_a_known_op_comes_last() -> None:
    register("aten::relu", "clamped")(lambda w, x: Stacked(w.call("clamp_min", x.value, 0)))
    assert list(REGISTRY["aten.relu.default"].strategies) == ["pointwise", "clamped"]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("halved", "'halved' does not name an op of a library"),
        ("operator.attrgetter", "does not name an op of a library"),
        ("widepack::linear", "does not name an op of a library"),
        ("torch.ops.aten.relu.default", "does not name an op of a library"),
        (print, "does not name an op of a library"),
        (
            "widepack_tests::nothing",
            r"the op widepack_tests::nothing.default does not exist; import the library",
        ),
        ("nolib::nothing", r"the op nolib::nothing.default does not exist; import the library"),
        ("widepack_tests::halved.out", r"the op widepack_tests::halved.out does not exist"),
        ("widepack_tests::wiped", r"widepack_tests::wiped.default writes into its arguments"),
        ("aten::add_.Tensor", r"aten::add_.Tensor writes into its arguments"),
    ],
)
def test_an_op_that_is_not_functional_is_refused(op: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        register(op, "mine")
    with pytest.raises(UsageError, match=message):
        widepack.load(tmp_path, allow_ops=[op])
    assert not EXTRA


def test_a_single_name_instead_of_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"allow_ops='mylib::op' is one name; give a list"):
        widepack.load(tmp_path, allow_ops="mylib::op")


@pytest.mark.parametrize("name", ["", "sequential", "loop", "auto", "wide", "two words", "a,b", 3])
def test_a_reserved_name_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="cannot be a strategy's name"):
        register("aten::relu", name)


def test_a_second_registration_is_refused_early() -> None:
    register(halved, "one", samples_of=lambda draw: [call(draw.normal(2))])(lambda w, x: x)
    with pytest.raises(UsageError, match=r"has a strategy 'one' already, in .*test_user_ops\.py"):
        register(halved, "one")
    with pytest.raises(UsageError, match=r"has samples already, in .*test_user_ops\.py"):
        register(halved, "two", samples_of=lambda draw: [call(draw.normal(2))])
    REGISTRY.pop(HALVED), SAMPLES.pop(HALVED)
    with pytest.raises(UsageError, match=r"returned no calls\. Return at least one call"):
        register(halved, "one", samples_of=lambda draw: [])


def test_a_program_may_only_contain_ops_that_its_reader_allows() -> None:
    slot = Slot("x", "x", "shared", "float32[B]")
    with_op = Program((), (slot,), (Node("y", HALVED, (Ref("x"),)),), (Output(Ref("y"), "shared"),))
    with pytest.raises(ArtifactError, match="not on the list"):
        with_op.check()
    Program.from_json(with_op.to_json(), {HALVED})
    ops.allow([halved])
    with_op.check()
    with pytest.raises(ArtifactError, match="not on the list"):
        Program.from_json(with_op.to_json(), frozenset())
    body = Program((), (slot,), with_op.nodes, with_op.outputs, 0)
    loop = Program((), (slot,), (Node("l", "loop", (Ref("x"),), {}, "", "", "", body),), (), 2)
    with pytest.raises(ArtifactError, match="not on the list"):
        loop.check(extra=frozenset())


def test_aliases_name_registered_ops() -> None:
    for name, meant in ALIASES.items():
        assert meant and all(op in REGISTRY and op in OPS for op in meant), name
    for typed in ("Conv2d", "nn.Conv2d", "torch.nn.Conv2d", "conv_2d", "conv2d"):
        assert find(typed)[0].op == "aten.conv2d.default", typed
    assert [p.op for p in find("RNN")] == ["aten.rnn_tanh.input", "aten.rnn_relu.input"]
    assert find("max.dim")[0].op == "aten.max.dim" and {p.family for p in find("conv")} == {"conv"}
    assert find("attention")[0].op == "aten.scaled_dot_product_attention.default" and find("linaer") == []
