"""Tests `ens.swap`: answers of the new member and of the others, concurrent calls, refusals, and restored
members.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import WRITE_CHANGES, artifact_of, binder_of, callers_inside
from loaded import built
from support import Artifacts
from torch import Tensor, nn

import widepack
from widepack import MemberMismatch, UsageError, VerificationError, build, load
from widepack.inference.members.weight_exchange import WeightChanges, differing
from widepack.inference.model import WideModel
from widepack.inference.programs.bound_program import BoundProgram
from widepack.runtime.executable import Executable
from widepack.system.gate import Gate
from widepack_artifacts.reader import Reader

CPU = torch.device("cpu")
N = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}
MORE: list[dict[str, Any]] = [{"strategies": "wide"}, {"prologue": False}, {"members": [1, 2]}]


class Net(nn.Module):
    """Has a convolution with a folded norm, a layer after it, a derived weight, and a state that is a buffer
    at first.
    """

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.randn(8))
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 5)
        self.register_buffer("mean", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3)) * torch.exp(self.scale)
        y = self.out(torch.relu(self.fc(h)))
        before = self.mean
        self.mean = 0.5 * before + 0.5 * y.mean(0)
        return y - before


def member(seed: int, make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make().eval()
        for name, b in module.named_buffers():
            if "running" in name:
                b.copy_(torch.rand_like(b) + 0.5)
    return module


def saved(folder: Path, seed: int, make: Callable[[], nn.Module] = Net) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"m{seed}.pt"
    torch.save(member(seed, make).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds three members of `Net`. `new.pt`, in the same folder, is a fourth."""
    folder = tmp_path_factory.mktemp("net")
    built(folder, Net, map(member, range(N)), "x=float32[B,3,6,6]", state=["mean"])
    saved(folder, 77).rename(folder / "new.pt")
    return folder


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds three members of an MLP that share the first layer.

    `new.pt` and `other.pt` have the same first layer, `own.pt` has a different one.
    """
    folder = tmp_path_factory.mktemp("small")
    trunk = mlp()[0].state_dict()
    paths = []
    for name in ("a", "b", "c", "new", "other"):
        module = mlp()
        module[0].load_state_dict(trunk)
        torch.save(module.state_dict(), folder / f"{name}.pt")
        paths.append(folder / f"{name}.pt")
    torch.save(mlp().state_dict(), folder / "own.pt")
    for share in ("auto", "none"):
        inputs = ["input=float32[B,8]"]
        build(paths[:3], folder / f"{share}.wide", model=mlp, inputs=inputs, share=share, **QUICK)
    return folder


def running(ens: WideModel, pattern: str, inputs: list[Tensor]) -> BoundProgram:
    """Returns the program that a call runs."""
    entry = ens.entry("forward")
    sizes = binder_of(entry).check(inputs, entry.programs.inputs.per_member(pattern))
    return entry.programs.for_sizes(pattern, sizes)


def expected(
    ens: WideModel, place: int, new: dict[str, Tensor], pattern: str, inputs: list[Tensor]
) -> list[Any]:
    """Returns the answers of the bound program of a pattern, over weights that are stacked again with the new
    member.
    """
    bound = running(ens, pattern, inputs)
    weights: dict[str, Any] = {}
    for slot in bound.program.weights:
        stored = artifact_of(ens).weights.get(slot.source)
        parts = (
            [stored[i] for i in range(len(ens))]
            if artifact_of(ens).weights.row(slot.source).kind != "shared"
            else None
        )
        if parts is None:
            weights[slot.source] = stored.clone()
            continue
        parts[place] = new.get(slot.source, parts[place])
        weights[slot.source] = [p.clone() for p in parts] if isinstance(stored, list) else torch.stack(parts)
    return Executable(bound.program, weights, CPU).run(*inputs)


def equal(a: Any, b: Any) -> bool:
    return all(map(equal, a, b)) if isinstance(a, (list, tuple)) else torch.equal(a, b)


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategies": "loop"},
        {"members": [0, 2]},
        *(pytest.param(o, marks=pytest.mark.slow) for o in MORE),
    ],
    ids=str,
)
def test_a_swap_changes_the_answers_of_its_member_only(net: Path, options: dict[str, Any]) -> None:
    ens = load(net / "e.wide", **options)
    place = 1
    number = artifact_of(ens).chosen[place]
    x, xs = torch.randn(4, 3, 6, 6), torch.randn(len(ens), 4, 3, 6, 6)
    state = ens.state()
    before, each = ens(x, state=state), ens.each(xs, state=state)
    module_before = ens.member(place)
    new = torch.load(net / "new.pt")
    begun = {
        **state,
        "mean": torch.stack([new["mean"] if i == place else m for i, m in enumerate(state["mean"])]),
    }
    want = expected(ens, place, new, "shared", [x, begun["mean"]])
    want_each = expected(ens, place, new, "each", [xs, begun["mean"]])
    report = ens.swap(place, net / "new.pt")
    assert (
        report.member == f"m{number}" and report.weights == 10 and report.bytes > 0
    )  # including the norm's count of batches, weight and bias
    assert 0 < report.pause < 5 and {"open", "check", "derive", "wait", "copy", "verify"} == set(
        report.seconds
    )
    assert torch.equal(ens.state()["mean"], begun["mean"])
    (y, after), (ye, after_each) = ens(x, state=begun), ens.each(xs, state=begun)
    assert equal([y, after["mean"]], want) and equal([ye, after_each["mean"]], want_each)
    others = [i for i in range(len(ens)) if i != place]
    assert torch.equal(y[others], before[0][others]) and torch.equal(ye[others], each[0][others])
    assert not torch.equal(y[place], before[0][place])
    # the member's module, from before and after the swap, and its state dict against the original module
    original = member(77)
    exact = original(x)
    for one in (module_before, ens.member(place), copy.deepcopy(ens.member(place))):
        assert torch.allclose(one(x, state=one.state())[0], exact, atol=1e-5)
    assert torch.allclose(y[place], exact, atol=1e-5)
    assert all(torch.equal(v, new[k]) for k, v in ens.state_dict(place).items())
    ens.probe()
    Reader(net / "e.wide").check_hashes()
    again = load(net / "e.wide", **options)
    assert torch.equal(again(x, state=again.state())[0], before[0])


def test_a_pattern_that_is_bound_after_a_swap_has_the_new_member(net: Path) -> None:
    ens = load(net / "e.wide", warmup=False)
    ens.swap("m1", net / "new.pt")
    xs = torch.randn(N, 2, 3, 6, 6)
    y, _ = ens.each(xs, state=ens.state())
    assert torch.allclose(y[1], member(77)(xs[1]), atol=1e-5)
    assert ens.swap(1, net / "m1.pt").weights == 10  # swaps it back
    ens.probe()
    assert torch.equal(
        ens.each(xs, state=ens.state())[0], (other := load(net / "e.wide")).each(xs, state=other.state())[0]
    )


def test_equal_weights_are_not_written(small: Path) -> None:
    ens = load(small / "auto.wide")
    assert ens.swap(0, small / "a.pt").bytes == 0
    report = ens.swap(0, small / "new.pt")
    assert report.weights == 4  # all members have this first layer
    assert report.bytes >= 4 * (8 * 8 + 8 + 8 * 4 + 4)
    assert "pause" in str(report)


@pytest.mark.parametrize("name", ["lstm", "ragged_heads", pytest.param("bert", marks=pytest.mark.slow)])
def test_swap_of_packed_weights_and_of_lists(name: str, artifacts: Artifacts, tmp_path: Path) -> None:
    import cases

    path = artifacts(name)
    ens = load(path)
    case = cases.load(name)
    args, kwargs = case.sample(2, 3)
    before = ens(*args, **kwargs)
    new = {
        k: v * (1 + 0.05 * torch.randn_like(v)) if v.is_floating_point() else v
        for k, v in ens.state_dict(1).items()
    }
    torch.save(new, tmp_path / "new.pt")
    values = ens.entry("forward").tensor_calls.tensors(args, kwargs, "shared")[0]
    bound = running(ens, "shared", values)
    want = expected(ens, 1, new, "shared", values)
    ens.swap(1, tmp_path / "new.pt")
    assert equal(bound.run(*values), want)
    after, others_before = (
        [[leaf[i] for i in (0, 2)] for leaf in want],
        [[leaf[i] for i in (0, 2)] for leaf in _leaves(before)],
    )
    assert equal(after, others_before)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["mlp", "encoder", "textcnn"])
def test_a_swap_packs_the_weights_of_its_member_alone(
    name: str, artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cases
    from widepack.kernels import onednn

    ens = load(artifacts(name), strategies=["loop", "packed"], backend="eager")
    args, kwargs = cases.load(name).sample(2, 3)
    before = _leaves(ens(*args, **kwargs))
    new = {
        k: v * (1 + 0.05 * torch.randn_like(v)) if v.is_floating_point() else v
        for k, v in ens.state_dict(1).items()
    }
    torch.save(new, tmp_path / "new.pt")
    values = ens.entry("forward").tensor_calls.tensors(args, kwargs, "shared")[0]
    bound = running(ens, "shared", values)
    packed = [t for v in bound.executable.given if isinstance(v, list) for t in v if t.is_mkldnn]
    assert len(packed) % len(ens) == 0
    assert packed or not torch.backends.mkldnn.is_available()
    count: list[str] = []

    def counted(kind: str) -> None:
        pack = getattr(onednn, f"reorder_{kind}_weight")

        def reorder(*operands: Any) -> Tensor:
            count.append(kind)
            weight: Tensor = pack(*operands)
            return weight

        monkeypatch.setattr(onednn, f"reorder_{kind}_weight", reorder)

    counted("linear")
    counted("convolution")
    want = expected(ens, 1, new, "shared", values)
    count.clear()
    ens.swap(1, tmp_path / "new.pt")
    assert len(count) == len(packed) // len(ens)
    assert equal(bound.run(*values), want)
    after = _leaves(ens(*args, **kwargs))
    assert all(equal([b[0], b[2]], [a[0], a[2]]) for b, a in zip(before, after))
    assert not any(torch.equal(b[1], a[1]) for b, a in zip(before, after))


def _leaves(value: Any) -> list[Any]:
    return (
        [value]
        if isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))
        else list(value.values() if hasattr(value, "values") else value)
    )


# ---------------------------------------------------------------- refused


def test_a_change_of_a_shared_weight_is_refused_by_name_and_bytes(small: Path) -> None:
    ens = load(small / "auto.wide")
    x = torch.randn(2, 8)
    before = ens(x)
    with pytest.raises(
        MemberMismatch,
        match=r"2 weights that all members share, 288 bytes: 0.weight \(256 bytes\), 0.bias \(32 bytes\)"
        r".*widepack update.*--share none",
    ):
        ens.swap(1, small / "own.pt")
    assert torch.equal(ens(x), before)
    ens = load(small / "none.wide")
    assert ens.swap(1, small / "own.pt").weights == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("2.bias"), "lacks 2.bias"),
        (lambda d: d.update(more=torch.zeros(2)), "has more"),
        (lambda d: d.update({"2.bias": torch.zeros(9)}), r"2.bias is \[9\] float32"),
        (lambda d: d["2.bias"].fill_(float("nan")), r"NaN or inf.*all other members' answers are finite"),
        (lambda d: d["4.weight"].mul_(1e39), "NaN or inf"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    small: Path, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    ens = load(small / "auto.wide")
    x = torch.randn(2, 8)
    before = ens(x)
    new = torch.load(small / "new.pt")
    change(new)
    torch.save(new, tmp_path / "new.pt")
    for checkpoint in (tmp_path / "new.pt", new):
        with pytest.raises((MemberMismatch, VerificationError), match=words):
            ens.swap(1, checkpoint)
    assert torch.equal(ens(x), before)
    assert not artifact_of(ens).swapped


def test_invalid_arguments_are_refused(small: Path) -> None:
    ens = load(small / "auto.wide")
    bad: Any
    for bad, words in (
        (3, "there is no member 3"),
        (-1, "there is no member -1"),
        ("fold9", "no member is called 'fold9'"),
        (True, "member True is a bool"),
        (1.0, "member 1.0 is a float; members are named by number or by name"),
        (None, "member None is a NoneType"),
        ([1], "is a list"),
    ):
        with pytest.raises(UsageError, match=words):
            ens.swap(bad, small / "new.pt")
        with pytest.raises(UsageError, match=words) if bad != -1 else contextlib.nullcontext():
            ens[bad]
    with pytest.raises(UsageError, match="checkpoint is an empty text"):
        ens.swap(0, "")
    with pytest.raises(UsageError, match="checkpoint is a list"):
        ens.swap(0, [])  # type: ignore[arg-type]
    for state in ({}, {"weights": 3}):
        with pytest.raises(widepack.WidepackError, match="checkpoint <state dict>"):
            ens.swap(0, state)
    with pytest.raises(widepack.CheckpointError, match="nowhere"):
        ens.swap(0, small / "nowhere.pt")
    module = ens.member(0)
    ens.close()
    for refused in (
        lambda: ens.swap(0, small / "new.pt"),
        lambda: ens.member(0),
        lambda: ens[0],
        lambda: ens.state_dict(0),
        ens.state,
        ens.probe,
    ):
        with pytest.raises(UsageError, match="was closed"):
            refused()
    assert module(torch.randn(2, 8)).shape == (2, 4)  # a module from before the close still works


def test_a_swap_with_wrong_answers_restores_the_old_member(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(net / "e.wide")
    x, state = torch.randn(4, 3, 6, 6), ens.state()
    before = ens(x, state=state)[0]
    apply = WeightChanges.apply

    def apply_only_weights(changes: WeightChanges) -> None:
        changes.written, changes.replaced = (
            changes.written[:10],
            [],
        )  # the weights, but no derived weight
        apply(changes)

    with monkeypatch.context() as patch:
        patch.setattr(WeightChanges, "apply", apply_only_weights)
        with pytest.raises(VerificationError, match="gives wrong answers .*, and the old member is restored"):
            ens.swap(1, net / "new.pt")
    assert torch.equal(ens(x, state=state)[0], before) and torch.equal(ens.state()["mean"], state["mean"])
    assert not artifact_of(ens).swapped
    ens.probe()
    assert ens.swap(1, net / "new.pt").weights == 10


def test_a_swap_that_fails_half_way_restores_the_old_member(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(net / "e.wide")
    x, state = torch.randn(4, 3, 6, 6), ens.state()
    before = ens(x, state=state)[0]
    monkeypatch.setattr(WeightChanges, WRITE_CHANGES, _failing(getattr(WeightChanges, WRITE_CHANGES)))
    with pytest.raises(MemoryError):
        ens.swap(1, net / "new.pt")
    assert not artifact_of(ens).gate.closed and torch.equal(ens(x, state=state)[0], before)


def _failing(do: Callable[..., None]) -> Callable[..., None]:
    """Wraps a write so that the first call writes half of the changes and fails."""
    times: list[int] = []

    def half(changes: WeightChanges, *given: Any) -> None:
        if not times:
            times.append(1)
            do(WeightChanges(changes.written[: len(changes.written) // 2]), *given)
            raise MemoryError
        do(changes, *given)

    return half


# ---------------------------------------------------------------- under load


def test_every_answer_is_of_one_version_of_each_member(small: Path) -> None:
    """Four threads call while members are swapped. (scripts/measure/swaps.py runs 10,000 calls in 8
    threads.)
    """
    ens = load(small / "auto.wide")
    x = torch.randn(16, 8)
    known = [[ens(x)[i] for i in range(N)]]
    for i in range(N):
        ens.swap(i, small / "other.pt")
    known.append([ens(x)[i] for i in range(N)])
    wrong: list[str] = []
    seen: set[tuple[int, ...]] = set()
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            y = ens(x)
            which = tuple(next((v for v in (0, 1) if torch.equal(y[i], known[v][i])), -1) for i in range(N))
            seen.add(which)
            if -1 in which:
                wrong.append(str(which))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for k in range(12):
        ens.swap(k % N, small / (f"{'abc'[k % N]}.pt" if k // N % 2 == 0 else "other.pt"))
    stop.set()
    for t in threads:
        t.join()
    assert not wrong and len(seen) > 3


def test_a_program_that_is_bound_during_a_swap_has_the_new_member(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.inference.members import swap as swapping

    ens = load(small / "auto.wide")
    xs = torch.randn(N, 2, 8)
    first: list[int] = []

    class Slow(WeightChanges):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if not first:
                first.append(1)
                t = threading.Thread(target=ens.each, args=(xs,))
                t.start()
                t.join()

    monkeypatch.setattr(swapping, "WeightChanges", Slow)
    ens.swap(1, small / "new.pt")
    module = mlp()
    module.load_state_dict(torch.load(small / "new.pt"))
    assert torch.allclose(ens.each(xs)[1], module(xs[1]), atol=1e-5)


def alone(path: Path, x: Tensor) -> Tensor:
    """Returns the answer of a member of `Net` in float64."""
    module = Net().double().eval()
    module.load_state_dict(torch.load(path))
    with torch.no_grad():
        return torch.as_tensor(module(x))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("dtype", [None, "fp64"])  # weights are mapped files without a dtype, copies with one
def test_a_program_that_is_bound_during_a_refused_swap_has_the_old_member(
    net: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    from widepack.inference.members import swap as swapping

    ens = load(net / "e.wide", dtype=dtype)
    xs = torch.randn(N, 4, 3, 6, 6, dtype=torch.float64)
    given = xs.to(ens.state()["mean"].dtype)
    old, new = alone(net / "m1.pt", xs[1]), alone(net / "new.pt", xs[1])
    got: dict[str, Any] = {}

    def answers() -> dict[str, Tensor]:
        state = ens.state()
        results = {"shared": ens(given[1], state=state)[0][1], "each": ens.each(given, state=state)[0][1]}
        return results | {
            what: m(given[1], state=m.state())[0]
            for what, m in (("now", ens.member(1)), ("kept", got["member"]))
        }

    def wrong(*_: Any) -> None:
        def look() -> None:
            got["member"] = ens.member(1)
            got["meanwhile"] = answers()

        t = threading.Thread(target=look)
        t.start()
        t.join()
        raise VerificationError("answers wrongly, says the test")

    with monkeypatch.context() as patch:
        patch.setattr(swapping, "_verify", wrong)
        with pytest.raises(VerificationError, match="says the test"):
            ens.swap(1, net / "new.pt")
    for found, want in ((got["meanwhile"], new), (answers(), old)):
        for what, y in found.items():
            assert torch.allclose(y.double(), want, atol=1e-4), what
    ens.probe()
    ens.swap(1, net / "new.pt")
    assert all(torch.allclose(y.double(), new, atol=1e-4) for y in answers().values())


def test_a_member_module_that_is_made_during_a_swap_is_the_new_one(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    ens = load(net / "e.wide", dtype="fp64")
    from widepack.inference.members.weight_exchange import MemberUpdate

    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    got: list[nn.Module] = []
    compute = MemberUpdate.changes

    def slow(values: MemberUpdate, *given: Any) -> None:
        compute(values, *given)
        got.append(ens.member(1))  # another thread may call now: all values are computed, but none is written

    monkeypatch.setattr(MemberUpdate, "changes", slow)
    ens.swap(1, net / "new.pt")
    want = alone(net / "new.pt", x)
    assert got and all(torch.allclose(m(x, state=m.state())[0], want) for m in (got[0], ens.member(1)))


def test_the_gate_waits_for_calls_inside_and_blocks_new_calls() -> None:
    gate, order = Gate(), []
    inside, leave = threading.Event(), threading.Event()

    class Slow:
        def run(self, *_: Any) -> None:
            inside.set()
            leave.wait()
            order.append("in flight")

    class Quick:
        def run(self, *_: Any) -> None:
            order.append("new")

    def swap() -> None:
        with gate.shut():
            order.append("swap")
            time.sleep(0.05)
            order.append("swapped")

    threads = [threading.Thread(target=gate.run, args=(Slow(), ()))]
    threads[0].start()
    inside.wait()
    threads.append(threading.Thread(target=swap))
    threads[1].start()
    while not gate.closed:
        time.sleep(0.001)
    threads.append(threading.Thread(target=gate.run, args=(Quick(), ())))
    threads[2].start()
    time.sleep(0.02)
    assert order == []
    leave.set()
    for t in threads:
        t.join()
    assert order == ["in flight", "swap", "swapped", "new"]


def test_a_failed_call_leaves_the_gate() -> None:
    gate = Gate()

    class Failing:
        def run(self, *_: Any) -> None:
            raise ValueError("failure of the program")

    with pytest.raises(ValueError, match="failure of the program"):
        gate.run(Failing(), ())
    with gate.shut():
        pass
    callers_inside(gate)[1] = True  # a thread that has ended: after a fork only one thread is left
    with gate.shut():
        assert not callers_inside(gate)


def test_rows_that_differ_in_one_bit_are_found() -> None:
    a = torch.zeros(5, 3)
    b = a.clone()
    assert differing(a, b) is None
    b[1, 2], b[3] = -0.0, float("nan")
    assert differing(a, b) == slice(1, 4)
    a[:] = b
    assert differing(a, b) is None
    assert differing(torch.tensor(1.0), torch.tensor(2.0)) == slice(None)
    z = torch.zeros(4, 2, dtype=torch.complex64)
    assert differing(z, z.conj()) == slice(0, 4)  # the sign of a zero counts
    assert differing(torch.ones(3, 2).t(), torch.ones(2, 3)) is None
    assert differing(torch.zeros(0, 2), torch.zeros(0, 2)) is None


# ---------------------------------------------------------------- backends


class Tempered(nn.Module):
    """Has small weights (a compiler may write them into its code), a weight with gaps in memory, and
    prepacked layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.shift = nn.Parameter(torch.rand(()) + 0.5), nn.Parameter(torch.randn(3))
        self.inside, self.out = nn.Linear(16, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inside(x)) @ self.out.weight.t() * torch.exp(self.temperature)
        return (h + self.out.bias) / self.temperature + self.shift


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot", "compile", "onnxruntime"])
def test_compiled_programs_answer_with_the_new_member(backend: str, tmp_path: Path) -> None:
    if backend == "onnxruntime":
        for package in ("onnxruntime", "onnx", "onnxscript"):
            pytest.importorskip(package)
    path = built(tmp_path, Tempered, (member(i, Tempered) for i in range(N)), "x=float32[B,16]")
    ens = load(path, backend=backend, compile="now", cache=tmp_path / "cache")
    assert ens.backend == backend
    x = torch.randn(5, 16)
    before = ens(x)
    for seed in (50, 51):
        report = ens.swap(1, saved(tmp_path / "new", seed, Tempered))
        y = ens(x)
        assert torch.equal(y[[0, 2]], before[[0, 2]])
        assert torch.allclose(y[1], member(seed, Tempered)(x), atol=1e-5)
        assert (report.exchanged > 0) == (backend == "onnxruntime")
    ens.probe()


@pytest.mark.slow
def test_onnx_runtime_keeps_copies_of_weights(tmp_path: Path) -> None:
    """A number that is written into a weight does not reach every session, so a swap makes new sessions."""
    for package in ("onnxruntime", "onnx", "onnxscript"):
        pytest.importorskip(package)
    path = built(tmp_path, Tempered, (member(i, Tempered) for i in range(N)), "x=float32[B,16]")
    ens = load(path, backend="onnxruntime", compile="now", cache=tmp_path / "cache")
    x = torch.randn(5, 16)
    run = ens.entry("forward").programs.of("shared")[0].executable
    assert torch.allclose(run.call(x)[0], run.eager(x)[0], atol=1e-5)
    with torch.inference_mode():
        for weight in run.weights:
            weight.mul_(1.5)
    assert not torch.allclose(run.call(x)[0], run.eager(x)[0], atol=1e-2)
