"""Tests factories, and the alignment of checkpoints: kinds, ties, and one error for all differences."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
from widepack.checkpoints.alignment import align
from widepack.checkpoints.checkpoint import Checkpoint
from widepack.checkpoints.differences import bit_equal
from widepack.checkpoints.discovery import open_all, places_of
from widepack.checkpoints.factory import load_factory
from widepack.checkpoints.state_dict import TensorInfo
from widepack.errors import MemberMismatch, UsageError
from widepack_artifacts.manifest_weights import Weight

# --- factories
# ----------------------------------------------------------------------

CODE = '''
"""A user's file."""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        if width % 2:
            raise ValueError("width must be even")
        self.fc = nn.Linear(3, width)

    @classmethod
    def small(cls):
        return cls(2)

def sized(state_dict=None):
    return Net(4 if state_dict is None else state_dict["fc.weight"].shape[0])

def loose(**kwargs):
    assert "state_dict" not in kwargs
    return Net()

def quits(): raise SystemExit(3)

def number(): return 3

one = Net()
def same(): return one
width = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "usernet.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    assert sys.path == before
    for name in set(sys.modules) - modules:
        if name.startswith(("usernet", "_widepack_model", "userpack", "broken")):
            del sys.modules[name]


@pytest.mark.parametrize("model", ["usernet:Net", "usernet.py:Net", "./usernet.py:Net", "usernet:Net.small"])
def test_a_factory_makes_fresh_modules_in_their_own_mode(folder: Path, model: str) -> None:
    factory = load_factory(model, {})
    a, b = factory(), factory({"fc.weight": torch.zeros(8, 3)})
    assert a is not b
    assert a.training  # a module's own eval() may read the weights, which are loaded first
    assert not factory.takes_state_dict
    assert [p.shape for p in a.parameters()] == [p.shape for p in b.parameters()]
    assert not torch.equal(next(a.parameters()), next(b.parameters()))  # each call draws fresh weights


def test_arguments_and_state_dict_reach_the_factory(folder: Path) -> None:
    assert load_factory("usernet:Net", {"width": 6})().get_submodule("fc").out_features == 6
    sized = load_factory("usernet:sized", {})
    assert sized.takes_state_dict
    assert sized({"fc.weight": torch.zeros(8, 3)}).get_submodule("fc").out_features == 8
    assert sized().get_submodule("fc").out_features == 4
    loose = load_factory("usernet:loose", {"anything": 1})
    assert not loose.takes_state_dict  # **kwargs alone does not accept a state dict
    loose({})
    assert repr(load_factory("usernet:Net", {"width": 6})) == "Factory(usernet:Net(width=6))"


def test_a_callable_is_a_factory() -> None:
    assert isinstance(load_factory(lambda: nn.Linear(1, 1))(), nn.Linear)
    assert isinstance(load_factory(nn.Linear, {"in_features": 1, "out_features": 1})(), nn.Linear)

    class Maker:
        def __call__(self, state_dict: Mapping[str, Tensor] | None = None) -> nn.Module:
            return nn.Identity()

    assert load_factory(Maker()).takes_state_dict
    assert load_factory(Maker()).name == "Maker"


def test_a_file_of_a_package_keeps_its_relative_imports(folder: Path) -> None:
    for path, text in {
        "__init__.py": "",
        "inner/__init__.py": "",
        "inner/net.py": "from ..parts import make",
        "parts.py": "from usernet import Net as make",
    }.items():
        file = folder / "userpack" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    net = load_factory("userpack/inner/net.py:make", {})()
    assert type(net).__name__ == "Net"
    assert type(net) is type(load_factory("userpack.inner.net:make", {})())


def test_a_file_of_a_package_is_the_module_that_is_imported_already() -> None:
    file = Path(cases.__file__).with_name("mlp.py")
    assert load_factory(f"{file}:model")._make is cases.load("mlp").model


def test_a_lone_file_is_imported_once_and_again_when_it_changes(folder: Path) -> None:
    assert type(load_factory("usernet.py:Net")()) is type(load_factory("./usernet.py:Net")())
    file = folder / "torch.py"  # a name that another module has
    file.write_text(CODE)
    assert load_factory("torch.py:Net")().get_submodule("fc").out_features == 4
    file.write_text(CODE.replace("width=4", "width=8") + "\n")
    os.utime(file, ns=(1, 1))
    assert load_factory("torch.py:Net")().get_submodule("fc").out_features == 8
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        ("usernet", {}, "does not name a factory: write pkg.mod:factory or path/file.py:factory"),
        ("usernet:", {}, "does not name a factory"),
        ("nowhere.at.all:Net", {}, "there is no module 'nowhere', neither installed nor in "),
        ("usernet.sub:Net", {}, "there is no module 'usernet.sub'"),
        ("missing.py:Net", {}, "there is no file missing.py"),
        ("./usernet:Net", {}, "there is no file ./usernet"),
        (
            "usernet:Nett",
            {},
            "usernet has no 'Nett'; did you mean Net? It defines Net, loose, number, quits, same, sized.",
        ),
        ("usernet:Xyzzy", {}, "usernet has no 'Xyzzy'. It defines Net, loose, number, quits, same, sized."),
        ("usernet:Net.big", {}, "usernet:Net has no 'big'"),
        ("usernet:one", {}, "is a module, not a factory"),
        ("usernet:width", {}, "is an int; a factory is a class or function"),
        ("usernet:Net", {"width": 3}, "usernet:Net(width=3) raised ValueError: width must be even ("),
        ("usernet:Net", {"wdith": 3}, "unexpected keyword argument 'wdith'"),
        ("usernet:Net", {"wdith": 3}, "it takes (width=4)"),
        ("usernet:Net", {"state_dict": 3}, "widepack itself passes state_dict"),
        ("usernet:number", {}, "returned an int; a factory returns a torch.nn.Module"),
        ("usernet:quits", {}, "SystemExit, which ends the program"),
        (
            "broken_import:Net",
            {},
            "importing broken_import raised ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("broken_syntax:Net", {}, "importing broken_syntax raised SyntaxError: "),
        ("broken_run.py:Net", {}, "importing broken_run.py raised ZeroDivisionError: division by zero ("),
        ("broken_exit:Net", {}, "importing broken_exit raised SystemExit"),
    ],
)
def test_errors_of_factories_that_cannot_be_loaded(
    folder: Path, model: str, args: dict[str, object], words: str
) -> None:
    (folder / "broken_import.py").write_text("import nothing_of_this_name")
    (folder / "broken_syntax.py").write_text("def (")
    (folder / "broken_run.py").write_text("x = 1\n1 / 0")
    (folder / "broken_exit.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(UsageError) as caught:
        load_factory(model, args)()
    assert words in str(caught.value)
    assert str(caught.value).startswith("model ")
    assert "\n" not in str(caught.value)


def test_the_error_names_the_line_of_the_user(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"usernet.py:10\)$"):
        load_factory("usernet:Net", {"width": 3})()


def test_a_factory_that_gives_the_same_module_twice(folder: Path) -> None:
    factory = load_factory("usernet:same")
    kept = factory()
    assert isinstance(kept, nn.Module)
    with pytest.raises(UsageError, match="returned the same module twice"):
        factory()


# --- alignment
# ----------------------------------------------------------------------


def saved(folder: Path, states: list[dict[str, Tensor]]) -> list[Checkpoint]:
    paths = [folder / f"{i}.pt" for i in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    return open_all(places_of([str(path) for path in paths]))


def names(checkpoints: list[Checkpoint]) -> list[str]:
    return [f"m{i}" for i in range(len(checkpoints))]


def filled(*shape: int, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("case", cases.NAMES)
def test_the_cases_align(case: str, tmp_path: Path) -> None:
    module = cases.load(case)
    checkpoints = open_all(places_of([str(p) for p in cases.write_checkpoints(case, tmp_path)]))
    members = [module.member(i) for i in range(module.N)]
    factory = load_factory(module.model)
    model_state = factory(checkpoints[0].state_dict()).state_dict()
    found = align(checkpoints, names(checkpoints), "auto", model_state, factory.takes_state_dict)
    kinds: dict[str, set[str]] = {}
    for weight in found.weights:
        kinds.setdefault(weight.kind, set()).add(weight.name)
    if case == "frozen_trunk":
        assert all(name.startswith("trunk.") for name in kinds["shared"])
        assert kinds["stacked"] == {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}
    elif case == "ragged_heads":
        assert kinds["ragged"] == {"head.weight", "head.bias"}
        assert found.signatures == (0, 1, 2)
    else:
        assert all("num_batches_tracked" in name for name in kinds.get("shared", ()))
        assert "ragged" not in kinds
        assert found.signatures == (0,) * module.N
    for i, member in enumerate(members):
        state = found.state_dict(i)
        assert all(bit_equal(state[k], v) for k, v in member.state_dict().items())
        factory(state).load_state_dict(state)


def test_kinds_are_found_from_the_bits(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), 1.0])
    other = nan.view(torch.int32).clone()
    other[0] += 1  # a NaN with different bits
    late = torch.cat([filled(4999), filled(1, value=1)])
    weights = {  # of two members, and the kind
        "same": (filled(2, 2), filled(2, 2), "shared"),
        "nan": (nan, nan.clone(), "shared"),
        "nan_bits": (nan, other.view(torch.float32), "stacked"),
        "zero": (filled(1), filled(1, value=-0.0), "stacked"),
        "late": (filled(5000), late, "stacked"),
        "empty": (filled(0, 3), filled(0, 3), "shared"),
        "scalar": (torch.tensor(1), torch.tensor(1), "shared"),
    }
    states = [{name: row[0] for name, row in weights.items()}, {n: row[1] for n, row in weights.items()}]
    checkpoints = saved(tmp_path, states)
    found = align(checkpoints, ["a", "b"])
    assert {w.name: w.kind for w in found.weights} == {name: row[2] for name, row in weights.items()}
    assert {w.kind for w in align(checkpoints, ["a", "b"], "none").weights} == {"stacked"}
    assert {w.kind for w in align(checkpoints[:1], ["a"]).weights} == {"stacked"}
    assert found.weights[0] == Weight("same", "shared", "float32", [2, 2], "")
    assert found.names == ("a", "b")


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def members(draw: st.DrawFn) -> tuple[list[dict[str, Tensor]], dict[str, str]]:
    """Draws states of 2 to 4 members. Returns them with the kind of each weight."""
    count = draw(st.integers(2, 4))
    states: list[dict[str, Tensor]] = [{} for _ in range(count)]
    kinds = {}
    for w in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["shared", "stacked", "ragged"]))
        rank, dtype = draw(st.integers(1 if kind == "ragged" else 0, 3)), draw(st.sampled_from(DTYPES))
        shape = [draw(st.integers(1, 3)) for _ in range(rank)]
        base = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(w)).to(dtype)
        odd = draw(st.integers(1, count - 1))
        for i, state in enumerate(states):
            value = base.clone()
            if kind == "ragged" and i == odd:
                value = torch.cat([value, value])
            if kind == "stacked" and i == odd:
                last = value.reshape(-1)[-1]
                last.copy_(torch.ones_like(last) ^ last if dtype is torch.bool else 1 - last)
            state[f"w{w}"] = value
        kinds[f"w{w}"] = kind
    return states, kinds


@settings(max_examples=60, deadline=None)
@given(members())
def test_any_members_align(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[dict[str, Tensor]], dict[str, str]]
) -> None:
    states, kinds = drawn
    checkpoints = saved(tmp_path_factory.mktemp("align"), states)
    found = align(checkpoints, names(checkpoints), ragged=True)
    assert {w.name: w.kind for w in found.weights} == kinds
    for i, state in enumerate(states):
        assert all(bit_equal(found.tensor(i, name), tensor) for name, tensor in state.items())
    for weight in found.weights:
        shapes = [list(s[weight.name].shape) for s in states]
        assert weight.shape == (shapes if weight.kind == "ragged" else shapes[0])
    if "ragged" in kinds.values():
        with pytest.raises(MemberMismatch, match="state_dict="):
            align(checkpoints, names(checkpoints))


def test_bits_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widepack.checkpoints.differences._PIECE_BYTES", 4096)
    a = torch.arange(10000)
    for at in (0, 1023, 1024, 1535, 1536, 9999):
        b = a.clone()
        b[at] += 1
        assert not bit_equal(a, b)
    assert bit_equal(a, a.clone())
    assert bit_equal(a.view(100, 100).T, a.view(100, 100).T.contiguous())
    assert not bit_equal(a, a.to(torch.int32))
    assert not bit_equal(a, a.view(100, 100))


def test_a_comparison_stops_at_the_first_member_that_differs() -> None:
    read: list[int] = []

    def member(i: int) -> Checkpoint:
        def get(name: str) -> Tensor:
            read.append(i)
            return filled(3, value=float(i > 0))

        return Checkpoint(str(i), {"w": TensorInfo("float32", (3,))}, get, [(__file__, os.stat(__file__))])

    assert align([member(i) for i in range(5)], list("abcde")).weights[0].kind == "stacked"
    assert read == [0, 1]


def test_all_differences_in_one_error(tmp_path: Path) -> None:
    first = {"fc.weight": filled(10, 128), "fc.bias": filled(10), "norm": filled(4), "deep": filled(2)}
    states = [
        first,
        first,
        {k: v for k, v in first.items() if k != "norm"} | {"extra": filled(1), "another": filled(1)},
        first
        | {"fc.weight": filled(10, 64), "fc.bias": filled(10, dtype=torch.float16), "deep": filled(2, 1)},
    ]
    checkpoints = saved(tmp_path, states)
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints, names(checkpoints))
    who = [f"checkpoint {i} ({tmp_path}/{i}.pt)" for i in range(4)]
    message, _, hints = str(caught.value).partition(". ")
    assert message == (
        f"the members do not match, 5 differences: (1) {who[2]} lacks norm, which {who[0]} has; (2) {who[2]} "
        f"has another, extra, which {who[0]} does not have; (3) {who[3]}: deep is [2, 1] float32; {who[0]} "
        f"has [2] float32; (4) {who[3]}: fc.weight is [10, 64] float32; {who[0]} has [10, 128] float32; (5) "
        f"the floating weights have other dtypes: float32 in {', '.join(who[:3])}; float32 (3 weights), "
        f"float16 (1 weight) in {who[3]}"
    )
    assert "\n" not in hints
    ranks = "other ranks are another architecture."
    for hint in ("of one architecture.", ranks, "Give --dtype float32", "a parameter `state_dict=`"):
        assert hint in hints
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints[:2] + checkpoints[3:], ["a", "b", "c"], ragged=True)
    assert "fc.weight" not in str(caught.value)
    assert "deep is [2, 1]" in str(caught.value)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    states = [{"a": filled(2 + i), "b": filled(2 + i)} for i in range(9)]
    checkpoints = saved(tmp_path, states)
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints, names(checkpoints))
    assert "the members do not match, 16 differences: (1) checkpoint 1" in str(caught.value)
    assert "; and 12 more. Heads of other sizes need a factory" in str(caught.value)
    assert str(caught.value).count("float32") == 8


def test_the_error_for_one_difference_is_one_paragraph(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, [{"fc.weight": filled(10, 128)}, {"fc.weight": filled(10, 64)}])
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints, ["a", "b"])
    assert str(caught.value) == (
        f"checkpoint 1 ({tmp_path}/1.pt): fc.weight is [10, 64] float32; checkpoint 0 ({tmp_path}/0.pt) has "
        "[10, 128] float32. Heads of other sizes need a factory with a parameter `state_dict=` that sizes "
        "the module by the weights."
    )


def test_differences_from_the_model_name_both_sides(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).state_dict()
    odd = {"weight": filled(2, 4), "bias": filled(2)}
    checkpoints = saved(tmp_path, [odd, dict(model), odd])
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints, ["a", "b", "c"], model_state=model)
    assert str(caught.value).startswith(
        f"the members do not match, 3 differences: (1) checkpoint 0 ({tmp_path}/0.pt): weight is [2, 4] "
        f"float32; the model has [2, 3] float32; (2) checkpoint 1 ({tmp_path}/1.pt): weight is [2, 3] "
        f"float32; checkpoint 0 ({tmp_path}/0.pt) has [2, 4] float32; (3) checkpoint 2 ({tmp_path}/2.pt): "
        "weight is [2, 4] float32; the model has [2, 3] float32. "
    )
    checkpoints = saved(
        tmp_path, [{"weight": filled(2, 3)}, {"weight": filled(2, 3), "bias": filled(2), "old": filled(1)}]
    )
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints, ["a", "b"], model_state=model)
    assert f"checkpoint 0 ({tmp_path}/0.pt) lacks bias, which the model has" in str(caught.value)
    assert f"checkpoint 1 ({tmp_path}/1.pt) has old, which the model does not have" in str(caught.value)
    assert "the one that --model with its arguments makes" in str(caught.value)
    with pytest.raises(
        MemberMismatch,
        match=r"other dtypes: float32 in the model; float16 in checkpoint 0 \(.*\)\. Give --dtype float16",
    ):
        align(saved(tmp_path, [{k: v.half() for k, v in model.items()}]), ["a"], model_state=model)


def test_the_error_for_two_architectures_is_one_paragraph(tmp_path: Path) -> None:
    states = [dict(cases.load(name).model().state_dict()) for name in ("resnet18", "vit")]
    checkpoints = saved(tmp_path, states)
    with pytest.raises(MemberMismatch) as caught:
        align(checkpoints, ["a", "b"])
    assert "and 102 more, which checkpoint 0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_one_weight_with_two_names(tmp_path: Path) -> None:
    states = [dict(Tied().state_dict()) for _ in range(3)]
    model = Tied().state_dict()
    found = align(saved(tmp_path, states), ["a", "b", "c"], model_state=model)
    assert found.weights == (Weight("embed.weight", "stacked", "float32", [5, 4], "", ["head.weight"]),)
    assert torch.equal(found.tensor(1, "head.weight"), states[1]["head.weight"])
    assert set(found.state_dict(2)) == {"embed.weight", "head.weight"}

    save_file(
        {"head.weight": states[1]["head.weight"].clone()}, tmp_path / "one.safetensors"
    )  # safetensors keeps one name of a tied weight
    found = align(
        open_all(places_of([str(tmp_path / "0.pt"), str(tmp_path / "one.safetensors")])),
        ["a", "b"],
        model_state=model,
    )
    assert [(w.name, w.aliases) for w in found.weights] == [("head.weight", ["embed.weight"])]
    assert torch.equal(found.tensor(1, "embed.weight"), states[1]["embed.weight"])
    Tied().load_state_dict(found.state_dict(1))

    untied = {"embed.weight": filled(5, 4), "head.weight": filled(5, 4, value=1)}
    with pytest.raises(
        MemberMismatch,
        match=r"(?s)checkpoint 1 .* head.weight and embed.weight differ, but are one tensor in the model"
        r".*give a model that does not tie them",
    ):
        align(saved(tmp_path, [states[0], untied]), ["a", "b"], model_state=model)


@pytest.mark.parametrize("mode", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_ties_are_seen_in_a_model_without_data(tmp_path: Path, mode: AbstractContextManager[Any]) -> None:
    with mode:
        model = Tied().state_dict()
    found = align(saved(tmp_path, [dict(Tied().state_dict())]), ["a"], model_state=model)
    assert [w.aliases for w in found.weights] == [["head.weight"]]


def test_a_wrapped_model_gets_its_prefix_back(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2)

    states = [dict(Wrapped().state_dict()) for _ in range(2)]
    found = align(saved(tmp_path, states), ["a", "b"], model_state=Wrapped().state_dict())
    assert [w.name for w in found.weights] == ["module.weight", "module.bias"]
    assert torch.equal(found.tensor(1, "module.bias"), states[1]["module.bias"])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: align(c, ["a", "b"], "some"), "share='some' is unknown; known: auto, none"),
        (lambda c: align(c, ["a"]), "2 checkpoints and 1 names"),
        (lambda c: align([], []), "0 checkpoints and 0 names"),
        (lambda c: align(c, ["a", "a"]), "a is given twice"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path: Path, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        call(saved(tmp_path, [{"w": filled(1)}] * 2))
    assert words in str(caught.value)
