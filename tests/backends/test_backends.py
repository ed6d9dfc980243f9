"""Tests the cost of a call on each backend, and that every backend returns the members' answers."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bound_tasks import task_of
from inside import remembered_calls
from support import Artifacts

import widepack
from widepack.backends.flat import dense, flatten
from widepack.backends.member_loops import FlatOutput
from widepack.backends.variants import Checked, Variant
from widepack.runtime.graph_module import graph_module
from widepack.system.compiled_cache import CompiledCache, default_folder


def seconds(run: Callable[[], object], calls: int = 5) -> float:
    """Returns the CPU seconds of one call on this thread, without the time of other processes."""
    start = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - start) / calls


def test_a_call_costs_little_more_than_the_bare_graph(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))
    x = torch.randn(1, 64)
    ens(x)
    bare = ens.entry("forward").programs.of("shared")[0].executable
    with torch.inference_mode():
        rounds = [
            (seconds(lambda: bare.forward(*bare.weights, x)), seconds(lambda: ens(x))) for _ in range(300)
        ]
    graph_us, call_us = (
        1e6 * min(r[i] for r in rounds) for i in (0, 1)
    )  # the minimum of many calls, because other processes use the caches too
    assert call_us - graph_us < 60, (
        "a call costs more than 60 us beside its graph; it is about 12 us on an idle machine"
    )


def test_repeated_calls_are_checked(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))
    x, xs = torch.randn(3, 64), torch.randn(8, 3, 64)
    for _ in range(2):
        assert ens(x).shape == ens.each(xs).shape == (8, 3, 10)
        assert torch.equal(ens(x), ens(input=x))
        assert torch.equal(ens.each(xs), ens(widepack.each(xs)))
        with pytest.raises(widepack.InputError, match="63 at axis 1"):
            ens(torch.randn(3, 63))
        with pytest.raises(widepack.InputError, match="is float64"):
            ens(x.double())
        with pytest.raises(
            widepack.InputError, match="is sparse_coo, the model takes a dense tensor.*to_dense"
        ):
            ens(x.to_sparse())
        with pytest.raises(widepack.InputError, match="to give each member a separate input call ens.each"):
            ens(xs)
        with pytest.raises(widepack.InputError, match="takes 1 inputs by position"):
            ens(x, x)
        with pytest.raises(widepack.InputError, match="a list of 3"):
            ens([1, 2, 3])
    ens.close()
    with pytest.raises(widepack.UsageError, match="closed"):
        ens(x)


def test_the_number_of_remembered_shapes_is_limited(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widepack.inference.entry.SEEN", 3)
    ens = widepack.load(artifacts("mlp"))
    x = torch.randn(9, 64)
    whole = ens(x)
    for batch in (1, 2, 3, 4, 5, 9, 1, 9):
        torch.testing.assert_close(ens(x[:batch]), whole[:, :batch])
        assert remembered_calls(ens.entry("forward")) <= 3


def test_a_caller_may_write_into_an_answer(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))
    x = torch.randn(2, 64)
    first, kept = ens(x), x.clone()
    want = first.clone()
    with torch.inference_mode():
        first.zero_()
    assert torch.equal(x, kept)
    assert torch.equal(ens(x), want)


# Programs that compilers get


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["mlp", "frozen_trunk", "ragged_heads", "encoder", "lstm"])
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_a_flat_program_gives_the_members_answers(name: str, pattern: str, artifacts: Artifacts) -> None:
    entry = widepack.load(artifacts(name)).entry("forward")
    for bound in entry.programs.of(pattern):
        run = bound.executable
        flat = flatten(run.main, run.given, "aot", "it")
        assert all(n.body is None for n in flat.program.nodes)
        graph = graph_module(flat.program, torch.device("cpu"))
        for batch in (1, 3):
            inputs = entry.programs.inputs.drawn(
                pattern, {**entry.programs.inputs.sizes_of(bound.plan), "B": batch}
            )
            with torch.inference_mode():
                found, want = flat.outputs(graph(*flat.weights, *inputs)), list(run.eager(*inputs))
            assert entry.programs.probe_check.differ(pattern, found, want) == ""
            assert entry.programs.probe_check.differ(pattern, [changed(f) for f in found], want)


def changed(value: Any) -> Any:
    """Returns the value with an error that is larger than rounding."""
    return (
        [changed(v) for v in value]
        if isinstance(value, list)
        else value * 1.001 + 0.001
        if value.is_floating_point()
        else value + 1
    )


def test_a_program_that_is_too_long_unrolled_is_refused(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widepack.backends.flat.MOST_NODES", 3)
    with pytest.raises(
        widepack.UsageError,
        match=r"(?s)has [0-9,]+ nodes with its loops written out for 8 members.* takes at most 3:"
        r".*backend='eager'",
    ):
        widepack.load(artifacts("mlp"), backend="aot", compile="now")


def test_dense_weights_are_copied_only_if_necessary() -> None:
    w = torch.randn(4, 5, 6)
    for whole in (
        w,
        w.transpose(1, 2),
        w.permute(2, 0, 1),
        w[1:3],
        w[:1],
        w.transpose(0, 2)[:, :, :1].squeeze(2).t()[None].squeeze(0)[:0],
    ):
        assert dense(whole).data_ptr() == whole.data_ptr() or not whole.numel()
    for part in (w[:, 1:3], w[..., ::2], w[0, 0].expand(3, 6)):
        assert dense(part).is_contiguous()
        assert dense(part).data_ptr() != part.data_ptr()
        assert torch.equal(dense(part), part)


# The conditions of compiled programs


def checked(artifacts: Artifacts, *variants: Variant) -> Checked:
    run = widepack.load(artifacts("mlp")).entry("forward").programs.of("shared")[0].executable
    return Checked(task_of(run.main, lambda x: ["flat graph"]), [FlatOutput(0)], variants)


def says(word: str) -> Callable[[Any], Any]:
    return lambda given: [word]


def test_the_first_valid_variant_runs_or_the_flat_graph(artifacts: Artifacts) -> None:
    run = checked(
        artifacts,
        Variant(says("small"), [["lt", "B", 4]]),
        Variant(says("even"), [["eq", ["mod", "B", 2], 0]], {"B": 2}),
    )
    found = [run(torch.randn(b, 64))[0] for b in (1, 2, 3, 4, 5, 6, 1)]
    assert found == ["small", "small", "small", "even", "flat graph", "even", "small"]
    assert checked(artifacts, Variant(says("x"), [], {"B": 2}))(torch.randn(1, 64)) == ["flat graph"]


def test_native_code_gets_only_inputs_that_it_was_compiled_for(artifacts: Artifacts) -> None:
    seen: list[torch.Tensor] = []

    def native(given: list[torch.Tensor]) -> Any:
        seen.extend(given)
        return ["ran"]

    run = checked(artifacts, Variant(native))
    x = torch.randn(6, 64)
    for wrong in (
        torch.randn(6, 63),
        x.double(),
        torch.randn(64),
        torch.randn(8, 6, 64),
        x.to_sparse(),
        x.to("meta"),
    ):
        with pytest.raises(widepack.InputError, match=r"takes float32\[B,64\]"):
            run(wrong)
    with pytest.raises(widepack.InputError, match="takes 1 inputs"):
        run(x, x)
    assert not seen
    for strided in (torch.randn(64, 6).t(), torch.randn(6, 128)[:, ::2], torch.randn(1, 64).expand(6, 64)):
        assert run(strided) == ["ran"]
        assert seen[-1].is_contiguous()
        assert torch.equal(seen[-1], strided)
    assert run(torch.randn(0, 64)) == ["flat graph"]


# The cache of compiled programs


def compiler(calls: list[Path], content: str = "code") -> Callable[[Path], dict[str, Any]]:
    def compile_into(folder: Path) -> dict[str, Any]:
        calls.append(folder)
        (folder / "program").write_text(content)
        return {"content": content}

    return compile_into


def test_an_entry_is_compiled_once_and_stored_completely(tmp_path: Path) -> None:
    cache = CompiledCache(tmp_path / "a" / "cache")
    calls: list[Path] = []
    assert cache.find("key") is None

    def fails(folder: Path) -> dict[str, Any]:
        (folder / "program").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.make("key", fails)
    assert cache.find("key") is None
    assert [p.name for p in cache.folder.iterdir()] == ["key.lock"]
    place, record = cache.make("key", compiler(calls))
    assert (place / "program").read_text() == record["content"] == "code"
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.make("key", compiler(calls)) == cache.find("key") == (place, record)
    assert len(calls) == 1


def test_two_compilers_make_one_entry(tmp_path: Path) -> None:
    calls: list[Path] = []

    def slow(folder: Path) -> dict[str, Any]:
        time.sleep(0.2)
        return compiler(calls)(folder)

    threads = [
        threading.Thread(target=lambda: CompiledCache(tmp_path / "cache").make("key", slow)) for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "record", "number", "nested", "link"])
def test_a_damaged_entry_is_compiled_again(damage: str, tmp_path: Path) -> None:
    cache = CompiledCache(tmp_path / "cache")
    calls: list[Path] = []
    place, _ = cache.make("key", compiler(calls))
    program = place / "program"
    if damage == "changed":
        program.write_text("cods")
    elif damage == "cut":
        program.write_text("")
    elif damage == "gone":
        program.unlink()
    elif damage == "record":
        (place / "record.json").write_text('{"files": [1]}')
    elif damage == "number":
        text = (place / "record.json").read_text()
        (place / "record.json").write_text(re.sub(r"\b[0-9]+\b", "7", text, count=1))
    elif damage == "nested":
        (place / "record.json").write_text("[" * 100_000 + "]" * 100_000)
    else:
        program.rename(tmp_path / "else")
        program.symlink_to(tmp_path / "else")
    if damage == "link":
        with pytest.raises(widepack.UsageError, match="regular files only"):
            cache.find("key")
        return
    assert cache.find("key") is None
    assert cache.make("key", compiler(calls))[1]["content"] == "code"
    assert len(calls) == 2


def test_files_that_other_users_can_write_are_refused(tmp_path: Path, artifacts: Artifacts) -> None:
    cache = CompiledCache(tmp_path / "cache")
    place, _ = cache.make("key", compiler([]))
    for path in (cache.folder, place, place / "program", place / "record.json"):
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            with pytest.raises(
                widepack.UsageError, match=r"(?s)other users may write here \(mode 0[0-7]{3}\).*chmod go-w"
            ):
                cache.find("key")
        path.chmod(mode)
    assert cache.find("key")
    cache.folder.chmod(0o777)
    with pytest.raises(widepack.UsageError, match="other users may write here"):
        cache.make("other", compiler([]))
    with pytest.raises(widepack.UsageError, match="other users may write here"):
        widepack.load(artifacts("mlp"), backend="aot", cache=cache.folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    cache = CompiledCache(tmp_path / "cache")
    cache.make("key", compiler([]))
    os.chown(cache.folder, 12345, -1)
    with pytest.raises(widepack.UsageError, match="the owner is user 12345, but this process runs as user 0"):
        cache.find("key")


def test_the_environment_sets_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WIDEPACK_CACHE", raising=False)
    assert default_folder() == tmp_path / "widepack" / "aot"
    monkeypatch.setenv("WIDEPACK_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


# Loading


def test_nothing_compiles_without_a_request(artifacts: Artifacts, tmp_path: Path) -> None:
    for name in ("aot", "compile"):
        with pytest.raises(
            widepack.UsageError,
            match=r"(?s)compiles only on request.*widepack compile.*compile='now'"
            r"|compile='now'.*widepack compile",
        ):
            widepack.load(artifacts("mlp"), backend=name, cache=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    ens = widepack.load(artifacts("mlp"), cache=tmp_path / "none")
    assert ens.backend == "eager"
    assert "cpu, eager" in repr(ens)
    assert "cpu, auto" in repr(widepack.load(artifacts("mlp"), warmup=False))


def test_invalid_arguments_of_load_are_refused(artifacts: Artifacts) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"backend": "onnx"}, "backend='onnx' is unknown; known: auto, eager, compile, aot, onnxruntime"),
        ({"compile": True}, "compile=True is unknown; known: None, which never compiles, and 'now'"),
        ({"cache": 3}, "cache is a int; give the folder"),
        ({"threads": 0}, "threads=0 is not a number of threads"),
        ({"threads": True}, "threads=True is not a number of threads"),
    ]
    for arguments, words in wrong:
        with pytest.raises(widepack.UsageError, match=re.escape(words)):
            widepack.load(artifacts("mlp"), **arguments)
