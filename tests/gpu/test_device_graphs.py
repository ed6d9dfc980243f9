"""Tests calls that run by CUDA graphs on a device. On the CPU, with `WIDEPACK_TEST_DEVICE=cpu`, a stand-in
records the graphs: the same cases are in `tests/inference/test_graphs.py`.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_cases import (
    MEMBERS,
    artifact,
    check_entries,
    check_equal,
    check_patterns,
    check_swaps,
    check_swaps_during_calls,
    check_threads,
    drawn,
    drawn_ids,
    exact,
    in_threads,
    of_member,
)
from graph_stand_in import use_stand_in
from isolating import answers, to
from support import Artifacts

import cases
from widepack import load
from widepack.backends.graph_capture import GraphRecorder, recorder_for
from widepack.inference.load import on_device
from widepack.inference.model import WideModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(autouse=True)
def stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        use_stand_in(monkeypatch)


def graphed(folder: Path, device: str, case: str = "two") -> WideModel:
    return load(artifact(folder, case), device=device, graph=True)


def recorder(device: str) -> GraphRecorder:
    found = recorder_for(on_device(device))
    assert found is not None
    return found


def test_the_recorder_replays_reads_what_changed_and_survives_a_failed_capture(device: str) -> None:
    graphs = recorder(device)
    memory = graphs.new_memory()
    x = torch.ones(1024, device=device)

    def run() -> torch.Tensor:
        return (x * 2).sum() + 1

    def reading() -> float:
        return float((x * 2).sum().item())

    with torch.inference_mode(), graphs.in_order(memory):
        graphs.warm_up(run, 3)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                graphs.capture(reading, memory)
            assert torch.randn(4, device=device).isfinite().all(), "the generator still draws"
            captured = graphs.capture(run, memory)
            for value in (1.0, 3.0):
                x.fill_(value)
                captured.replay()
                assert float(captured.outputs) == 2048 * value + 1
        assert graphs.seconds(captured.replay, 5) > 0
    graphs.wait(memory)
    if device == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_every_pattern_and_batch(folder: Path, device: str) -> None:
    ens = graphed(folder, device)
    check_patterns(ens, device)
    assert ens.graph_use()[0].captured == (1, 2, 4, 8, 16, 32, 64)


def test_two_entries(folder: Path, device: str) -> None:
    check_entries(graphed(folder, device), device)


def test_threads_with_one_stream_each(folder: Path, device: str) -> None:
    check_threads(graphed(folder, device), device)


def test_swaps(folder: Path, device: str) -> None:
    check_swaps(graphed(folder, device), artifact(folder, "two").parent, device)


def test_swaps_during_calls(folder: Path, device: str) -> None:
    check_swaps_during_calls(graphed(folder, device), artifact(folder, "two").parent, device)


def test_two_models_capture_and_swap_at_once(folder: Path, device: str) -> None:
    """The first calls of one model capture graphs while members of the other are swapped."""
    place = artifact(folder, "two").parent
    for _ in range(3):
        one, two = graphed(folder, device), graphed(folder, device)

        def work(number: int, one: WideModel = one, two: WideModel = two) -> None:
            if number == 0:
                for k in range(6):
                    two.swap(k % MEMBERS, place / "new.pt")
                return
            for rows in (1, 2, 4, 8, 16):
                x, shift = drawn(rows, rows, 6, device=device), drawn(1, 8, device=device)
                answer = one(x, shift)
                check_equal(of_member(answer, 0), exact("two", one, 0, x, shift))

        in_threads(work, 3)


def test_other_sizes_and_mixed_rows(folder: Path, device: str) -> None:
    steps = graphed(folder, device, "steps")
    example = steps.manifest.entries["forward"].dims["T"].example
    for rows, length in ((3, example), (3, example + 1), (70, example)):
        ids = drawn_ids(rows, rows, length, device=device)
        check_equal(steps(ids)[1], exact("steps", steps, 1, ids))
    centered = graphed(folder, device, "centered")
    for rows in (3, 4, 5):
        x = drawn(rows, rows, 4, device=device)
        check_equal(centered(x)[2], exact("centered", centered, 2, x))
    assert centered.graph_use()[0].captured == (4,)


def test_random_numbers_run_without_a_graph(folder: Path, device: str) -> None:
    with pytest.warns(UserWarning, match="random numbers"):
        ens = graphed(folder, device, "dropping")
    x = drawn(0, 4, 4, device=device)
    assert not torch.equal(ens(x), ens(x))


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_networks_answer_as_without_graphs(name: str, artifacts: Artifacts, device: str) -> None:
    """Answers by graphs are those of the same program without them, up to rounding of another batch."""
    without = answers(load(artifacts(name), device=device), name, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of the networks have programs that no graph can run
        ens = load(artifacts(name), device=device, graph=True)
        found = [answers(ens, name, device) for _ in range(2)]
    for mine in found:
        for a, b in zip(mine, without, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_graph_is_faster_where_launches_are_the_cost(
    artifacts: Artifacts, device: str, record_property: Callable[[str, object], None]
) -> None:
    """Times are recorded for the reader. Only on a GPU the graph must be faster."""
    case = cases.load("mlp")
    args, kwargs = to(case.sample(4, 0), device)
    times = {}
    for graph in (False, True):
        ens = load(artifacts("mlp"), device=device, graph=graph)
        found = []
        for k in range(60):
            began = time.perf_counter()
            ens(*args, **kwargs)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
            del k
        times[graph] = statistics.median(found[10:])
    record_property("seconds", {str(k): v for k, v in times.items()})
    if device.startswith("cuda"):
        assert times[True] < times[False]


def test_a_memory_whose_graphs_are_gone_is_captured_into_again(device: str) -> None:
    graphs = recorder(device)
    memory = graphs.new_memory()
    x = torch.ones(1024, device=device)
    with torch.inference_mode(), graphs.in_order(memory):
        for value in (1.0, 2.0):
            graphs.warm_up(lambda: x * 2 + 1, 3)
            captured = graphs.capture(lambda: x * 2 + 1, memory)
            x.fill_(value)
            captured.replay()
            assert float(captured.outputs[0]) == 2 * value + 1
            del captured


@pytest.mark.parametrize("graph", [True, "auto"])
def test_calls_after_the_graphs_were_dropped(folder: Path, device: str, graph: bool | str) -> None:
    ens = load(artifact(folder, "two"), device=device, graph=graph)
    for _ in range(2):
        check_patterns(ens, device)
        ens.entry("forward").forget()
