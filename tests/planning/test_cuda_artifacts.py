"""Tests artifacts with plans for CUDA: the programs in the file, their answers, and `widepack trace`.

The programs run on the CPU here. `tests/gpu` runs such programs on a device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from loaded import saved
from torch import nn

from widepack.kernels.member_convs import OP
from widepack.runtime.executable import Executable
from widepack_artifacts.program import Program
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights
from widepack_artifacts.wide_program import WideProgram
from widepack_cli.main import cli

N = 4


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(96, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 8, 3)).eval()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    saved(network, folder, "input=float32[B,96,20,20]", members=N, targets=("cuda",))
    return folder / "e.wide"


def on_cuda(reader: Reader, pattern: str) -> list[tuple[WideProgram, Program]]:
    """Returns the programs of a pattern for CUDA, smallest batch first."""
    return [
        (row, reader.program(row.file))
        for row in reader.manifest.entries["forward"].wide
        if (row.device, row.pattern) == ("cuda", pattern)
    ]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("pattern", ["shared", "each"])
def test_programs_for_cuda_answer_as_each_member_in_float64(artifact: Path, pattern: str) -> None:
    reader = Reader(artifact)
    found, stored = on_cuda(reader, pattern), Weights(reader.weights_files())
    assert found[0][0].batch[0] == 1 and found[-1][0].batch[1] is None
    streams = [OP in {n.op for n in program.nodes} for _, program in found]
    assert streams == ([False, True] if pattern == "each" else [False]), "all members read one input"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*([N] if pattern == "each" else []), 3, 96, 20, 20, generator=generator)
    for _, program in found:
        weights = {s.source: stored.get(s.source) for s in program.weights}
        (y,) = Executable(program, weights, torch.device("cpu")).run(x)
        for i in range(N):
            torch.manual_seed(i)
            exact = network().double()((x[i] if pattern == "each" else x).double()).detach()
            assert float((y[i].double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_trace_explains_every_choice(artifact: Path) -> None:
    for batch, strategy in ((1, "grouped"), (512, "streams")):
        words = ["trace", str(artifact), "--device", "cuda", "--pattern", "each", "--batch", str(batch)]
        result = CliRunner().invoke(cli, words, prog_name="widepack")
        assert result.exit_code == 0, result.output
        text = result.stdout
        lines = [line for line in text.splitlines() if line.startswith(("conv2d", "relu"))]
        assert len(lines) == 3 and all(" us on an H100: " in line for line in lines)
        assert f" {strategy} " in lines[0] and "; next " in lines[0]
        assert "predicted for an H100: at B = " in text and "a loop over them" in text
