"""Tests widepack's Triton kernels on a device.

`TRITON_INTERPRET=1 WIDEPACK_TEST_DEVICE=cpu pytest tests/gpu/test_device_triton.py` runs most of these tests
on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_cases import ACTIVATIONS, Chain, closeness
from kernel_runs import recorded_kernels
from recurrent_cases import GATES, Layer
from torch import Tensor

from widepack.kernels.triton_kernels import available, launches
from widepack.kernels.triton_kernels.predictions import PredictedTimes, chain_times, step_times

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture
def ran(device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the ops whose kernels ran, in order. Kernels run also where plain torch is predicted to be
    faster.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    if device == "cpu" and not available.interpreted():
        pytest.skip("needs TRITON_INTERPRET=1 on a CPU")
    for name in ("_chain_pays", "_steps_pay"):
        monkeypatch.setattr(launches, name, lambda *sizes: True)
    return recorded_kernels(monkeypatch)


def layer_on(device: str, *args: Any, **sizes: Any) -> Layer:
    layer = Layer(*args, **sizes)
    layer.x = layer.x.to(device)
    layer.states, layer.weights, layer.biases = (
        [t.to(device) for t in ts] for ts in (layer.states, layer.weights, layer.biases)
    )
    return layer


def chain_on(device: str, *args: Any, **sizes: Any) -> Chain:
    chain = Chain(*args, **sizes)
    chain.x = chain.x.to(device)
    chain.weights = [w.to(device) for w in chain.weights]
    chain.biases = [None if b is None else b.to(device) for b in chain.biases]
    return chain


STEPS: list[dict[str, Any]] = [
    {"members": 3, "steps": 4, "batch": 5, "width": 20},
    {"members": 1, "steps": 1, "batch": 1, "width": 16, "biases": False},
    {"members": 2, "steps": 3, "batch": 17, "width": 7, "one": True},
    {"members": 2, "steps": 9, "batch": 33, "width": 128},
    {"members": 2, "steps": 3, "batch": 4, "width": 96, "biases": False},
    {"members": 2, "steps": 2, "batch": 2, "width": 64, "one": True, "biases": False},
    {"members": 2, "steps": 6, "batch": 9, "width": 24},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", STEPS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("cell", GATES)
def test_steps_equal_the_members(
    cell: str, sizes: dict[str, Any], reverse: bool, dtype: torch.dtype, device: str, ran: list[str]
) -> None:
    layer = layer_on(device, cell, dtype=dtype, **sizes)
    found, truth, own = layer.run(reverse), layer.members(reverse), layer.members(reverse, dtype)
    for f, t, o in zip(found, truth, own):
        closeness(f, t, o)
    assert ran == [f"{cell.partition('_')[0]}_steps"]


CHAINS: list[dict[str, Any]] = [
    {"members": 3, "rows": 5, "widths": (6, 20, 4), "activations": ("relu", "")},
    {"members": 1, "rows": 1, "widths": (3, 16, 16, 1), "activations": ("tanh", "gelu", "")},
    {"members": 2, "rows": 18, "widths": (300, 65, 7), "activations": ("silu", "sigmoid"), "shared": True},
    {"members": 20, "rows": 100, "widths": (64, 128, 64), "activations": ("gelu_tanh", "")},
    {"members": 2, "rows": 4, "widths": (33, 10, 9, 8), "activations": ("gelu_tanh", "", "relu")},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", ["all", "none", "some"])
@pytest.mark.parametrize("sizes", CHAINS, ids=lambda s: "-".join(map(str, s["widths"])))
def test_chains_equal_the_members(
    sizes: dict[str, Any], biases: str, dtype: torch.dtype, device: str, ran: list[str]
) -> None:
    chain = chain_on(device, **sizes, biases=biases, dtype=dtype)
    closeness(chain.run(), chain.members(), chain.members(dtype))
    assert ran == ["mlp_chain"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_every_activation_is_as_exact_as_the_members(
    activation: str, dtype: torch.dtype, device: str, ran: list[str]
) -> None:
    chain = chain_on(device, 2, 20, (24, 32, 16), (activation, activation), dtype=dtype)
    closeness(chain.run(), chain.members(), chain.members(dtype))
    assert ran == ["mlp_chain"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_extreme_numbers_are_those_of_torch(
    activation: str, device: str, ran: list[str]
) -> None:
    """The products with 1 keep each number, also in TF32 with three products."""
    numbers = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-30, -1e-7, 0.599, 0.601, -9.0, 80.0]
    x = torch.tensor([[[n] for n in numbers]], device=device)
    one = torch.ones(1, 1, 1, device=device)
    found = torch.ops.widepack.mlp_chain(x, [one, one], [None, None], [activation, ""])
    want = ACTIVATIONS[activation](x.double()).float()
    torch.testing.assert_close(found, want, rtol=1e-6, atol=5e-7, equal_nan=True)
    assert ran == ["mlp_chain"]


def test_tf32_is_used_only_if_torch_uses_it(device: str, ran: list[str]) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no TF32")
    layer = layer_on(device, "gru", width=128, members=2)
    truth = layer.members(False)[0]
    exact = (layer.run(False)[0].double() - truth).abs().max().item()
    torch.backends.cuda.matmul.allow_tf32 = True  # the fixture `device` restores it
    rounded = (layer.run(False)[0].double() - truth).abs().max().item()
    assert exact < 1e-5 < 1e-4 < rounded < 2e-2
    assert ran == ["gru_steps"] * 2


@pytest.mark.parametrize("kind", ["steps", "chain"])
def test_a_graph_contains_the_kernel_if_it_ran_before(kind: str, device: str, ran: list[str]) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no graphs")

    def run(of: Any) -> Tensor:
        y: Tensor = of.run(False)[0] if kind == "steps" else of.run()
        return y

    def captured(of: Any) -> Tensor:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(of)
        graph.replay()
        torch.cuda.synchronize()
        return y

    made: Callable[[int], Any] = lambda width: (  # noqa: E731
        layer_on(device, "lstm", width=width)
        if kind == "steps"
        else chain_on(device, 3, 5, (4, width, 3), ("relu", ""))
    )
    known, new = made(48), made(49)
    before = run(known)
    assert len(ran) == 1
    assert torch.equal(captured(known), before)
    assert len(ran) == 2, "the captured run started the kernel"
    square = torch.ones(2, 16, 16, device=device)
    torch.bmm(square, square)  # cuBLAS is ready
    count = len(ran)
    torch.testing.assert_close(captured(new), run(new), rtol=1e-5, atol=1e-5)
    assert len(ran) == count + 1, "only the run outside of the capture compiled the new kernel"


def milliseconds(run: Callable[[], object]) -> float:
    """Returns the time of a run in a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(50):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)))
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["gru-8", "gru-32", "lstm-8", "lstm-32", "mlp-100"])
def test_the_kernels_of_the_predictions_are_faster_than_plain_torch(
    shape: str,
    dtype: torch.dtype,
    device: str,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The report of the test has the measured times beside the predicted ones."""
    if device == "cpu":
        pytest.skip("times are of a GPU")
    kind, members = shape.split("-")[0], int(shape.split("-")[1])
    times: PredictedTimes
    subject: Any
    if kind == "mlp":
        widths, activations = (64, *[128] * 5, 64), ("relu",) * 5 + ("",)
        subject = chain_on(device, members, 32, widths, activations, shared=True, dtype=dtype)
        times = chain_times(members, 32, widths, (True,) * 6, activations, True, dtype)
    else:
        subject = layer_on(device, kind, members=members, steps=32, batch=8, width=128, dtype=dtype)
        times = step_times(GATES[kind], members, 32, 8, 128, dtype)
    with torch.inference_mode():
        kernel = milliseconds(lambda: subject.run(*([] if kind == "mlp" else [False])))
        assert len(ran) >= 2
        monkeypatch.setenv(available.SWITCH, "0")
        plain = milliseconds(lambda: subject.run(*([] if kind == "mlp" else [False])))
    record_property("kernel_ms", [kernel, 1e3 * times.kernel])
    record_property("plain_ms", [plain, 1e3 * times.plain])
    assert kernel < plain, f"kernel {kernel:.4f} ms, plain torch {plain:.4f} ms; predicted {times}"
