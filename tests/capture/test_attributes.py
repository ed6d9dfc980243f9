"""Plain attributes: what is found in modules, and builds whose members differ in something that is no weight: refused where it is in the program, else built."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from widepack.verification import same_program as alike
from widepack.capture import capture
from widepack.building import entry as job
from widepack import build, load
from widepack.capture.attributes import attributes_of, differences, in_words
from widepack.errors import CaptureError, LoweringError, MemberMismatch, VerificationError, WidepackError
from widepack.verification.op_record import Recorded, first_difference
from widepack_cli.main import cli

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}
X = ["x=float32[B,6]"]
Act = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Two layers, and whatever a test puts beside them."""

    def __init__(self, act: Act = torch.relu, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=eps)
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:  # [B, 6]
        return self.last(self.act(self.first(self.norm(x))))


def save(folder: Path, make: Callable[[], nn.Module] = Net, count: int = 3) -> list[str]:
    paths = [str(folder / f"m{i}.pt") for i in range(count)]
    for i, path in enumerate(paths):
        torch.manual_seed(i)
        torch.save(make().state_dict(), path)
    return paths


def in_turn(make: Callable[[Any], nn.Module], *values: Any) -> Callable[[], nn.Module]:
    """A factory that is not deterministic: each call takes the next value."""
    turns = itertools.cycle(values)
    return lambda: make(next(turns))


def by_member(make: Callable[[Any], nn.Module], *values: Any) -> Callable[..., nn.Module]:
    """A factory that gives member i, known by its last bias, the value i: what pickled modules or a factory that looks at the weights may do."""

    def factory(state_dict: Mapping[str, Tensor]) -> nn.Module:
        return make(values[int(state_dict["last.bias"][0])])

    return factory


def numbered(folder: Path, make: Callable[[], nn.Module] = Net, count: int = 3) -> list[str]:
    paths = save(folder, make, count)
    for i, path in enumerate(paths):
        state = torch.load(path)
        state["last.bias"][0] = i
        torch.save(state, path)
    return paths


def refused(error: type[WidepackError], folder: Path, paths: list[str], **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        build(paths, folder / "e.wide", **{"inputs": X, **QUICK, **kwargs})
    assert not (folder / "e.wide").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def right(folder: Path, paths: list[str], model: Callable[..., nn.Module], plain: Callable[[], nn.Module] = Net) -> None:
    """The build answers as the members alone."""
    build(paths, folder / "e.wide", model=model, inputs=X, **QUICK)
    x = torch.randn(7, 6)
    y = load(folder / "e.wide")(x)
    for own, path in zip(y, paths):
        member = plain().eval()
        member.load_state_dict(torch.load(path))
        with torch.no_grad():
            torch.testing.assert_close(own, member(x))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One row for every capture of a build."""
    made: list[int] = []
    own = capture.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(len(made))
        return own(*args, **kwargs)

    monkeypatch.setattr(job, "capture", counted)
    return made


# What is found


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclass
class Config:
    eps: float = 1e-5
    sizes: list[int] = field(default_factory=lambda: [3, 4])
    nested: dict[str, Any] = field(default_factory=lambda: {"scale": 0.5, "deep": SimpleNamespace(flag=True)})
    scale: int = 0

    def most(self) -> int:
        return self.scale


def default(k: int) -> dict[str, int]:
    return defaultdict(lambda: k)


class Words(str):
    """A text with a number of its own."""

    def __new__(cls, text: str, number: int) -> Words:
        made = super().__new__(cls, text)
        made.number = number
        return made

    number: int


class Mangled:
    __slots__ = ("__k",)

    def __init__(self, k: int = 3) -> None:
        self.__k = k

    @property
    def most(self) -> int:
        return self.__k


class Slots:
    __slots__ = ("one", "two")

    def __init__(self) -> None:
        self.one = 1


Point = collections.namedtuple("Point", ["x", "y"])


def of(**values: Any) -> dict[str, str]:
    module = nn.Module()
    module.inner = nn.Module()
    for name, value in values.items():
        setattr(module.inner, name, value)
    return {k.removeprefix("inner."): v for k, v in attributes_of(module).items()}


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (0.1, {"a": "0.1"}),
        (float("nan"), {"a": "nan"}),
        (None, {"a": "None"}),
        (torch.float16, {"a": "torch.float16"}),
        (torch.Size([2, 3]), {"a.0": "2", "a.1": "3"}),
        ([1, (2.0, "x")], {"a.0": "1", "a.1.0": "2.0", "a.1.1": "'x'"}),
        ([], {"a": "an empty list"}),
        ({"k": 1, 2: True}, {"a.k": "1", "a.2": "True"}),
        ({3, 1}, {"a.0": "1", "a.1": "3"}),
        (Point(1, 2), {"a.x": "1", "a.y": "2"}),
        (Mode.SLOW, {"a": "Mode.SLOW"}),
        (Path("x/y"), {"a": "PosixPath('x/y')"}),
        (np.float64(0.1), {"a": "float64(0.1)"}),
        (np.arange(3), {"a": "int64([0, 1, 2])"}),
        (functools.partial(pow, 2, mod=3), {"a.func": "builtins.pow", "a.0": "2", "a.mod": "3"}),
        (
            Config(),
            {
                "a": "a Config",
                "a.eps": "1e-05",
                "a.sizes.0": "3",
                "a.sizes.1": "4",
                "a.nested.scale": "0.5",
                "a.nested.deep": "a SimpleNamespace",
                "a.nested.deep.flag": "True",
                "a.scale": "0",
            },
        ),
        (Slots(), {"a": "a Slots", "a.one": "1"}),
        (torch.ones(2), {"a": "float32[2] [1.0, 1.0]"}),
        (torch.tensor(7), {"a": "int64[] 7"}),
        ({("enc", 0): 1}, {"a.('enc', 0)": "1"}),
        (MappingProxyType({"k": 1}), {"a.k": "1"}),
        (Mangled(), {"a": "a Mangled", "a._Mangled__k": "3"}),
        (torch.Generator(), {}),
        (threading.Lock(), {}),
        (np, {}),
    ],
)
def test_values_as_rows(value: Any, rows: dict[str, str]) -> None:
    found = of(a=value)
    assert found == rows


def test_equal_modules_have_equal_rows_and_no_address_is_in_them() -> None:
    def make() -> nn.Module:
        scale = 0.5
        return nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16), nn.LSTM(8, 4, 2), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), Net(lambda x: x * scale)
        )

    one, other = make(), make()
    assert attributes_of(one) == attributes_of(other)
    assert not any(" at 0x" in text for text in attributes_of(one).values())
    assert attributes_of(one)["3.act.scale"] == "0.5"
    assert attributes_of(one)["0.norm1.eps"] == "1e-05"
    assert attributes_of(one.eval()) == attributes_of(other.train())  # the mode is no attribute of this kind


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (list(range(100)), [*range(99), 7]),
        ({str(i): i for i in range(100)}, {str(i): i + (i == 50) for i in range(100)}),
        (np.zeros(100), np.eye(10).reshape(-1)),
        (np.zeros((10, 10)), np.zeros(100)),
        (np.zeros(3_000_000), np.concatenate([np.zeros(2_999_999), np.ones(1)])),
        (Config(nested={"deep": {"deeper": [1]}}), Config(nested={"deep": {"deeper": [2]}})),
        ({"a", "b"}, {"a", "c"}),
        ([], ()),
        (torch.relu, torch.tanh),
        (torch.arange(9), torch.arange(1, 10)),
        (torch.zeros(9), torch.zeros(3, 3)),
        (torch.zeros(3_000_000), torch.cat([torch.zeros(2_999_999), torch.ones(1)])),
        (torch.zeros(4, 4).t(), torch.eye(4).t()),
        (memoryview(b"ab"), memoryview(b"ac")),
        (default(1), default(2)),
        (Words("a", 1), Words("a", 2)),
        (Config(scale=1).most, Config(scale=2).most),
        ({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}, {"a": {"b": {"c": {"d": {"e": {"f": 2}}}}}}),
    ],
)
def test_values_that_differ(one: Any, other: Any) -> None:
    assert of(a=one) == of(a=one)
    assert differences(of(a=one), of(a=other))


def test_what_refers_to_itself_or_is_deep_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    assert of(a=loop) == {"a.0": "1"}
    assert of(a=deep) == {}
    module = nn.Linear(2, 2)
    object.__setattr__(module, "owner", SimpleNamespace(module=module))
    assert attributes_of(module)["owner"] == "a SimpleNamespace"
    many = of(a={str(i): {str(j): j for j in range(60)} for i in range(60)}, b={str(i): list(range(60)) for i in range(60)})
    assert len(many) <= 20_000


def test_differences_in_words_name_numbers_first() -> None:
    found = differences({"a": "'text'", "b": "1", "gone": "2"}, {"a": "'other'", "b": "3", "long": "x" * 399})
    assert [d.path for d in found] == ["b", "gone", "long", "a"]
    text = in_words(found, "member a", "member b")
    assert text.startswith("b: 1 in member a, 3 in member b; gone: 2 in member a, nothing in member b; ")
    assert "(399 characters)" in text
    assert in_words(found * 2, "a", "b").endswith("; and 3 more")


def test_what_a_call_does() -> None:
    def did(scale: Any, text: str = "none") -> Recorded:
        found = Recorded()
        with found, torch.no_grad():
            x = torch.ones(2, 3)
            torch.nn.functional.gelu(x, approximate=text).clamp(max=scale) + torch.tensor(scale)
        return found

    assert first_difference(did(1.0).did, did(1.0).did) == (-1, "")
    assert "clamp" in first_difference(did(1.0).did, did(2.0).did)[1]
    assert "tanh" in first_difference(did(1.0).did, did(1.0, "tanh").did)[1]
    assert first_difference(did(1.0).did, did(1.0).did[:2])[1].endswith("ops and 2")


# Refused: another program


def clamped(bound: float) -> nn.Module:
    net = Net()
    net.bound = bound
    net.act = functools.partial(torch.clamp, max=net.bound)
    return net


class Flagged(Net):
    """A flag that takes another way, though not to other numbers on any input."""

    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        self.doubled = doubled

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 / 2 if self.doubled else super().forward(x)


class Limited(Net):
    """A length that only longer inputs would notice: it is no literal, but a condition."""

    def __init__(self, most: int = 64) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.most:
            raise ValueError("too long")
        return super().forward(x)


class Scaled(Net):
    """Beside these variances no eps shows."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(6, eps=eps)
        self.batch.load_state_dict({"running_var": torch.full((6,), 1e4)}, strict=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.batch(x)[:, :3]


@pytest.mark.parametrize(
    ("make", "values", "words"),
    [
        (
            Scaled,
            (1e-5, 1e-5, 1e-6),
            [
                "member m2 is another program than member m0",
                "batch_norm",
                "1e-06 in it, 1e-05 in the",
                "batch.eps: 1e-05 in member m0, 1e-06 in member m2",
            ],
        ),
        (
            clamped,
            (1e3, 2e3, 1e3),
            ["member m1", "2000.0 in it, 1000.0 in the captured", "bound: 1000.0 in member m0, 2000.0 in member m1", "act.max: 1000.0"],
        ),
        (Flagged, (False, False, True), ["member m2", "doubled: False in member m0, True in member m2", "ops"]),
        (Limited, (64, 64, 128), ["member m2", "most: 64 in member m0, 128 in member m2", "holds under"]),
    ],
)
def test_what_no_drawn_input_shows_is_refused_by_name(
    make: Callable[[Any], nn.Module], values: tuple[Any, ...], words: list[str], tmp_path: Path
) -> None:
    message = refused(MemberMismatch, tmp_path, numbered(tmp_path, Scaled if make is Scaled else Net), model=by_member(make, *values))
    for word in [*words, "--model-arg", "buffer"]:
        assert word in message, message


class Guarded(nn.Module):
    """A limit that no drawn size reaches, kept in one way or another."""

    tag: Tensor

    def __init__(self, keep: Callable[[int], Any], read: Callable[[Any], int], limit: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("tag", torch.tensor(float(limit)))
        self.read, self.limit = read, keep(limit)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) + self.tag * 0
        return y * 2 if x.shape[1] > self.read(self.limit) else y


KEPT: dict[str, tuple[Callable[[int], Any], Callable[[Any], int]]] = {
    "a tensor's number": (torch.tensor, int),
    "a tensor's numbers": (lambda k: torch.tensor([k, 1]), lambda t: t.tolist()[0]),
    "a long tensor's numbers": (lambda k: torch.full((99,), k), lambda t: t.tolist()[0]),
    "a tensor's shape": (torch.zeros, lambda t: t.shape[0]),
    "a key of two": (lambda k: {("enc", 0): k}, lambda d: d["enc", 0]),
    "a default": (lambda k: defaultdict(lambda: k), lambda d: d["any"]),
    "a view of a dict": (lambda k: MappingProxyType({"k": k}), lambda d: d["k"]),
    "a method": (lambda k: Config(scale=k).most, lambda f: f()),
    "a text's own": (lambda k: Words("a", k), lambda w: w.number),
    "a hidden slot": (Mangled, lambda m: m.most),
    "six levels deep": (lambda k: [[[[[[k]]]]]], lambda v: v[0][0][0][0][0][0]),
}


@pytest.mark.parametrize("how", [pytest.param(k, marks=[] if i % 4 == 0 else [pytest.mark.slow]) for i, k in enumerate(KEPT)])
def test_a_limit_is_found_however_it_is_kept(how: str, tmp_path: Path) -> None:
    limits = [200, 200, 100]

    def make(state_dict: dict[str, Tensor] | None = None) -> nn.Module:
        return Guarded(*KEPT[how], 200 if state_dict is None else int(state_dict["tag"]))

    for i, limit in enumerate(limits):
        torch.save(Guarded(*KEPT[how], limit).state_dict(), tmp_path / f"m{i}.pt")
    with pytest.raises(MemberMismatch, match="m2 is another program than member m0"):
        build(sorted(tmp_path.glob("*.pt")), tmp_path / "e.wide", model=make, inputs=["x=float32[B,T,4]"], pt2=False, targets=("cpu",))


class Modal(Net):
    """Three of four modes make one program; the last matters for long inputs alone."""

    def __init__(self, mode: str = "a") -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.mode == "d" and x.shape[0] > 64 else y


def test_values_that_do_not_matter_say_nothing_of_another(tmp_path: Path) -> None:
    message = refused(MemberMismatch, tmp_path, numbered(tmp_path, count=4), model=by_member(Modal, "a", "b", "c", "d"))
    assert "mode: 'a' in member m0, 'd' in member m3" in message


def test_an_eps_that_shows_is_named_with_the_line(tmp_path: Path) -> None:
    message = refused(VerificationError, tmp_path, numbered(tmp_path), model=by_member(lambda e: Net(eps=e), 1e-5, 1e-2, 1e-5))
    assert "does not give the members' own answers" in message
    assert "the modules differ in norm.eps: 1e-05 in member m0, 0.01 in member m1 (aten.layer_norm.default (test_attributes.py:" in message
    assert "0.01 in it, 1e-05 in the captured program" in message


def test_a_factory_that_is_not_deterministic(tmp_path: Path) -> None:
    message = refused(MemberMismatch, tmp_path, save(tmp_path, Scaled, count=1), model=in_turn(Scaled, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5, 7e-5))
    assert "member m0 is another program each time that it is built" in message
    assert "The factory is not deterministic: batch.eps: " in message


def test_a_list_of_numbers_that_is_drawn(tmp_path: Path) -> None:
    class Drawn(Net):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.randperm(6).tolist()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, self.order])

    message = refused(VerificationError, tmp_path, save(tmp_path, Drawn), model=Drawn)
    assert "The members differ in something that is no weight: " in message
    assert "order." in message


def test_a_config_inside_a_module(tmp_path: Path) -> None:
    def make(slope: float) -> nn.Module:
        net = Net()
        net.config = config = Config(nested={"act": {"slope": slope}})
        net.act = lambda x: torch.nn.functional.threshold(x, -config.nested["act"]["slope"], 0.0)
        return net

    message = refused(MemberMismatch, tmp_path, numbered(tmp_path), model=by_member(make, 1e3, 1e3, 1e4))
    assert "config.nested.act.slope: 1000.0 in member m0, 10000.0 in member m2" in message


def test_a_numpy_scalar(tmp_path: Path) -> None:
    def make(bound: float) -> nn.Module:
        net = Net()
        net.bound = most = np.float64(bound)
        net.act = lambda x: x.clamp(max=float(most))
        return net

    message = refused(MemberMismatch, tmp_path, numbered(tmp_path), model=by_member(make, 1e3, 1e4, 1e3))
    assert "bound: float64(1000.0) in member m0, float64(10000.0) in member m1" in message


def test_a_number_made_into_a_tensor(tmp_path: Path) -> None:
    class Made(Net):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor(self.shift)

    message = refused(MemberMismatch, tmp_path, numbered(tmp_path, lambda: Made(0.0)), model=by_member(Made, 1e-20, 1e-20, 2e-20))
    assert "a tensor that the code makes of numbers (test_attributes.py:" in message
    assert "shift: 1e-20 in member m0, 2e-20 in member m2" in message


HIDDEN: dict[str, float] = {}


class Hidden(Net):
    """A number in a global that no attribute shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=HIDDEN["bound"]) * HIDDEN["scale"]


def test_a_number_that_no_attribute_shows(tmp_path: Path) -> None:
    def make(pair: tuple[float, float]) -> nn.Module:
        HIDDEN.update(bound=pair[0], scale=pair[1])
        return Hidden()

    paths = numbered(tmp_path)
    message = refused(VerificationError, tmp_path, paths, model=by_member(make, (1e3, 1.0), (1e3, 2.0), (1e3, 1.0)))
    assert "member m1" in message
    assert "2.0 in it, 1.0 in the captured program" in message
    assert "o plain attribute of the modules that differs is in it" in message
    message = refused(MemberMismatch, tmp_path, paths, model=by_member(make, (1e3, 1.0), (1e3, 1.0), (2e3, 1.0)))  # no drawn input comes near
    assert "member m2" in message
    assert "2000.0 in it, 1000.0 in the captured program" in message
    assert "o plain attribute of the modules that differs is in it" in message


def test_a_scale_in_a_closure_is_named(tmp_path: Path) -> None:
    message = refused(VerificationError, tmp_path, numbered(tmp_path), model=by_member(lambda s: Net(lambda x: x * s), 1.0, 1.0, 3.0))
    assert "act.s: 1.0 in member m0, 3.0 in member m2" in message
    assert "3.0 in it, 1.0 in the captured program" in message


def test_a_member_whose_own_module_fails(tmp_path: Path) -> None:
    def make(value: int) -> nn.Module:
        net = Net()
        net.rows = value
        net.act = lambda x: x.reshape(-1, value, 5 // value).flatten(1)
        return net

    message = refused(VerificationError, tmp_path, numbered(tmp_path), model=by_member(make, 5, 5, 4))
    assert "member m2: its own module fails at" in message
    assert "rows: 5 in member m0, 4 in member m2" in message


class Wide(nn.Module):
    """A head of the checkpoint's own size."""

    def __init__(self, state_dict: Mapping[str, Tensor], bound: float = 1e3, whole: int = 1000, trunk: bool = False) -> None:
        super().__init__()
        self.classes = len(state_dict["last.bias"])
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, self.classes)
        self.bound, self.whole, self.trunk = bound, whole, trunk

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).clamp(max=self.bound)
        h = h.clamp(max=self.whole) if self.trunk else h
        return self.last(h).clamp(max=self.classes * 1000)


def heads(folder: Path) -> list[str]:
    paths = [str(folder / f"h{i}.pt") for i in range(3)]
    for i, path in enumerate(paths):
        torch.manual_seed(i)
        torch.save(Wide({"last.bias": torch.zeros(3 + i // 2)}).state_dict(), path)
    return paths


def test_members_of_other_shapes_may_differ_in_sizes_alone(tmp_path: Path, captures: list[int]) -> None:
    paths = heads(tmp_path)
    build(paths, tmp_path / "ok.wide", model=Wide, inputs=X, **QUICK)
    assert len(captures) == 2  # one a shape
    x = torch.randn(4, 6)
    for y, path in zip(load(tmp_path / "ok.wide")(x), paths):
        state = torch.load(path)
        member = Wide(state)
        member.load_state_dict(state)
        torch.testing.assert_close(y, member(x).detach())

    def other_bound(state_dict: Mapping[str, Tensor]) -> nn.Module:
        return Wide(state_dict, bound=1e3 if len(state_dict["last.bias"]) == 3 else 1e4)

    message = refused(CaptureError, tmp_path, paths, model=other_bound)
    assert "10000.0 in it, 1000.0 in the captured program" in message
    assert "bound: 1000.0 in the captured one, 10000.0 in this one" in message

    def other_whole(state_dict: Mapping[str, Tensor]) -> nn.Module:
        return Wide(state_dict, whole=1000 if len(state_dict["last.bias"]) == 3 else 10000, trunk=True)

    message = refused(LoweringError, tmp_path, paths, model=other_whole)
    assert "1000" in message and "10000" in message and "--strategy loop" in message
    build(paths, tmp_path / "loop.wide", model=other_whole, inputs=X, strategy="loop", **QUICK)  # the way out that it names


# Built: what differs is for something else


def dropping(p: float) -> nn.Module:
    net = Net()
    net.act = nn.Dropout(p)
    return net


def test_a_dropout_of_another_probability_is_built(tmp_path: Path) -> None:
    right(tmp_path, numbered(tmp_path), by_member(dropping, 0.1, 0.2, 0.3), lambda: dropping(0.5))


COUNT = itertools.count()


def named(_: Any = None) -> nn.Module:
    net = Net()
    net.run, net.number, net.started = str(uuid.uuid4()), next(COUNT), time.time()
    net.name = f"net {net.number}"
    net.owner = SimpleNamespace(path=Path(f"/tmp/run-{net.number}"), lock=threading.Lock())
    return net


def test_names_counters_and_dates_are_built(tmp_path: Path, captures: list[int]) -> None:
    right(tmp_path, save(tmp_path, count=8), named)
    assert len(captures) == 1 + alike.TRIED  # each of them differs every time, and is left alone after that


def test_nothing_is_captured_again_where_nothing_differs(tmp_path: Path, captures: list[int]) -> None:
    right(tmp_path, save(tmp_path, count=5), Net)
    assert len(captures) == 1


def test_sizes_that_are_data_are_no_difference(tmp_path: Path) -> None:
    """The members select other numbers of values, so that the records of their calls differ, while the program is one."""

    class Selecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y[y > 0] = 0.5
            return y

    right(tmp_path, save(tmp_path, count=4), Selecting, Selecting)


def test_what_cannot_be_recorded_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no rule for this mode")

    monkeypatch.setattr(Recorded, "__torch_dispatch__", fails)
    right(tmp_path, save(tmp_path), Net)


def test_a_state_is_carried_beside_a_name_that_differs(tmp_path: Path) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))
            self.number = next(COUNT)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += super().forward(x).mean(0)
            return self.seen * 2

    build(save(tmp_path, Counting), tmp_path / "e.wide", model=Counting, inputs=X, state=["seen"], **QUICK)


def test_fifty_members_cost_little(tmp_path: Path, captures: list[int]) -> None:
    """One build a member, and a fingerprint that takes a small part of it."""
    made: list[float] = []

    def make() -> nn.Module:
        made.append(0.0)
        return Net()

    paths = save(tmp_path, count=50)
    build(paths, tmp_path / "e.wide", model=make, inputs=X, **QUICK)
    assert len(captures) == 1
    assert len(made) <= 50 + 5  # what it takes is read from one, one is captured, one is asked at small sizes
    big = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout()) for _ in range(100)))  # 501 modules
    times = []
    for _ in range(5):
        start = time.perf_counter()
        rows = attributes_of(big)
        times.append(time.perf_counter() - start)
    assert len(rows) > 500
    assert min(times) < 0.05


def test_a_hugging_face_model_is_the_same_each_time() -> None:
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}
    one, other = (attributes_of(transformers.BertModel(transformers.BertConfig(**config))) for _ in range(2))
    assert one == other
    assert one["config.hidden_size"] == "16"
    changed = attributes_of(transformers.BertModel(transformers.BertConfig(**config, layer_norm_eps=1e-6)))
    assert "config.layer_norm_eps" in {d.path for d in differences(one, changed)}


def test_pickled_modules_with_notes_of_their_training(tmp_path: Path, captures: list[int]) -> None:
    paths = []
    for i in range(6):
        torch.manual_seed(i)
        net = Scaled()
        net.history = [{"epoch": e, "loss": 1 / (e + i + 1)} for e in range(i + 3)]
        paths.append(str(tmp_path / f"p{i}.pt"))
        torch.save(net, paths[-1])
    build(paths, tmp_path / "e.wide", inputs=X, trust_pickle=True, **QUICK)
    assert len(captures) <= 6
    torch.manual_seed(9)
    torch.save(Scaled(eps=1e-6), paths[3])
    message = refused(MemberMismatch, tmp_path / "x", paths, trust_pickle=True)
    assert "The modules differ in batch.eps: 1e-05 in member p0, 1e-06 in member p3" in message


def test_the_command_line_says_it(tmp_path: Path) -> None:
    (tmp_path / "randomnet.py").write_text(
        "import itertools\nimport torch\nturn = itertools.count(1)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.first, self.last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)\n"
        "        self.bound = 1000.0 * next(turn)\n"
        "    def forward(self, x):\n        return self.last(self.first(x).clamp(max=self.bound))\n"
    )
    paths = [str(tmp_path / f"m{i}.pt") for i in range(2)]
    for path in paths:
        net = nn.Sequential(collections.OrderedDict(first=nn.Linear(6, 5), last=nn.Linear(5, 3)))
        torch.save(net.state_dict(), path)
    words = ["build", *paths, "-o", str(tmp_path / "e.wide"), "--model", f"{tmp_path}/randomnet.py:Net", "--input", X[0]]
    result = CliRunner().invoke(cli, words, prog_name="widepack")
    assert result.exit_code == 1
    assert "bound: " in result.stderr and "randomnet.py:10" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "e.wide").exists()
