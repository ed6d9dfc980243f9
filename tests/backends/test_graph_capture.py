"""Tests the stand-in for CUDA graphs: each rule of graphs, so that other tests can rely on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graph_stand_in import GARBAGE, StandInGraph, StandInRecorder
from torch import Tensor

from widepack.backends.graph_capture import GraphRecorder, recorder_for

CPU = torch.device("cpu")


def captured(run: Callable[[], object], memory: object = None) -> StandInGraph:
    recorder = StandInRecorder()
    with torch.inference_mode():
        return recorder.capture(run, memory or recorder.new_memory())  # type: ignore[arg-type]


def garbage(value: Tensor) -> bool:
    """Returns whether a tensor has numbers of no run."""
    return bool((value.contiguous().view(torch.uint8) == GARBAGE).all())


def test_a_cpu_has_no_graphs() -> None:
    assert recorder_for(CPU) is None


def test_a_replay_reads_what_its_inputs_hold_now() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    graph = captured(lambda: torch.nn.functional.linear(x, w).relu() + 1)
    for seed in range(3):
        x.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(graph.outputs, (x @ w.T).relu() + 1)


def test_a_capture_computes_nothing() -> None:
    x = torch.ones(3)
    graph = captured(lambda: x * 2)
    assert garbage(graph.outputs)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full((3,), 2.0))


def test_a_weight_written_in_place_shows_and_one_in_other_memory_does_not() -> None:
    x, weights = torch.ones(2), [torch.ones(2)]
    graph = captured(lambda: x * weights[0])
    weights[0].fill_(3)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full((2,), 3.0))
    weights[0] = torch.full((2,), 7.0)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full((2,), 3.0))


def test_an_input_that_is_replaced_does_not_show() -> None:
    given = [torch.ones(2)]
    graph = captured(lambda: given[0] + 1)
    given[0] = torch.full((2,), 5.0)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full((2,), 2.0))


def test_a_replay_overwrites_the_outputs_of_the_one_before() -> None:
    x = torch.ones(2)
    graph = captured(lambda: x + 1)
    graph.replay()
    first = graph.outputs
    x.fill_(9)
    graph.replay()
    assert torch.equal(first, torch.full((2,), 10.0))


def test_the_replay_of_another_graph_of_the_memory_spoils_outputs() -> None:
    recorder = StandInRecorder()
    memory, x = recorder.new_memory(), torch.ones(2)
    one, two = captured(lambda: x + 1, memory), captured(lambda: x + 2, memory)
    apart = captured(lambda: x + 3)
    for graph in (one, apart, two):
        graph.replay()
    assert garbage(one.outputs)
    assert torch.equal(two.outputs, torch.full((2,), 3.0))
    assert torch.equal(apart.outputs, torch.full((2,), 4.0))


def test_views_and_writes_into_parts_are_replayed() -> None:
    x = torch.randn(4, 6)

    def run() -> Tensor:
        whole = torch.empty(2, 4, 3)
        for i, part in enumerate(x.view(4, 2, 3).unbind(1)):
            whole[i] = part * (i + 1)
        return whole.transpose(0, 1)

    graph = captured(run)
    x.copy_(torch.randn(4, 6))
    graph.replay()
    assert torch.equal(graph.outputs, run())


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
    ],
)
def test_a_read_on_the_host_is_refused_and_the_next_capture_is_not(read: Callable[[Tensor], object]) -> None:
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(lambda: (x + 1, read(x)))
    graph = captured(lambda: x + 1)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full((3,), 2.0))


def test_two_calls_at_once_and_two_captures_at_once_are_refused() -> None:
    recorder = StandInRecorder()
    memory = recorder.new_memory()
    with recorder.in_order(memory), pytest.raises(AssertionError, match="at once"), recorder.in_order(memory):
        pass
    with pytest.raises(RuntimeError, match="another capture"):
        captured(lambda: captured(lambda: torch.ones(2)))


def test_the_stand_in_has_the_interface_of_a_recorder() -> None:
    recorder: GraphRecorder = StandInRecorder()
    assert recorder.warm_up(lambda: 3, 2) == 3
    assert recorder.seconds(lambda: None, 2) >= 0
    assert not recorder.capturing()
