"""Tests how programs run: the prologue runs once, a loop equals its unrolled form, and text from a file never
becomes code.
"""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from inside import artifact_of
from small import CPU, all_kinds, classifier, lowered, node, plan, program
from support import Artifacts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowering.test_lower import OWN_HEAD, PLANS, RAGGED, SIGNATURES, WIDTHS, heads
from widepack import load
from widepack.errors import ArtifactError
from widepack.ir import fake_values
from widepack.ir.edit import needed
from widepack.ir.torch_internals import base_name
from widepack.lowering.lower import lower
from widepack.runtime import graph_module as runtime
from widepack.runtime.executable import Executable
from widepack.runtime.graph_module import graph_module
from widepack.runtime.prologue import split
from widepack.runtime.unroll import unroll
from widepack.system import threads
from widepack.system.pinned_copy import Pinned
from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(base_name(func))
        return func(*args, **(kwargs or {}))


def bound(
    wide: Program, member_program: Program, kinds: dict[str, Kind], members: int = 3, **options: Any
) -> tuple[Executable, list[Any]]:
    weights, inputs = (
        small.values(member_program.weights, kinds, members),
        small.values(member_program.inputs, kinds, members),
    )
    given = {s.source: small.of_kind(w, kinds[s.name]) for s, w in zip(member_program.weights, weights)}
    return Executable(wide, given, CPU, **options), [
        small.of_kind(x, kinds[s.name]) for s, x in zip(member_program.inputs, inputs)
    ]


def equal(a: Sequence[Any], b: Sequence[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert type(x) is type(y)
        for p, q in zip(x, y) if isinstance(x, list) else [(x, y)]:
            assert p.dtype == q.dtype
            assert torch.equal(p, q)


def prepared() -> tuple[Program, dict[str, Kind]]:
    net = program({"w": "float32[3,4]", "g": "float32[3]"}, {"x": "float32[B,4]"}, [
        node("scale", "exp", Ref("g")),
        node("column", "unsqueeze", Ref("scale"), -1),
        node("w2", "mul.Tensor", Ref("w"), Ref("column")),
        node("y", "linear", Ref("x"), Ref("w2")),
        node("z", "mul.Tensor", Ref("y"), Ref("scale")),
    ], ["z", "scale"])  # fmt: skip
    return net, all_kinds(net, w="stacked", g="stacked")


@pytest.mark.parametrize("chosen", [plan(), plan(all=["y", "z"])], ids=["wide", "loop"])
def test_nodes_that_depend_on_weights_only_do_not_run_in_a_call(chosen: Any) -> None:
    net, kinds = prepared()
    wide = lowered(net, kinds, chosen).program
    (once, given), (always, _) = bound(wide, net, kinds), bound(wide, net, kinds, prologue=False)
    with Counted() as early:
        got = once.run(*given)
    with Counted() as late:
        want = always.run(*given)
    equal(got, want)
    assert "exp" not in early.names
    assert late.names.count("exp") == 1
    assert early.names.count("mul") == (3 if "loop" in [n.op for n in wide.nodes] else 1)
    small.check(net, wide, kinds)


def test_prologue_and_call_together_are_the_program() -> None:
    net, kinds = prepared()
    wide = lowered(net, kinds, plan()).program
    parts = split(wide)
    assert {n.name for n in parts.prologue.nodes} | {n.name for n in parts.main.nodes} == {
        n.name for n in wide.nodes
    }
    assert not {n.name for n in parts.prologue.nodes} & {n.name for n in parts.main.nodes}
    assert [s.name for s in parts.main.weights] == list(parts.names)
    assert "w" not in parts.names, (
        "a weight that only the prologue reads is not kept next to its derived weight"
    )
    assert parts.prologue.inputs == ()
    assert {n.member for n in parts.prologue.nodes} >= {"scale", "column", "w2"}


def test_random_ops_are_not_in_the_prologue() -> None:
    net = program(
        {"w": "float32[4]"},
        {},
        [node("n", "rand_like", Ref("w")), node("y", "add.Tensor", Ref("n"), Ref("w"))],
        ["y"],
    )
    run, _ = bound(lowered(net, all_kinds(net), plan()).program, net, all_kinds(net))
    assert not torch.equal(run.run()[0], run.run()[0])


def test_needed_returns_the_nodes_that_some_values_depend_on() -> None:
    net = classifier()
    assert [n.name for n in needed(net.nodes, ["r"])] == ["h", "made", "r"]
    assert needed(net.nodes, ["x"]) == []


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("chosen_kinds", [OWN_HEAD, {**OWN_HEAD, "x": "stacked"}], ids=["shared", "each"])
@pytest.mark.parametrize("chosen", ["loop", "mixed", "middle", "wide"])
def test_an_unrolled_program_gives_the_same_bits(chosen: str, chosen_kinds: dict[str, Kind]) -> None:
    net = classifier()
    kinds = all_kinds(net, **chosen_kinds)
    wide = lowered(net, kinds, PLANS[chosen]).program
    flat = unroll(wide)
    flat.check()
    assert all(n.body is None for n in flat.nodes)
    assert (flat is wide) == (chosen == "wide")
    (one, given), (two, _) = bound(wide, net, kinds), bound(flat, net, kinds)
    equal(one.run(*given), two.run(*given))


def test_an_unrolled_ragged_program_gives_the_same_bits() -> None:
    wide = lower(
        [heads(w) for w in WIDTHS], SIGNATURES, {"w_head": "ragged", "x": "stacked"}, RAGGED, small.SIZES
    ).program
    flat = unroll(wide)
    flat.check()
    assert all(n.body is None for n in flat.nodes)
    weights = {"w_head": [small.draw(heads(WIDTHS[s]).weights[0].type, i) for i, s in enumerate(SIGNATURES)]}
    x = torch.stack([small.draw("float32[B,4]", i) for i in range(4)])
    equal(Executable(wide, weights, CPU).run(x), Executable(flat, weights, CPU).run(x))


def test_the_weights_of_a_loop_are_unbound_at_load() -> None:
    net = classifier()
    kinds = all_kinds(net, **OWN_HEAD)
    run, given = bound(lowered(net, kinds, plan(all=["y", "dead", "z", "v", "total"])).program, net, kinds)
    assert [len(w) for w in run.weights if isinstance(w, list)] == [3, 3]
    with Counted() as ops:
        run.run(*given)
    assert "unbind" not in ops.names, "no weight is unbound in a call"


def test_a_loop_takes_any_strides_and_returns_one_tensor() -> None:
    net = program(
        {"w": "float32[3,4]"}, {"x": "float32[B,4]"}, [node("y", "linear", Ref("x"), Ref("w"))], ["y"]
    )
    kinds = all_kinds(net, w="stacked", x="stacked")
    run, (x,) = bound(lowered(net, kinds, plan(all=["y"])).program, net, kinds)
    turned = x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert turned.stride() != x.stride()
    ((a,), (b,)) = run.run(x), run.run(turned)
    assert a.shape == (3, 4, 3)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_text_from_a_file_is_never_run_as_code() -> None:
    nodes = (
        Node("__import__", "aten.relu.default", (Ref("lambda_"),)),
        Node("eval", "aten.exp.default", (Ref("__import__"),)),
    )
    net = Program(
        (),
        (Slot("lambda_", "x'); import os", "shared", "float32[B]"),),
        nodes,
        (Output(Ref("eval"), "shared"),),
    )
    net.check()
    module = graph_module(net, CPU)
    assert "__import__" not in module.code
    assert "import os" not in module.code
    assert "eval" not in module.code
    torch.testing.assert_close(module(torch.zeros(2))[0], torch.ones(2))


@pytest.mark.parametrize(("bad", "words"), [
    (
        Node("y", "aten.relu.default", (Ref("x"),), {"out": Ref("x")}),
        "passes the keyword 'out' to aten.relu.default, which does not have it",
    ),
    (Node("y", "aten.relu_.default", (Ref("x"),)), "'aten.relu_.default' is not on the list of allowed ops"),
    (Node("y", "os.system", ("true",)), "'os.system' is not on the list of allowed ops"),
    (Node("y", "operator.attrgetter", ("x",)), "'operator.attrgetter' is not on the list of allowed ops"),
])  # fmt: skip
def test_ops_that_are_not_allowed_are_refused_even_unchecked(bad: Node, words: str) -> None:
    net = Program((), (Slot("x", "x", "shared", "float32[B]"),), (bad,), (Output(Ref("y"), "shared"),))
    with pytest.raises(ArtifactError) as caught:
        graph_module(net, CPU)
    assert words in str(caught.value)


def test_answers_do_not_share_memory_with_the_model() -> None:
    """A caller that writes into an answer does not change later answers."""
    net, kinds = prepared()
    run, given = bound(lowered(net, kinds, plan()).program, net, kinds)
    first = [t.clone() for t in run.run(*given)]
    with torch.inference_mode():
        run.run(*given)[0].zero_()
    equal([run.run(*given)[0]], first[:1])


def test_a_run_gives_no_warnings() -> None:
    net = classifier()
    kinds = all_kinds(net, **OWN_HEAD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run, given = bound(lowered(net, kinds, PLANS["mixed"]).program, net, kinds)
        run.run(*given)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_members_in_threads_give_the_answer_of_the_loop(count: int) -> None:
    body = Program(
        (), (Slot("x", "", "shared", "float32[B,4]"), Slot("w", "", "stacked", "float32[3,4]")), (
            Node("l", "aten.linear.default", (Ref("x"), Ref("w"))),
            Node("s", "aten.softmax.int", (Ref("l"), -1)),
        ), (Output(Ref("s"), "stacked"), Output(Ref("l"), "ragged")), 7
    )  # fmt: skip
    loop = runtime.Loop(body, 7, CPU, count)
    x, w = torch.randn(5, 4), torch.randn(7, 3, 4)
    before = torch.get_num_threads()
    with torch.inference_mode():
        for _ in range(3):
            s, rows = loop(x, w)
            want = torch.einsum("bi,noi->nbo", x, w)
            torch.testing.assert_close(s, want.softmax(-1))
            torch.testing.assert_close(torch.stack(rows), want)
            assert s.is_inference()
    assert torch.get_num_threads() == before


def test_threads_of_members_use_one_thread_each_and_keep_the_number_of_the_process() -> None:
    seen: dict[int, tuple[int, bool]] = {}

    def work(i: int) -> None:
        torch.randn(600, 600) @ torch.randn(600, 600)
        seen[i] = (torch.get_num_threads(), torch.is_inference_mode_enabled())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with torch.inference_mode():
            threads.spread(work, 9, 2)
        assert seen == dict.fromkeys(range(9), (1, True)) and torch.get_num_threads() == 3
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3], "a thread that starts later has the number of the process"
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_thread_is_raised_and_ends_the_work() -> None:
    done: list[int] = []

    def work(i: int) -> None:
        if i == 3:
            raise ValueError("member 3")
        done.append(i)

    with pytest.raises(ValueError, match="member 3"):
        threads.spread(work, 1000, 2)
    assert len(done) < 1000
    threads.spread(done.append, 5, 2)  # the next call can use the threads again


def test_a_thread_has_the_modes_of_its_caller() -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        threads.spread(lambda i: seen.append((x @ x).dtype), 3, 2)
    threads.spread(lambda i: seen.append((x @ x).dtype), 3, 2)
    assert seen == [torch.bfloat16] * 3 + [torch.float32] * 3


def test_nested_work_runs_in_the_same_thread() -> None:
    seen: list[int] = []
    threads.spread(lambda i: threads.spread(seen.append, 3, 2), 2, 2)
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


def test_the_caller_does_the_work_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    seen: list[int] = []
    threads.spread(seen.append, 3, 7)
    assert seen == [0, 1, 2]


def test_threads_work_while_the_interpreter_ends() -> None:
    code = """
import atexit, threading, time
from widepack.system import threads as workers
seen = []
def late():
    workers.spread(seen.append, 4, 2)
    print(len(seen), flush=True)
atexit.register(late)
def later():
    threading.main_thread().join()
    late()
threading.Thread(target=later).start()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.split() == ["4", "8"], (done.stdout, done.stderr)


@pytest.mark.extended
def test_the_source_of_a_deleted_graph_is_removed() -> None:
    """Memory must not grow, because a service may load artifacts for months."""
    kept = [set(linecache.cache)]
    for _ in range(2):
        net = classifier()
        kinds = all_kinds(net, **OWN_HEAD)
        run, inputs = bound(lowered(net, kinds, PLANS["mixed"]).program, net, kinds)
        run.run(*inputs)
        del run
        gc.collect()
        kept.append(set(linecache.cache))
    assert {f for f in kept[2] - kept[0] if f.startswith("<eval_with_key>")} == set()


def test_torchs_cache_of_fake_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    net = classifier()
    lowered(net, all_kinds(net, **OWN_HEAD), PLANS["mixed"])
    assert FakeTensorMode.cache_info().size > 3
    monkeypatch.setattr(fake_values, "_MOST_REMEMBERED", 3)
    fake_values.Fakes({"B": 4})
    assert FakeTensorMode.cache_info().size == 0


def test_a_deleted_fake_mode_keeps_no_cached_calls() -> None:
    """Otherwise torch's caches of symbols would keep the fake mode alive."""
    fakes = fake_values.Fakes({"B": 4})
    assert fakes.mode.shape_env is not None
    remembered = fakes.mode.shape_env.fake_tensor_cache
    with fakes.on():
        fakes.tensor("float32[B,3]").sum(1)
    assert remembered
    del fakes
    gc.collect()
    assert not remembered


def test_members_that_draw_numbers_run_in_order() -> None:
    body = Program(
        (),
        (Slot("x", "", "shared", "float32[B,4]"),),
        (Node("y", "aten.rand_like.default", (Ref("x"),)),),
        (Output(Ref("y"), "stacked"),),
        3,
    )
    assert runtime.Loop(body, 3, CPU, 4).workers == 0
    assert (
        runtime.Loop(replace(body, nodes=(Node("y", "aten.relu.default", (Ref("x"),)),)), 3, CPU, 4).workers
        == 4
    )


@pytest.mark.extended
def test_new_threads_start_after_a_fork() -> None:
    code = """
import os, sys, torch
from widepack.system import threads as workers
seen = []
workers.spread(seen.append, 4, 2)
pid = os.fork()
if not pid:
    workers.spread(seen.append, 4, 2)
    os._exit(len(seen))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_a_buffer_of_any_size_copies_a_complete_tensor(size: int, dtype: torch.dtype) -> None:
    """On the CPU the buffer is plain memory, so the test checks the order of its halves."""
    pinned = Pinned(CPU, size)
    for value in (torch.randn(5, 3, 7), torch.randn(()), torch.randn(0, 4), torch.randn(6, 4).t()):
        given = value.to(dtype)
        copied = pinned.place(given)
        assert copied.dtype == dtype and torch.equal(copied, given) and copied.is_contiguous()
        assert not given.numel() or copied.data_ptr() != given.data_ptr()


def test_adjacent_members_stay_mapped_and_others_are_copied_once(artifacts: Artifacts) -> None:
    path = artifacts("mlp")
    model = load(path)
    name = next(w.name for w in model.manifest.weights if w.kind == "stacked")
    all_members = artifact_of(model).weights.get(name)
    adjacent = artifact_of(load(path, members=[2, 3])).weights
    assert (
        adjacent.get(name).data_ptr() == adjacent.files.get(name)[2].data_ptr()
        and adjacent.copies(name) is None
    )
    assert torch.equal(adjacent.get(name), all_members[2:4])
    apart = load(path, members=[3, 0], prologue=False)
    stored = artifact_of(apart).weights.get(name)
    assert torch.equal(stored, all_members[[3, 0]]) and artifact_of(apart).weights.get(name) is stored
    for programs in (
        apart.entry("forward").programs.of("shared"),
        apart.entry("forward").programs.of("each"),
    ):
        assert any(w is stored for b in programs for w in b.executable.weights)
    del stored
    copies = artifact_of(apart).weights.copies(name)
    assert copies is not None
    del copies
    apart.entry("forward").forget()
    del programs
    assert artifact_of(apart).weights.copies(name) is None  # no program refers to it


def test_a_subset_of_members_requests_only_its_slices(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.inference import loaded_weights
    from widepack.system.readahead import extents, parts_of
    from widepack_artifacts.reader import Reader
    from widepack_artifacts.weights import Weights

    requested: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(loaded_weights, "will_read", lambda parts: requested.extend(parts))
    path = artifacts("ragged_heads")
    where = extents(Reader(path).weights_files())
    get = Weights.get

    def touched(weights: Weights, name: str) -> torch.Tensor:
        assert name not in where or where[name][:2] in [part[:2] for part in requested], (
            f"{name} is read before it was requested, so the system reads megabytes around it"
        )
        return get(weights, name)

    with monkeypatch.context() as patch:
        patch.setattr(Weights, "get", touched)
        ens = load(path, members=[0, 2], strategies="wide")
    model = load(path)
    sizes = {w.name: w.bytes(len(model)) for w in ens.manifest.weights}
    for w in ens.manifest.weights:
        for file, offset, size in parts_of(w, where, len(model), [0, 2]):
            assert (file, offset, size) in requested or w.role == "buffer"
            assert size < sizes[w.name] or w.kind == "shared"
    i = next(w for w in ens.manifest.weights if w.kind == "stacked" and w.role == "parameter")
    file, offset, size = parts_of(i, where, len(model), [2])[1]
    with open(file, "rb") as f:
        f.seek(offset)
        assert f.read(size) == bytes(
            model.state_dict(2)[i.name].contiguous().view(torch.uint8).flatten().tolist()
        )
