"""Tests the ONNX file of a fleet: the base once, and the factors of each member."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import widepack
from fleet.small_fleets import SIZE, build_of, write_fleet

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def test_one_file_has_the_base_and_the_factors(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path)
    build_of(fleet.adapters, tmp_path / "f.wide", base=fleet.base)
    out = tmp_path / "f.onnx"
    widepack.export(tmp_path / "f.wide", out, to="onnx")
    sizes = {i.name: list(i.dims) for i in onnx.load(str(out)).graph.initializer}
    assert sizes["first.weight@base"] == [SIZE, SIZE]
    assert sizes["first.weight@left"] == [3, SIZE, 4] and sizes["second.weight@right"] == [3, 4, SIZE]
    assert [3, SIZE, SIZE] not in sizes.values()
    session = onnxruntime.InferenceSession(str(out))
    x = torch.randn(5, SIZE)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found), widepack.load(tmp_path / "f.wide")(x), rtol=1e-5, atol=1e-5
    )
