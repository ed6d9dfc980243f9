"""Tests that members may differ in a plain attribute that does not change the program."""

from __future__ import annotations

import collections
import itertools
import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import files_of, seeded
from torch import Tensor, nn

from capture.attribute_members import QUICK, Net, Scaled, X, by_member, numbered, refused, right, save
from widepack import build, load
from widepack.building import captures as building_captures
from widepack.capture import capture
from widepack.capture.attributes import attributes_of, differences
from widepack.errors import CaptureError, LoweringError, MemberMismatch
from widepack.verification import same_program
from widepack.verification.same_program import Recorded
from widepack_cli.main import cli


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets one item for every capture of a build."""
    calls: list[int] = []
    original = capture.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return original(*args, **kwargs)

    monkeypatch.setattr(building_captures, "capture", counted)
    return calls


class Wide(nn.Module):
    """A module with a head whose size is that of the checkpoint."""

    def __init__(
        self, state_dict: Mapping[str, Tensor], bound: float = 1e3, whole: int = 1000, trunk: bool = False
    ) -> None:
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
    shapes = [{"last.bias": torch.zeros(3 + i // 2)} for i in range(3)]
    return list(map(str, files_of(folder, [seeded(partial(Wide, s), i) for i, s in enumerate(shapes)])))


@pytest.mark.extended
def test_members_of_other_shapes_may_differ_in_sizes_alone(tmp_path: Path, captures: list[int]) -> None:
    paths = heads(tmp_path)
    build(paths, tmp_path / "ok.wide", model=Wide, inputs=X, **QUICK)
    assert len(captures) == 2  # one for each shape
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
    build(
        paths, tmp_path / "loop.wide", model=other_whole, inputs=X, strategy="loop", **QUICK
    )  # the solution that the message names


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


@pytest.mark.extended
def test_names_counters_and_dates_are_built(tmp_path: Path, captures: list[int]) -> None:
    right(tmp_path, save(tmp_path, count=8), named)
    assert (
        len(captures) == 1 + same_program.TRIED
    )  # an attribute that differs in each of these captures is ignored after them


@pytest.mark.extended
def test_nothing_is_captured_again_where_nothing_differs(tmp_path: Path, captures: list[int]) -> None:
    right(tmp_path, save(tmp_path, count=5), Net)
    assert len(captures) == 1


def test_sizes_that_depend_on_data_are_not_a_difference(tmp_path: Path) -> None:
    """The members select different numbers of values. Their records differ; the program is the same."""

    class Selecting(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y[y > 0] = 0.5
            return y

    right(tmp_path, save(tmp_path, count=4), Selecting, Selecting)


def test_members_that_cannot_be_recorded_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.extended
def test_fifty_members_cost_little(tmp_path: Path, captures: list[int]) -> None:
    """Each member is constructed once, and the comparison takes a small part of the time."""
    constructed: list[float] = []

    def make() -> nn.Module:
        constructed.append(0.0)
        return Net()

    paths = save(tmp_path, count=50)
    build(paths, tmp_path / "e.wide", model=make, inputs=X, **QUICK)
    assert len(captures) == 1
    assert len(constructed) <= 50 + 5  # one for the signature, one for the capture, one for small sizes
    big = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout()) for _ in range(100))
    )  # 501 modules
    times = []
    for _ in range(5):
        start = time.perf_counter()
        rows = attributes_of(big)
        times.append(time.perf_counter() - start)
    assert len(rows) > 500
    assert min(times) < 0.05


def test_a_hugging_face_model_is_the_same_each_time() -> None:
    transformers = pytest.importorskip("transformers")
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 30,
    }
    one, other = (attributes_of(transformers.BertModel(transformers.BertConfig(**config))) for _ in range(2))
    assert one == other
    assert one["config.hidden_size"] == "16"
    changed = attributes_of(transformers.BertModel(transformers.BertConfig(**config, layer_norm_eps=1e-6)))
    assert "config.layer_norm_eps" in {d.path for d in differences(one, changed)}


@pytest.mark.extended
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


def test_the_command_line_refuses_a_number_that_differs(tmp_path: Path) -> None:
    (tmp_path / "randomnet.py").write_text(
        "import itertools\nimport torch\nturn = itertools.count(1)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)\n"
        "        self.bound = 1000.0 * next(turn)\n"
        "    def forward(self, x):\n        return self.last(self.first(x).clamp(max=self.bound))\n"
    )
    layers = [
        collections.OrderedDict[str, nn.Module](first=nn.Linear(6, 5), last=nn.Linear(5, 3)) for _ in range(2)
    ]
    words = [
        "build",
        *map(str, files_of(tmp_path, [nn.Sequential(x) for x in layers])),
        "-o",
        str(tmp_path / "e.wide"),
        "--model",
        f"{tmp_path}/randomnet.py:Net",
        "--input",
        X[0],
    ]
    result = CliRunner().invoke(cli, words, prog_name="widepack")
    assert result.exit_code == 1
    assert "bound: " in result.stderr and "randomnet.py:10" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "e.wide").exists()
