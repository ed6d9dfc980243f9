"""Tests every backend over the patterns: each answer is compared with every member alone in float64.

`scripts/measure/backends.py` does the same for a collection of architectures, and writes the table of
docs/results/backends.md. What a backend refuses, it refuses in words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from graph_stand_in import use_stand_in
from torch.profiler import profile

from networks.patterns import CASES
from networks.patterns.check import build_case, compare
from widepack import load
from widepack.inference.model import WideModel

COMPILERS = ["compile", "aot", "onnxruntime"]
FIRST = {
    "compile": ["encoder_layer", "bag_padding_mean", "conv_bn_relu_pool", "mha_float_mask"],
    "aot": ["encoder_layer", "bag_padding_mean"],
    "onnxruntime": ["encoder_layer", "bag_weights", "conv_bn_relu_pool"],
}
"""The patterns that a shorter run has, one for each family."""
REFUSED: dict[tuple[str, str], str] = {
    (name, "onnxruntime"): "cannot write" for name in ("fractional_pool", "fractional_pool_3d")
}
"""What a backend refuses: a part of the reason. ONNX has no such op."""


def marks(backend: str, name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.extended(keep=0) if name in FIRST[backend] else pytest.mark.slow]


def opened(name: str, backend: str, folder: Path, **more: Any) -> WideModel:
    """Builds a pattern, and loads it on a backend that compiles now."""
    if backend == "onnxruntime":
        for package in ("onnxruntime", "onnx", "onnxscript"):
            pytest.importorskip(package, reason="the extra onnx")
    build_case(CASES[name], folder)
    ens: WideModel = load(folder / "e.wide", backend=backend, compile="now", cache=folder / "cache", **more)
    return ens


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which Inductor imports
@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param(n, b, marks=marks(b, n)) for n in CASES for b in COMPILERS]
)
def test_every_backend_gives_the_members_answers(name: str, backend: str, tmp_path: Path) -> None:
    if (name, backend) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[name, backend]):
            opened(name, backend, tmp_path)
        return
    ens = opened(name, backend, tmp_path, verify="off", warmup=False)
    compare(CASES[name], ens)
    assert ens.backend == backend


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_replayed_graph_gives_the_members_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_case(CASES[name], tmp_path)
    use_stand_in(monkeypatch)
    compare(CASES[name], load(tmp_path / "e.wide", graph=True, verify="off", warmup=False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["compile", pytest.param("aot", marks=pytest.mark.slow)])
def test_calls_run_compiled_code(backend: str, tmp_path: Path) -> None:
    """Tensors of a caller were not made in inference mode, as those are that a compiler saw."""
    ens = opened("layer_norm", backend, tmp_path)
    compiled, eager = ens, load(tmp_path / "e.wide")
    for given in (CASES["layer_norm"].draw(sizes, 0) for sizes in CASES["layer_norm"].calls()):
        ran = []
        for ens in (compiled, eager):
            with profile() as record:
                ens(**given)
            ran.append("aten::layer_norm" in {e.key for e in record.key_averages()})
        assert ran == [False, True]
        with torch.inference_mode():
            torch.testing.assert_close(compiled(**given), eager(**given))
