"""Tests the strategies for GPUs on a device: the members' own convolutions, grouped products of experts.

Times are recorded for the reader beside the times that the plans predict. On the CPU, with
`WIDEPACK_TEST_DEVICE=cpu`, the ops are loops, and a stand-in records the graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_stand_in import use_stand_in
from loaded import saved
from torch import Tensor, nn

from widepack import load
from widepack.backends.graph_capture import recorder_for
from widepack.inference.load import on_device
from widepack.kernel_times.cuda import CudaModel, call_time
from widepack.runtime.meta_values import metas, run_on_meta
from widepack.verification.tf32_bounds import tf32_kinds

OPTIONS: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], 1)
CONVS = torch.ops.widepack.member_convs
EXPERTS = torch.ops.widepack.grouped_experts


@pytest.fixture(autouse=True)
def stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        use_stand_in(monkeypatch)


def drawn(*sizes: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(device)


def operands(
    device: str, members: int, batch: int, channels: int, side: int
) -> tuple[Tensor, Tensor, Tensor]:
    x = drawn(members, batch, channels, side, side, seed=1, device=device)
    weight = drawn(members, channels, channels, 3, 3, seed=2, device=device) / (3 * channels**0.5)
    return x, weight, drawn(members, channels, seed=3, device=device)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Compares with each member alone in float64."""
    for i in range(weight.shape[0]):
        one = [v[i].cpu().double() for v in (x, weight, bias)]
        exact = torch.conv2d(one[0], one[1], one[2], *OPTIONS)
        error = float((y[i].cpu().double() - exact).abs().max())
        eps = torch.finfo(torch.float32).eps
        assert error <= 8 * eps * weight[0, 0].numel() ** 0.5 * float(exact.abs().max()), f"member {i}"


@pytest.mark.parametrize("members", [1, 3, 8, 19])
def test_convolutions_one_after_the_other(device: str, members: int) -> None:
    x, weight, bias = operands(device, members, 4, 16, 12)
    for _ in range(20):  # later calls reuse the memory
        y = CONVS(x, weight, bias, *OPTIONS)
        x = x * 0.5 + y * 0.5
        check(CONVS(x, weight, bias, *OPTIONS), x, weight, bias)


def test_streams_fork_and_join_inside_a_graph(device: str) -> None:
    graphs = recorder_for(on_device(device))
    assert graphs is not None
    memory = graphs.new_memory()
    x, weight, bias = operands(device, 11, 2, 8, 9)

    def run() -> Tensor:
        y = CONVS(x, weight, bias, *OPTIONS).relu()
        return CONVS(y, weight, bias, *OPTIONS)  # type: ignore[no-any-return]

    with torch.inference_mode(), graphs.in_order(memory):
        graphs.warm_up(run, 3)
        captured = graphs.capture(run, memory)
        for seed in (5, 6):
            x.copy_(drawn(*x.shape, seed=seed))
            captured.replay()
            check(captured.outputs, CONVS(x, weight, bias, *OPTIONS).relu(), weight, bias)
    graphs.wait(memory)


def network() -> nn.Module:
    norm = nn.BatchNorm2d(16)
    norm.running_mean, norm.running_var = torch.randn(16), torch.rand(16) + 0.5
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(16, 4, 3, stride=2)
    ).eval()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("strategy", ["grouped", "grouped_channels_last", "unfold_bmm", "streams"])
def test_every_strategy_of_convolutions_passes_the_probe(
    strategy: str, graph: bool, device: str, tmp_path: Any
) -> None:
    path = tmp_path / "e.wide"
    saved(network, tmp_path, "input=float32[B,8,12,12]", members=5, targets=("cpu", "cuda"))
    ens = load(path, device=device, strategies=["wide", strategy], graph=graph)
    ens.entry("forward").probe()
    x = drawn(4, 8, 12, 12, seed=9)
    for _ in range(3):
        found = ens(x.to(device)).cpu()
    for i in range(5):
        torch.manual_seed(i)
        exact = network().double()(x.double()).detach()
        assert float((found[i].double() - exact).abs().max()) < 1e-4


def test_a_compiled_program_has_the_members_own_convolutions(device: str, tmp_path: Any) -> None:
    """Inductor compiles what is between them. On a CPU they are one grouped convolution."""
    saved(network, tmp_path, "input=float32[B,8,12,12]", members=5, targets=("cpu", "cuda"))
    options: dict[str, Any] = {"device": device, "strategies": ["wide", "streams"]}
    ens = load(tmp_path / "e.wide", backend="compile", compile="now", **options)
    entry = ens.entry("forward")
    entry.probe()
    kept = [n.op for n in entry.programs.of("shared")[0].executable.main.nodes if "member_convs" in n.op]
    assert bool(kept) == (device != "cpu")
    x = drawn(4, 8, 12, 12, seed=9).to(device)
    torch.testing.assert_close(ens(x), load(tmp_path / "e.wide", **options)(x), rtol=1e-4, atol=1e-4)


def test_the_probe_passes_with_torchs_settings_of_tf32(device: str, tmp_path: Any) -> None:
    """Convolutions run in TF32 by default; the probe allows its rounding."""
    saved(network, tmp_path, "input=float32[B,8,12,12]", members=5, targets=("cpu", "cuda"))
    torch.backends.cudnn.allow_tf32 = True
    assert ("convolutions" in tf32_kinds(torch.device(device))) == (device != "cpu")
    load(tmp_path / "e.wide", device=device).entry("forward").probe()
    torch.backends.cuda.matmul.allow_tf32 = True
    load(tmp_path / "e.wide", device=device, strategies=["wide", "unfold_bmm"]).entry("forward").probe()


def test_grouped_products_of_experts(device: str) -> None:
    members, experts, rows = 3, 6, 40
    half = torch.bfloat16
    x = drawn(members, rows, 64, seed=1, device=device).to(half)
    weight = (drawn(members, experts, 64, 32, seed=2, device=device) / 8).to(half)
    index = torch.randint(-experts, experts, (members, rows), generator=torch.Generator().manual_seed(3))
    y = EXPERTS(x, weight, index.to(device)).cpu().double()
    for i in range(members):
        exact = torch.einsum("ri,rio->ro", x[i].cpu().double(), weight[i].cpu().double()[index[i]])
        assert float((y[i] - exact).abs().max()) <= 2 * torch.finfo(half).eps * float(exact.abs().max())


@pytest.mark.parametrize("shape", [(20, 2, 64, 8), (8, 64, 256, 32)], ids=["small", "large"])
def test_predicted_and_measured_times(
    shape: tuple[int, int, int, int], device: str, record_property: Callable[[str, object], None]
) -> None:
    """The times are recorded. A prediction of a strategy must not be off by more than a factor of 20."""
    if device == "cpu":
        shape = (2, 1, 8, 8)
    members = shape[0]
    x, weight, bias = operands(device, *shape)
    packed = x.transpose(0, 1).flatten(1, 2).contiguous()
    flat = weight.flatten(0, 1), bias.flatten()
    calls: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
        "streams": ("widepack.member_convs.default", CONVS, (x, weight, bias, *OPTIONS)),
        "grouped": ("aten.conv2d.default", torch.conv2d, (packed, *flat, *OPTIONS[:3], members)),
    }
    graphs = recorder_for(on_device(device))
    assert graphs is not None
    with torch.inference_mode():
        for name, (op, run, args) in calls.items():
            seconds = min(graphs.seconds(lambda run=run, args=args: run(*args), 20) for _ in range(3))  # type: ignore[misc]
            meta = metas(list(args))
            predicted = call_time(op, meta, {}, run_on_meta(op, meta, {}), CudaModel()).seconds
            record_property(
                f"{name} {shape}", {"measured_us": 1e6 * seconds, "predicted_us": 1e6 * predicted}
            )
            if device != "cpu":
                assert 1 / 20 < seconds / predicted < 20, name
