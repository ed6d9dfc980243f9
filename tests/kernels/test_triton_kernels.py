"""Tests widepack's Triton kernels without a GPU: their answers under Triton's interpreter, their compilation,
and when a process imports Triton.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chain_cases import Chain, closeness
from paths import ROOT
from recurrent_cases import OWN, Layer

from widepack.kernels.triton_kernels import predictions
from widepack.kernels.triton_kernels.predictions import chain_times, most_rows, step_times, table
from widepack.system.devices import DEVICES, LAUNCH_S

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'widepack[triton]'"
)
HERE = Path(__file__).parent


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def compile_kernels(which: str, cache: Path) -> None:
    """Runs the tests of `compiled_kernels.py` in another process."""
    path = str(HERE / "compiled_kernels.py")
    options = ["-q", "-p", "no:cacheprovider", "-m", which]
    done = process("-m", "pytest", *options, path, TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.extended
@needs_triton
def test_the_kernels_give_the_members_answers_under_the_interpreter() -> None:
    """The tests run in another process, without those of a GPU alone, and of widths that take long."""
    paths = str(HERE / "interpreted_kernels.py"), str(ROOT / "tests" / "gpu" / "test_device_triton.py")
    few = "not tf32 and not graph_contains and not predictions and not 128 and not -96 and not 300-65"
    options = ["-q", "-p", "no:cacheprovider", "-k", few]
    done = process("-m", "pytest", *options, *paths, TRITON_INTERPRET="1", WIDEPACK_TEST_DEVICE="cpu")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.extended
@needs_triton
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Triton compiles for a GPU that is not there. NVIDIA's assembler reports what is not in registers."""
    compile_kernels("not slow", tmp_path)


@needs_triton
@pytest.mark.slow
def test_the_largest_kernels_compile_for_gpus(tmp_path: Path) -> None:
    compile_kernels("slow", tmp_path)


def test_a_process_without_a_gpu_does_not_import_triton() -> None:
    code = (
        "import sys, torch, widepack.ir.ops\n"
        "x, w = torch.ones(2, 3, 4), torch.ones(2, 5, 4)\n"
        "torch.ops.widepack.mlp_chain(x, [w], [None], ['relu'])\n"
        "assert 'triton' not in sys.modules, 'triton is imported'\n"
    )
    done = process("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("biases", ["all", "none", "some"])
def test_a_chain_in_plain_torch_equals_the_members(biases: str, shared: bool, dtype: torch.dtype) -> None:
    chain = Chain(3, 5, (6, 9, 4, 2), ("relu", "gelu_tanh", ""), biases, shared, dtype)
    closeness(chain.run(), chain.members(), chain.members(dtype))


def test_an_unknown_activation_of_a_chain_is_refused() -> None:
    chain = Chain(2, 3, (4, 5, 6), ("relu", "softmax"))
    with pytest.raises(ValueError, match=r"'softmax' of a chain of layers is unknown; known: relu, tanh"):
        chain.run()


@pytest.mark.parametrize("rows", [0, 2])
def test_a_chain_has_the_sizes_of_its_fake(rows: int) -> None:
    chain = Chain(3, rows, (6, 9, 4), ("relu", ""))
    real = chain.run()
    meta = OWN.mlp_chain(
        chain.x.to("meta"),
        [w.to("meta") for w in chain.weights],
        [None if b is None else b.to("meta") for b in chain.biases],
        chain.activations,
    )
    assert (real.shape, real.dtype, real.stride()) == (meta.shape, meta.dtype, meta.stride())


def test_operands_of_a_chain_that_do_not_fit_are_refused() -> None:
    chain = Chain(2, 3, (4, 5, 6), ("relu", ""))
    with pytest.raises(RuntimeError, match=r"weights\[1\] is \[2, 6, 4\]; \[2, 6, 5\] is needed"):
        OWN.mlp_chain(chain.x, [chain.weights[0], chain.weights[1][..., :4]], [None, None], ["", ""])
    with pytest.raises(RuntimeError, match="there are 1 activations; 2 are needed, one for each layer"):
        OWN.mlp_chain(chain.x, chain.weights, chain.biases, ["relu"])
    with pytest.raises(RuntimeError, match=r"biases\[0\] is \[2, 6\]; \[2, 5\] is needed"):
        OWN.mlp_chain(chain.x, chain.weights, chain.biases[::-1], ["", ""])


def test_predictions_grow_with_the_work() -> None:
    one, more = (step_times(3, 8, steps, 8, 128, torch.float32) for steps in (8, 32))
    assert 3 < more.plain / one.plain < 4.5 and 3 < more.kernel / one.kernel < 4.5
    half = step_times(3, 8, 32, 8, 128, torch.bfloat16)
    assert half.kernel < more.kernel and half.plain < more.plain
    few, many = (
        chain_times(100, rows, (64, 128, 64), (True, True), ("relu", ""), False, torch.float32)
        for rows in (32, 4096)
    )
    assert few.kernel < many.kernel and few.plain < many.plain
    assert few.kernel < few.plain and not few.faster, "an op of its own takes longer to start than two layers"
    assert {name for name, _, times in table() if not times.faster} == {
        f"MLP 64-128-64, 2 layers, B=32, {dtype}" for dtype in ("float32", "bfloat16")
    }
    assert most_rows(8, (64, 512, 512, 512), (True,) * 3, ("relu", "relu", ""), False, torch.float32) == 0


def test_equal_times_are_not_decided_by_rounding() -> None:
    """Five layers with an activation each start ten ops in 50 us; the kernel starts in nine tenths of it."""
    for layers, expected in ((5, False), (6, True)):
        given = ((True,) * layers, ("relu",) * layers, False, torch.float32)
        assert chain_times(8, 4, (16,) * (layers + 1), *given).faster == expected


def test_the_limits_of_the_hardware_are_those_of_the_table_of_devices() -> None:
    h100 = DEVICES["h100"]
    assert (h100.bandwidth, h100.multiprocessors) == (predictions.BANDWIDTH, predictions.PROCESSORS)
    assert predictions.HALF_FLOPS == h100.flops["float16"] == h100.flops["bfloat16"]
    assert (h100.tf32, h100.flops["float32"]) == (predictions.TF32_FLOPS, predictions.FLOAT32_FLOPS)
    assert predictions.OP_START == LAUNCH_S


def test_the_pages_show_the_predictions() -> None:
    """The table of bench/README.md has the numbers of `predictions.table()`."""
    page = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    for name, members, times in table():
        row = (
            f"| {name} | {members} | {1e6 * times.plain:.4g} us | {1e6 * times.kernel:.4g} us "
            f"| {1e6 * times.plain_eager:.4g} us | {1e6 * times.kernel_eager:.4g} us |"
        )
        assert row in page, f"bench/README.md lacks the row\n{row}"


def test_a_layer_on_a_cpu_runs_in_plain_torch() -> None:
    layer = Layer("gru")
    layer.same(layer.run(False), layer.members(False))
