"""Tests when graphs are used: the argument of `load`, captures that fail, and what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_cases import artifact, check_equal, drawn, exact, of_member
from graph_stand_in import StandInGraph, StandInMemory, StandInRecorder, use_stand_in

from widepack import UsageError, load
from widepack.inference.graphs.graph_limits import BYTES_PER_S, kernel_count, why_no_graph, why_slower
from widepack.inference.model import WideModel
from widepack.system.devices import LAUNCH_S
from widepack_artifacts.program import Node, Program, Ref


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("choice")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandInRecorder]:
    return use_stand_in(monkeypatch)


def check_answers(ens: WideModel, rows: int = 3) -> None:
    x, shift = drawn(rows, rows, 6), drawn(1, 8)
    answer = ens(x, shift)
    for i in range(len(ens)):
        check_equal(of_member(answer, i), exact("two", ens, i, x, shift))


def test_a_cpu_has_no_graphs_and_the_error_says_what_they_need(folder: Path) -> None:
    path = artifact(folder, "two")
    with pytest.raises(UsageError) as caught:
        load(path, graph=True)
    assert str(caught.value) == (
        "graph=True needs a CUDA device, and the model is loaded on cpu: a CUDA graph records the kernels of "
        "a GPU.\nLoad with device='cuda', or leave graph out; graph='auto' uses graphs on CUDA only."
    )
    for graph in (False, "auto"):
        ens = load(path, graph=graph)
        check_answers(ens)
        for use in ens.graph_use():
            assert str(use).endswith(": no graph: the model was loaded without graphs on cpu")
        assert "graph" not in repr(ens)


@pytest.mark.parametrize("graph", ["on", 1, None, ["auto"]])
def test_other_values_are_refused(folder: Path, graph: Any) -> None:
    with pytest.raises(UsageError, match="graph=.* is unknown; known: True, False, 'auto'"):
        load(artifact(folder, "two"), graph=graph)


def test_the_text_of_a_model_names_graphs(folder: Path, made: list[StandInRecorder]) -> None:
    ens = load(artifact(folder, "two"), graph=True)
    assert repr(ens).endswith("cpu, eager, CUDA graphs)")
    check_answers(ens)
    use = ens.graph_use()[0]
    assert str(use) == "shared, batch 1 to any: graphs for batch 1, 2, 4, 8, 16, 32, 64; captured: 4"
    assert use.to_json() == {
        "pattern": "shared",
        "batch": (1, None),
        "sizes": (1, 2, 4, 8, 16, 32, 64),
        "captured": (4,),
        "why_not": "",
        "why_not_padded": "",
        "why_not_sizes": {},
        "why_not_calls": (),
    }


# ---------------------------------------------------------------- captures that fail


def failing(error: Exception) -> Callable[..., StandInGraph]:
    def capture(self: StandInRecorder, run: Callable[[], Any], memory: StandInMemory) -> StandInGraph:
        self.captures += 1
        raise error

    return capture


def test_a_capture_that_fails_is_not_repeated_and_is_explained(
    folder: Path, made: list[StandInRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(artifact(folder, "two"), graph=True)
    check_answers(ens, 2)
    monkeypatch.setattr(StandInRecorder, "capture", failing(RuntimeError("operation not permitted\nmore")))
    with pytest.warns(UserWarning, match="the capture failed: RuntimeError: operation not permitted;"):
        check_answers(ens, 7)
    for rows in (7, 2, 16):
        check_answers(ens, rows)
    assert made[0].captures == 2
    use = ens.graph_use()[0]
    assert use.captured == (2,), "the graphs of before stay"
    assert "no other graph is captured: the capture failed: RuntimeError" in str(use)


def test_an_op_that_reads_a_number_is_found_by_the_capture(
    folder: Path, made: list[StandInRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(artifact(folder, "two"), graph=True)
    _, bound = ens.entry("forward").programs.bound()[0]
    run = bound.executable
    call = run.call

    def reading(*values: torch.Tensor) -> Any:
        assert values[0].abs().sum().item() > 0
        return call(*values)

    run.call = reading
    with pytest.warns(UserWarning, match="not permitted when stream is capturing: item"):
        check_answers(ens)
    check_answers(ens)
    assert made[0].captures == 0


def test_too_little_memory_is_remembered_for_the_batch(
    folder: Path, made: list[StandInRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(artifact(folder, "two"), graph=True)
    with monkeypatch.context() as patch:
        patch.setattr(StandInRecorder, "capture", failing(torch.OutOfMemoryError("no memory")))
        check_answers(ens, 8)
    check_answers(ens, 8)
    check_answers(ens, 4)
    use = ens.graph_use()[0]
    assert use.captured == (4,)
    assert use.why_not_sizes == ((8, "there is too little memory for its graph"),)
    assert made[0].captures == 2


def test_a_graph_with_other_answers_is_not_used(
    folder: Path, made: list[StandInRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInGraph, "replay", lambda self: None)
    ens = load(artifact(folder, "two"), graph=True)
    with pytest.warns(UserWarning, match="the graph gives other answers: output (logits|0) "):
        check_answers(ens)
    check_answers(ens)
    assert ens.graph_use()[0].captured == ()


def test_an_error_of_the_program_is_the_calls_error(
    folder: Path, made: list[StandInRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(artifact(folder, "steps"), graph=True)
    example = ens.manifest.entries["forward"].dims["T"].example
    from widepack import InputError

    with pytest.raises(InputError, match="contains 20"):
        ens(torch.full((2, example), 20))
    assert made[0].captures == 0
    ens(torch.full((2, example), 19))
    assert ens.graph_use()[0].captured == (2,)


def test_a_value_on_another_device_is_no_part_of_a_graph(folder: Path) -> None:
    ens = load(artifact(folder, "two"))
    _, bound = ens.entry("forward").programs.bound()[0]
    assert why_no_graph(bound) == ""
    bound.executable.given[0] = bound.executable.given[0].to("meta")
    assert why_no_graph(bound).endswith("is not on cpu")


# ---------------------------------------------------------------- graph="auto"


def test_auto_keeps_the_graphs_that_are_faster(folder: Path, made: list[StandInRecorder]) -> None:
    ens = load(artifact(folder, "two"), graph="auto")
    made[0].times = [1e-3, 2e-3]  # the graph, then the program
    check_answers(ens, 4)
    made[0].times = [2e-3, 2.05e-3]
    check_answers(ens, 8)
    check_answers(ens, 8)
    use = ens.graph_use()[0]
    assert use.captured == (4,)
    assert use.why_not_sizes == ((8, "the graph takes 2e+03 us, the program 2.05e+03 us"),)
    assert made[0].captures == 2


def test_auto_captures_nothing_for_weights_that_take_longer_to_read(
    folder: Path, made: list[StandInRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ens = load(artifact(folder, "two"))
    _, bound = ens.entry("forward").programs.bound()[0]
    assert why_slower(bound.executable) == "", "a small network starts kernels longer than it reads"
    monkeypatch.setattr("widepack.inference.graphs.graph_limits.BYTES_PER_S", BYTES_PER_S / 1e9)
    assert why_slower(bound.executable).startswith("to read its weights takes")
    auto = load(artifact(folder, "two"), graph="auto")
    check_answers(auto)
    assert made[-1].captures == 0
    assert "to start its kernels" in auto.graph_use()[0].why_not
    assert LAUNCH_S > 0


@pytest.mark.parametrize(
    ("op", "args", "x", "expected"),
    [
        ("aten.relu.default", ("x",), "float32[5,B,4]", 1),
        ("widepack.member_convs.default", ("x", "w", None, [1], [0], [1], 1), "", 10),
        ("widepack.grouped_experts.default", ("x", "w", "i"), "", 10),
        ("widepack.rnn_steps.default", (*"xhuw", None, None, False, "tanh"), "float32[5,20,B,8]", 61),
        ("widepack.gru_steps.default", (*"xhuw", None, None, False), "float32[5,20,B,8]", 141),
        ("widepack.gru_steps.default", (*"xhuw", None, None, False), "float32[5,T,B,8]", 8),
        (
            "widepack.lstm_steps.default",
            (*"xhcuw", None, None, None, False),
            "float32[1,20,B,8]",
            181,
        ),
    ],
)
def test_ops_of_several_kernels_count_as_often_as_they_start_some(
    op: str, args: tuple[Any, ...], x: str, expected: int
) -> None:
    given = tuple(Ref(a) if isinstance(a, str) and len(a) == 1 else a for a in args)
    nodes = (Node("x", "aten.transpose.int", (Ref("v"), 1, 2), out=x), Node("y", op, given))
    assert kernel_count(Program((), (), nodes, (), members=5)) == expected
