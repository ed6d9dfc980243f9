"""Tests calls of single members, and of other kinds than were measured, in sessions of ONNX Runtime."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from session_plans import plan_sessions
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import widepack
from widepack import InputError
from widepack.backends import onnx_graphs, onnx_packed
from widepack.backends.onnx_member_sessions import MemberSessions
from widepack.inference.model import WideModel

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")
N = 3
LOOP, SESSIONS = "loop", "loop on onnxruntime"


class Net(nn.Module):
    """Has a table, two inputs, and two outputs of which one is boolean."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(9, 16), nn.Linear(16, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 3)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = self.out(self.norm(self.fc(x + self.table(ids)).relu()))
        return y, y > 0


SPECS = ("x=float32[B,16]", "ids=int64[B]")


@pytest.fixture(autouse=True)
def forget() -> None:
    onnx_graphs.forget()
    onnx_packed.forget()


@pytest.fixture(scope="module")
def members() -> list[nn.Module]:
    return [Net().eval() for _ in range(N)]


@pytest.fixture(scope="module")
def planned(members: list[nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = built(tmp_path_factory.mktemp("planned"), Net, members, *SPECS)
    plan_sessions(path)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The members that ran in a session of their own."""
    found: list[int] = []
    run = MemberSessions.run

    def watched(self: MemberSessions, member: int, inputs: Any) -> Any:
        answer = run(self, member, inputs)
        found.extend([member] if answer is not None else [])
        return answer

    monkeypatch.setattr(MemberSessions, "run", watched)
    return found


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 16), torch.randint(0, 9, (rows,))


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def opened(path: Path, calls: list[int], **options: Any) -> WideModel:
    """Loads an artifact, and opens the sessions of all members, which checks their answers."""
    ens: WideModel = widepack.load(path, **options)
    for member in ens:
        member(*inputs(2))
    ens.route(*inputs(N), member=range(N))
    assert set(calls) == set(range(N))
    calls.clear()
    return ens


def test_members_and_routed_rows_run_in_sessions(
    planned: Path, members: list[nn.Module], calls: list[int]
) -> None:
    ens = opened(planned, calls)
    assert ens.backend == "onnxruntime"
    for rows in (1, 5):
        x, ids = inputs(rows)
        for i in range(N):
            same(ens[i](x, ids), members[i](x, ids))
        assert calls == list(range(N))
        calls.clear()
        for numbers in ([i % N for i in range(rows)], [1] * rows, sorted(i % 2 for i in range(rows))):
            y, positive = ens.route(x, ids, member=numbers)
            for row, i in enumerate(numbers):
                want = members[i](x[row : row + 1], ids[row : row + 1])
                same((y[row], positive[row]), (want[0][0], want[1][0]))
            assert sorted(calls) == sorted(set(numbers))
            calls.clear()


def test_sessions_of_single_members_write_nothing(planned: Path, calls: list[int], tmp_path: Path) -> None:
    widepack.load(planned, cache=tmp_path)
    before = sorted(tmp_path.rglob("*"))
    opened(planned, calls, cache=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("times", [{LOOP: 9.0, SESSIONS: 3.0}, {LOOP: 3.0, SESSIONS: 9.0}])
def test_measured_times_decide(
    times: dict[str, float], members: list[nn.Module], calls: list[int], tmp_path: Path
) -> None:
    path = built(tmp_path, Net, members, *SPECS)
    plan_sessions(path, times_ms={**times, "wide": 2.0})
    ens = widepack.load(path)
    x, ids = inputs(2)
    same(ens[1](x, ids), members[1](x, ids))
    ens.route(x, ids, member=[1, 1])
    assert bool(calls) == (times[SESSIONS] < times[LOOP])


def test_a_call_that_needs_more_than_numbers_runs_on_eager(
    planned: Path, members: list[nn.Module], calls: list[int]
) -> None:
    ens = opened(planned, calls)
    x, ids = inputs(4)
    given = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(ens[1](given, ids)[0].sum(), given)
    (want,) = torch.autograd.grad(members[1](given, ids)[0].sum(), given)
    same(found, want)
    forward: Any = forward_ad
    with forward.dual_level():
        dual = forward.make_dual(x, x)
        tangents = [forward.unpack_dual(m(dual, ids)[0]).tangent for m in (ens[1], members[1])]
    same(*tangents)
    with FlopCounterMode(display=False) as counter:
        ens[1](x, ids)
    assert counter.get_total_flops()
    with torch.device("meta"):
        ens[1](x, ids)
    assert not calls
    with torch.no_grad():
        same(ens[1](given, ids), members[1](x, ids))
    assert calls == [1]


def test_a_member_with_other_weights_runs_its_own_program(
    planned: Path, members: list[nn.Module], calls: list[int]
) -> None:
    ens = opened(planned, calls)
    x, ids = inputs(4)
    copied = copy.deepcopy(ens[1])
    for buffer in copied.buffers():
        buffer.mul_(2)
    assert not torch.allclose(copied(x, ids)[0], ens[1](x, ids)[0])
    calls.clear()
    same(pickle.loads(pickle.dumps(ens[1]))(x, ids), members[1](x, ids))
    zero = ens[1]
    for name, buffer in list(zero.named_buffers()):
        setattr(zero, name, torch.zeros_like(buffer))
    assert not zero(x, ids)[0].any()
    assert not calls


@pytest.mark.parametrize("wrong", [9, -1])
def test_an_index_out_of_range_is_the_error_of_eager(wrong: int, planned: Path, calls: list[int]) -> None:
    ens, eager = opened(planned, calls), widepack.load(planned, backend="eager")
    x, ids = inputs(4)
    ids[2] = wrong
    each = x.expand(N, 4, 16), ids.expand(N, 4)
    kinds: list[Callable[[WideModel], Any]] = [
        lambda model: model(x, ids),
        lambda model: model.each(*each),
        lambda model: model(widepack.each(each[0]), ids),
        lambda model: model.route(x, ids, member=[0, 1, 1, 2]),
        lambda model: model.route(x, ids, member=1),
        lambda model: model[1](x, ids),
    ]
    for call in kinds:
        errors = []
        for model in (ens, eager):
            with pytest.raises((InputError, IndexError)) as error:
                call(model)
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]


def test_nan_of_a_row_stays_with_it(planned: Path, calls: list[int]) -> None:
    ens = opened(planned, calls)
    x, ids = inputs(6)
    numbers = [0, 1, 2, 2, 1, 0]
    clean = ens.route(x, ids, member=numbers)[0]
    x[4] = float("nan")
    y = ens.route(x, ids, member=numbers)[0]
    assert y[4].isnan().all()
    keep = [0, 1, 2, 3, 5]
    assert torch.equal(y[keep], clean[keep]) or torch.allclose(y[keep], clean[keep])
    assert set(calls) == set(range(N))


def test_after_a_swap_no_session_has_the_old_weights(
    planned: Path, members: list[nn.Module], calls: list[int], tmp_path: Path
) -> None:
    ens = opened(planned, calls)
    held, new = ens[1], Net().eval()
    torch.save(new.state_dict(), tmp_path / "new.pt")
    ens.swap(1, tmp_path / "new.pt")
    calls.clear()
    x, ids = inputs(6)
    now = [members[0], new, members[2]]
    same(held(x, ids), new(x, ids))
    same(ens[1](x, ids), new(x, ids))
    assert not calls
    numbers = [0, 1, 2, 2, 1, 0]
    y = ens.route(x, ids, member=numbers)[0]
    for row, i in enumerate(numbers):
        same(y[row], now[i](x[row : row + 1], ids[row : row + 1])[0][0])
    assert set(calls) == {0, 2}  # the others keep their sessions


def test_wrong_sessions_are_not_used(
    planned: Path, members: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = widepack.load(planned)
    opened_part = onnx_packed.opened_part

    def wrong(*args: Any) -> Any:
        run = opened_part(*args)
        return lambda given: [y + 1 if y.is_floating_point() else y for y in run(given)]

    monkeypatch.setattr("widepack.backends.onnx_member_sessions.opened_part", wrong)
    x, ids = inputs(2)
    with pytest.warns(UserWarning, match="the session of member .* gives wrong answers here"):
        same(ens[1](x, ids), members[1](x, ids))


def test_without_its_file_a_member_runs_on_eager(
    planned: Path, members: list[nn.Module], calls: list[int], tmp_path: Path
) -> None:
    ens = widepack.load(planned, cache=tmp_path)
    for file in tmp_path.rglob(onnx_packed.MEMBERS):
        file.write_bytes(b"damaged")
    x, ids = inputs(2)
    same(ens[1](x, ids), members[1](x, ids))
    assert not calls


def test_a_closed_model_keeps_its_members(planned: Path, members: list[nn.Module], calls: list[int]) -> None:
    ens = widepack.load(planned)
    member = ens[1]
    ens.close()
    x, ids = inputs(2)
    same(member(x, ids), members[1](x, ids))
    assert not calls


# ---------------------------------------------------------------- kinds of calls that were not measured


def test_some_of_the_members(planned: Path, members: list[nn.Module], calls: list[int]) -> None:
    some = widepack.load(planned, members=[2, 0])
    assert some.backend == "onnxruntime"
    x, ids = inputs(4)
    for found, member in zip(zip(*some(x, ids)), (members[2], members[0])):
        same(found, member(x, ids))
    same(some[0](x, ids), members[2](x, ids))
    assert calls[-1] == 0


def test_inputs_of_each_member_and_shared_ones(planned: Path, members: list[nn.Module]) -> None:
    ens = widepack.load(planned)
    x, ids = torch.randn(N, 4, 16), torch.randint(0, 9, (4,))
    y, positive = ens(widepack.each(x), ids)
    for i in range(N):
        same((y[i], positive[i]), members[i](x[i], ids))
    (bound,) = ens.entry("forward").programs.of("mixed:es")
    assert bound.backend == "onnxruntime"


def test_other_batches_keep_their_plans(members: list[nn.Module], tmp_path: Path) -> None:
    path = built(tmp_path, Net, members, *SPECS)
    plan_sessions(path, least=4)
    ens = widepack.load(path, members=[2, 0])
    plans = ens.plans()
    assert [p.backend for p in plans if p.batch[0] < 4] == [""] * sum(p.batch[0] < 4 for p in plans)
    assert [p.backend for p in plans if p.batch[0] >= 4] == ["onnxruntime"]
    for rows in (1, 3, 4, 9):
        x, ids = inputs(rows)
        for found, member in zip(zip(*ens(x, ids)), (members[2], members[0])):
            same(found, member(x, ids))


def test_without_the_backend_the_rules_run(
    planned: Path, members: list[nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.warns(UserWarning, match="'eager' runs instead"):
        some = widepack.load(planned, members=[2, 0], cache=tmp_path)
    assert some.backend == "eager"
    x, ids = inputs(4)
    for found, member in zip(zip(*some(x, ids)), (members[2], members[0])):
        same(found, member(x, ids))


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


def test_a_cascade_and_figures(tmp_path: Path) -> None:
    members = [Classes() for _ in range(4)]
    path = built(tmp_path, Classes, members, "x=float32[B,16]")
    plan_sessions(path)
    ens, eager = widepack.load(path), widepack.load(path, backend="eager")
    x = torch.randn(5, 16)
    want, found = eager.cascade(x, first=1, until=0.4), ens.cascade(x, first=1, until=0.4)
    same(found.mean, want.mean)
    assert torch.equal(found.members, want.members)
    for figure in ("mean", "std", "entropy"):
        same(ens.reduce(x, figure, of="softmax")[figure], eager.reduce(x, figure, of="softmax")[figure])


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.fc(x))
        return y

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


def test_an_entry_that_draws_runs_on_eager_beside_one_in_sessions(tmp_path: Path) -> None:
    member = Drops()
    torch.save(member.state_dict(), tmp_path / "m.pt")
    widepack.build(
        [tmp_path / "m.pt"],
        tmp_path / "e.wide",
        model=Drops,
        inputs=["forward:x=float32[B,16]", "encode:x=float32[B,16]"],
        entries=["forward", "encode"],
        n=3,
        dropout="on",
        budget=0,
        pt2=False,
    )
    with pytest.warns(UserWarning, match="draws random numbers, .*'eager' runs instead"):
        ens = widepack.load(tmp_path / "e.wide", backend="onnxruntime")
    assert (ens.backend, ens.entry("encode").backend) == ("eager", "onnxruntime")
    x = torch.randn(4, 16)
    assert not torch.equal(ens(x), ens(x))
    same(ens.entry("encode")(x), torch.stack([member.encode(x)] * 3))
