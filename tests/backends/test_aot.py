"""Tests that programs of `widepack compile` run without a compiler and return the members' answers."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from loaded import built
from support import Artifacts, Bound, double, fresh, leaves, must, run, stack
from torch import nn

import cases
import widepack
from widepack.backends import onnx_graphs
from widepack.backends.onnx_repeat import MemberGraph
from widepack.inference.programs import program_binder
from widepack.inference.programs.program_binder import CompiledChoice
from widepack_cli.main import cli

SERVE = """
import sys, os, shutil, time
import torch, widepack
start = time.process_time()
assert shutil.which("g++") is None and shutil.which("cc") is None
ens = widepack.load(sys.argv[1], backend="aot", cache=sys.argv[2])
assert ens.backend == "aot", ens.backend
calls = torch.load(sys.argv[3])
ens(calls[0])
assert time.process_time() - start < 2, "about a fifth of a second"
torch.save([ens(x) for x in calls], sys.argv[4])
heavy = {"torch._inductor.compile_fx", "torch._dynamo", "sympy", "click"}
assert not heavy & set(sys.modules), sorted(sys.modules)
"""


def compile_(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compile", *map(str, words)], prog_name="widepack")


@pytest.fixture(scope="module")
def compiled(
    artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """Returns an artifact, the folder of its compiled programs (`shared`), and the command's JSON."""
    artifact, folder = artifacts("mlp", "wide"), tmp_path_factory.mktemp("image") / "compiled"
    done = compile_(artifact, "-o", folder, "--pattern", "shared", "--json")
    assert done.exit_code == 0, done.output
    return artifact, folder, json.loads(done.stdout)


@pytest.mark.extended
def test_the_command_reports_its_files(compiled: tuple[Path, Path, dict[str, Any]]) -> None:
    artifact, folder, report = compiled
    assert (report["path"], report["backend"], report["folder"], report["torch"]) == (
        str(artifact),
        "aot",
        str(folder),
        torch.__version__,
    )
    (row,) = report["programs"]
    assert (row["entry"], row["pattern"], row["programs"], row["compiled"]) == ("forward", "shared", 1, 1)
    assert row["bytes"] > 100_000
    assert folder.stat().st_mode & 0o777 == 0o755
    again = compile_(artifact, "-o", folder, "--pattern", "shared")
    assert again.exit_code == 0
    assert "in the cache" in again.stdout


@pytest.mark.extended
def test_a_compiled_program_runs_without_a_compiler(
    compiled: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    artifact, folder, _ = compiled
    case = cases.load("mlp")
    calls = [case.sample(batch, 10 * batch) for batch in (1, 2, 5, 32, 100)]
    torch.save([args[0] for args, _ in calls], tmp_path / "calls.pt")
    must(fresh(SERVE, artifact, folder, tmp_path / "calls.pt", tmp_path / "answers.pt", PATH=str(tmp_path)))
    bound = Bound()
    for i in range(case.N):
        member, exact = case.member(i), case.member(i).double()
        for answer, (args, kwargs) in zip(torch.load(tmp_path / "answers.pt"), calls):
            bound.add(answer[i], run(member, args, kwargs), run(exact, double(args), kwargs))
    bound.check()


def test_inputs_are_checked_before_native_code(compiled: tuple[Path, Path, dict[str, Any]]) -> None:
    artifact, folder, _ = compiled
    ens, eager = widepack.load(artifact, backend="aot", cache=folder), widepack.load(artifact)
    assert (ens.backend, eager.backend) == ("aot", "eager")
    assert "cpu, aot" in repr(ens)
    x = torch.randn(6, 64)
    torch.testing.assert_close(ens(x), eager(x))
    for strided in (torch.randn(64, 6).t(), torch.randn(6, 128)[:, ::2], x[:1].expand(6, 64), x.flip(0)[1:5]):
        torch.testing.assert_close(ens(strided), eager(strided))
    with pytest.raises(widepack.InputError, match="63 at axis 1"):
        ens(torch.randn(6, 63))
    with pytest.raises(widepack.InputError, match="63.*the compiled program takes"):
        ens.entry("forward").programs.of("shared")[0].executable.call(torch.randn(6, 63))
    y = ens(x)
    kept = y.clone()
    ens(torch.randn(6, 64))
    assert torch.equal(y, kept), "a later call wrote into an answer"


def test_a_pattern_that_was_not_compiled_is_refused(compiled: tuple[Path, Path, dict[str, Any]]) -> None:
    artifact, folder, _ = compiled
    ens = widepack.load(artifact, backend="aot", cache=folder)
    with pytest.raises(
        widepack.UsageError,
        match="(?s)pattern each has not been compiled for this machine.*widepack compile.*"
        "compile='now'.*backend='eager'",
    ):
        ens.each(torch.randn(8, 2, 64))
    with pytest.raises(widepack.UsageError, match="has not been compiled"):
        widepack.load(artifact, backend="aot", cache=folder, members=[0, 1])


@pytest.mark.parametrize(("eager_s", "backend"), [(2.0, "aot"), (1.0, "eager")])
def test_a_load_takes_a_compiled_program_that_was_faster(
    compiled: tuple[Path, Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    eager_s: float,
    backend: str,
) -> None:
    artifact, folder, _ = compiled
    cache = tmp_path / "compiled"
    shutil.copytree(folder, cache)

    def race(calls: Any, *args: Any, **options: Any) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {"compiled": [1.0], "eager": [eager_s]}

    monkeypatch.setattr(program_binder, "race", race)
    assert widepack.load(artifact, backend="aot", compile="now", cache=cache).backend == "aot"
    ens = widepack.load(artifact, cache=cache)
    assert ens.backend == backend
    x = torch.randn(6, 64)
    torch.testing.assert_close(ens(x), widepack.load(artifact, backend="eager")(x))
    assert widepack.load(artifact, cache=cache, backend="eager").backend == "eager"
    assert widepack.load(artifact, cache=cache, members=[0, 1]).backend == "eager"
    if backend == "aot":  # without the program, or where others may write, the note is passed over
        (cache / "notes").chmod(0o777)
        assert widepack.load(artifact, cache=cache).backend == "eager"
        (cache / "notes").chmod(0o700)
        for place in cache.glob("*/record.json"):
            shutil.rmtree(place.parent)
        assert widepack.load(artifact, cache=cache).backend == "eager"


def test_auto_takes_the_backend_of_the_plan_if_it_is_compiled(
    compiled: tuple[Path, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    artifact, folder, _ = compiled
    monkeypatch.setattr(CompiledChoice, "backend", lambda self, pattern, stored: "")
    assert widepack.load(artifact, cache=folder).backend == "eager"

    from widepack.inference.programs.bound_program import StoredProgram
    from widepack.inference.programs.program_source import ProgramSource

    original = ProgramSource.wide
    monkeypatch.setattr(
        ProgramSource,
        "wide",
        lambda self, pattern: [
            StoredProgram(w.program, replace(w.plan, backend="aot"), w.content)
            for w in original(self, pattern)
        ],
    )
    assert widepack.load(artifact, cache=folder).backend == "aot"
    with pytest.warns(
        UserWarning,
        match="measured on backend 'aot', which cannot be used here, so 'eager' runs instead: .* has not "
        "been compiled",
    ):
        assert widepack.load(artifact, cache=tmp_path / "empty").backend == "eager"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.warns(
        UserWarning, match="backend 'aot', which cannot be used here, .* other users may write here"
    ):
        assert widepack.load(artifact, cache=tmp_path / "open").backend == "eager"


def test_a_program_of_another_machine_or_torch_is_refused(
    compiled: tuple[Path, Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.backends import aot

    artifact, folder, _ = compiled
    other = "DEFAULT" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "AVX2"
    changes: list[tuple[Any, str, Any]] = [
        (torch.backends.cpu, "get_cpu_capability", lambda: other),
        (torch, "__version__", "2.13.1"),
        (torch.version, "git_version", "another build"),
        (aot, "instructions", lambda: "fma sse2"),
        (aot, "OPTIONS", {**aot.OPTIONS, "max_autotune": True}),
    ]
    for where, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            with pytest.raises(widepack.UsageError, match="has not been compiled for this machine"):
                widepack.load(artifact, backend="aot", cache=folder)
    assert widepack.load(artifact, backend="aot", cache=folder).backend == "aot"


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Writes a record with its own hash, as a program that widepack did not compile could have."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "record": content}))


@pytest.mark.parametrize("damage", ["bytes", "package", "weights", "constants", "file"])
def test_a_damaged_program_is_refused(
    damage: str, compiled: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    artifact, folder, _ = compiled
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (record,) = copy.glob("*/record.json")
    (package,) = copy.glob("*/*.pt2")
    data, content = package.read_bytes(), json.loads(record.read_text())["record"]
    if damage == "bytes":
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        package.write_bytes(changed)
    elif damage == "package":  # matches its record, but is not a package
        package.write_bytes(b"PK no package")
        content["files"][package.name] = [13, hashlib.sha256(b"PK no package").hexdigest(), 0]
    elif damage == "weights":
        content["variants"][0]["weights"][0][1][0] += 1
    elif damage == "file":
        content["variants"][0]["file"] = "../else.pt2"
    else:
        content["variants"][0]["conditions"] = [["import", "os", 1]]
    write_record(record, content)
    words = "has not been compiled" if damage == "bytes" else "cannot be used.*compile again"
    with pytest.raises(widepack.WidepackError, match=words):
        widepack.load(artifact, backend="aot", cache=copy)


def load_wrong(
    artifacts: Artifacts, folder: Path, patch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> widepack.WideModel:
    """Loads a network whose compiled program gives the answers of the flat graph and a change."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from widepack.backends import aot
    from widepack.backends.tracing import traced
    from widepack.backends.variants import Variant

    def nothing(task: Any, flat: Any, example: Any, path: Path) -> Any:
        path.write_bytes(b"")
        return replace(traced(flat, example, task.dims, task.device), shapes=ShapeEnv())  # no conditions

    def wrong(path: Path, weights: Any, row: Any, task: Any) -> Variant:
        def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
            return [y + change(given[0]) for y in task.eager(*given)]

        return Variant(run, row["conditions"], row["least"])

    patch.setattr(aot, "_compile", nothing)
    patch.setattr(aot, "_open", wrong)
    return widepack.load(artifacts("mlp", "wide"), backend="aot", compile="now", cache=folder)


def test_a_program_that_answers_wrongly_is_not_kept(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        widepack.WidepackError,
        match=r"differs from the flat graph at B = \d+.*is off by 1.00e-02, the bound is .*It is not used",
    ):
        load_wrong(artifacts, tmp_path, monkeypatch, lambda x: 0.01)
    assert not list(tmp_path.glob("*/record.json"))


def test_the_flat_graph_runs_one_row_if_the_program_is_wrong_there(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load_wrong(artifacts, tmp_path, monkeypatch, lambda x: x.shape[0] == 1)
    (record,) = tmp_path.glob("*/record.json")
    assert json.loads(record.read_text())["record"]["variants"][0]["least"] == {"B": 2}
    x = torch.randn(2, 64)
    torch.testing.assert_close(ens(x[:1]), ens(x)[:, :1])


def test_options_that_the_command_refuses(
    compiled: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    artifact, _, _ = compiled
    assert compile_(tmp_path / "none.wide").exit_code == 1
    refused = compile_(artifact, "--entry", "decode")
    assert refused.exit_code == 2
    assert "there is no entry 'decode'; the entries of this artifact are forward" in refused.stderr
    assert compile_(artifact, "--backend", "eager").exit_code == 2
    open_ = tmp_path / "open"
    open_.mkdir()
    open_.chmod(0o777)
    refused = compile_(artifact, "-o", open_, "--pattern", "shared")
    assert refused.exit_code == 2
    assert "other users may write here (mode 0777)" in refused.stderr
    assert not list(open_.iterdir())


# ONNX Runtime


@pytest.fixture(scope="module")
def written(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns an artifact, and the folder with the ONNX file of its program of pattern `shared`."""
    for package in ("onnxruntime", "onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"backend onnxruntime needs {package}: the extra onnx")
    artifact, folder = artifacts("mlp", "wide"), tmp_path_factory.mktemp("onnx") / "files"
    done = compile_(artifact, "-o", folder, "--pattern", "shared", "--backend", "onnxruntime")
    assert done.exit_code == 0, done.output
    return artifact, folder


def test_onnx_runtime_answers_as_the_members_do(written: tuple[Path, Path]) -> None:
    artifact, folder = written
    ens, case = widepack.load(artifact, backend="onnxruntime", cache=folder), cases.load("mlp")
    assert ens.backend == "onnxruntime"
    bound = Bound()
    for batch in (1, 2, 5, 32):
        (x,), _ = case.sample(batch, batch)
        y = ens(x)
        for i in range(case.N):
            bound.add(y[i], run(case.member(i), (x,), {}), run(case.member(i).double(), (x.double(),), {}))
    bound.check()
    strided = torch.randn(64, 6).t()
    torch.testing.assert_close(ens(strided), ens(strided.contiguous()))
    with pytest.raises(widepack.InputError, match="63 at axis 1"):
        ens(torch.randn(6, 63))
    rows = torch.randn(case.N, 2, 64)
    y = ens.each(rows)  # the same graph, with a row of the input for each member
    torch.testing.assert_close(y, torch.stack([ens(x)[i] for i, x in enumerate(rows)]))


def test_the_graph_of_a_member_has_no_weights(written: tuple[Path, Path]) -> None:
    onnx_ir = pytest.importorskip("onnx_ir")
    _, folder = written
    for path in folder.glob("*/member.onnx"):
        assert path.stat().st_size < 100_000
        weights = [w.name for w in MemberGraph.of_file(path.read_bytes()).weights]
        model = onnx_ir.load(path)
        assert weights and not {*weights} & {*model.graph.initializers}
        assert all(v.const_value.size < 64 for v in model.graph.initializers.values())


class Both(nn.Module):
    on: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("on", torch.rand(3) < 0.5)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        used = keep & self.on
        return self.layer(x).where(used, 0.0), self.layer.weight.mean(), used


def test_outputs_that_are_weights_and_booleans_can_be_written(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    modules = [Both() for _ in range(3)]
    path = built(tmp_path, Both, modules, "x=float32[B,4]", "keep=bool[B,3]")
    ens = widepack.load(path, backend="onnxruntime", compile="now", cache=tmp_path / "cache")
    assert ens.backend == "onnxruntime"
    x, keep = torch.randn(5, 4), torch.rand(5, 3) < 0.5
    found = ens(x, keep)
    for i, module in enumerate(modules):
        torch.testing.assert_close(tuple(y[i] for y in found), module(x, keep))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        heads = x[:, None]
        return nn.functional.scaled_dot_product_attention(
            self.layer(heads), heads, heads, keep[:, None, None]
        )


def test_queries_without_keys_in_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    modules = [Attends() for _ in range(2)]
    path = built(tmp_path, Attends, modules, "x=float32[B,5,4]", "keep=bool[B,5]")
    ens = widepack.load(path, backend="onnxruntime", compile="now", cache=tmp_path / "cache")
    x, keep = torch.randn(3, 5, 4), torch.rand(3, 5) < 0.5
    keep[1] = False
    torch.testing.assert_close(ens(x, keep), torch.stack([module(x, keep) for module in modules]))


def test_a_dynamic_batch_adds_no_size_arithmetic_to_an_onnx_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx_ir = pytest.importorskip("onnx_ir")
    for i in range(2):
        torch.save(nn.GRU(4, 6, num_layers=2, batch_first=True).state_dict(), tmp_path / f"{i}.pt")
    model = "torch.nn:GRU"
    options = {"input_size": 4, "hidden_size": 6, "num_layers": 2, "batch_first": True}
    artifact = tmp_path / "e.wide"
    widepack.build(
        sorted(tmp_path.glob("*.pt")),
        artifact,
        model=model,
        model_args=options,
        inputs=["input=float32[B,5,4]"],
        pt2=False,
    )
    ens = widepack.load(artifact, backend="onnxruntime", strategies="loop", cache=tmp_path / "cache")
    paths = list((tmp_path / "cache").glob("*/member.onnx"))
    assert paths
    for path in paths:
        model = onnx_ir.load(path)
        bodies = {f.name: list(f) for f in model.functions.values()}  # of a loop, called once for each member
        nodes = [inner for n in model.graph for inner in bodies.get(n.op_type, [n])]
        assert sum(n.op_type == "GRU" for n in nodes) == 2  # two layers of one member
        assert not [n for n in nodes if n.op_type == "Mul"]
        computed = [n.inputs[1].producer() for n in nodes if n.op_type == "Reshape"]
        assert not [n for n in computed if n is not None and n.op_type == "Concat"]
    for batch in (1, 3):
        x = torch.randn(batch, 5, 4)
        for i, (y, h) in enumerate(zip(*ens(x))):
            member = nn.GRU(**options)
            member.load_state_dict(torch.load(tmp_path / f"{i}.pt"))
            want, state = member(x)
            torch.testing.assert_close(y, want)
            torch.testing.assert_close(h, state)


@pytest.mark.parametrize("name", ["member.onnx", "session.onnx"])
def test_a_damaged_onnx_file_is_refused(name: str, written: tuple[Path, Path], tmp_path: Path) -> None:
    artifact, folder = written
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    onnx_graphs.forget()
    for path in copy.glob(f"*/{name}"):
        record = path.with_name("record.json")
        content = json.loads(record.read_text())["record"]
        path.write_bytes(b"no model")
        content["files"][path.name] = [8, hashlib.sha256(b"no model").hexdigest(), 0]
        write_record(record, content)
    if name == "member.onnx":  # without the sessions that were made of it
        for path in copy.glob("*/session.onnx"):
            shutil.rmtree(path.parent)
    with pytest.raises(widepack.WidepackError, match="(?s)cannot run .*remove the folder"):
        widepack.load(artifact, backend="onnxruntime", cache=copy)
    onnx_graphs.forget()


def test_without_onnx_runtime_the_error_names_the_package(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        widepack.UsageError, match=r"needs the package onnxruntime .*pip install 'widepack\[onnx\]'"
    ):
        widepack.load(artifacts("mlp", "wide"), backend="onnxruntime", compile="now")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot", "compile", "onnxruntime"])
@pytest.mark.parametrize("name", ["mlp", "frozen_trunk", "ragged_heads", "textcnn"])
def test_every_backend_gives_the_members_answers(
    name: str, backend: str, artifacts: Artifacts, tmp_path: Path
) -> None:
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the extra onnx")
    check_against_members(name, backend, artifacts, tmp_path)


def check_against_members(name: str, backend: str, artifacts: Artifacts, cache: Path) -> None:
    """Compares every member with its float64 answers, in both patterns, at batches 1, 2, 5 and 32."""
    case = cases.load(name)
    ens = widepack.load(artifacts(name), backend=backend, compile="now", cache=cache)
    assert ens.backend == backend
    bounds: dict[int, Bound] = {}
    members = [(case.member(i), case.member(i).double()) for i in range(case.N)]
    for batch in (1, 2, 5, 32):
        samples = [case.sample(batch, 1000 * batch + i) for i in range(case.N)]
        args, kwargs = stack([a for a, _ in samples]), stack([k for _, k in samples])
        answers = ens(*samples[0][0], **samples[0][1]), ens.each(*args, **kwargs)
        for i, (member, exact) in enumerate(members):
            for answer, (a, k) in zip(answers, (samples[0], samples[i])):
                found = [answer] if isinstance(answer, (torch.Tensor, list)) else list(leaves(answer))
                alone, truth = leaves(run(member, a, k)), leaves(run(exact, double(a), double(k)))
                for number, (wide, mine, right) in enumerate(zip(found, alone, truth, strict=True)):
                    bounds.setdefault(number, Bound()).add(wide[i], mine, right)
    for bound in bounds.values():
        bound.check()


@pytest.mark.slow
def test_no_call_compiles(artifacts: Artifacts) -> None:
    from torch._dynamo.utils import counters

    ens, eager = (
        widepack.load(artifacts("frozen_trunk"), backend="compile", compile="now"),
        widepack.load(artifacts("frozen_trunk")),
    )
    before = dict(counters["stats"])
    for batch in (1, 3, 7, 20, 40):
        args, kwargs = cases.load("frozen_trunk").sample(batch, batch)
        torch.testing.assert_close(ens(*args, **kwargs), eager(*args, **kwargs), rtol=1e-4, atol=1e-5)
    assert dict(counters["stats"]) == before
