"""Tests that the graph which compilers get keeps all its values on the device of its weights and inputs.

The device `meta` stands in for a GPU: an op refuses operands of two devices in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support import Artifacts, leaves
from torch._dispatch.python import enable_python_dispatcher

import cases
from networks.patterns import CASES
from networks.patterns.check import build_case
from widepack import load
from widepack.backends import torch_compile
from widepack.backends.flat import Flat
from widepack.backends.task import Task, Unavailable
from widepack.backends.tracing import fake_values, traced

META = torch.device("meta")
PATTERNS = ["encoder_layer", "bag_padding_mean", "mha_float_mask", "conv_bn_relu_pool", "layer_norm"]


def prepared(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Task, Flat]:
    """Returns the task and the flat graph that the backend `compile` would compile, on the device `meta`."""
    found: list[tuple[Task, Flat]] = []

    def record(task: Task, flat: Flat, compile_: Any) -> NoReturn:
        found.append((task, flat))
        raise Unavailable("the test needs the graph alone")

    monkeypatch.setattr(torch_compile, "covering", record)
    ens = load(path, backend="compile", compile="now", verify="off", warmup=False)
    with pytest.raises(Unavailable) as refusal:
        str(ens.backend)  # it binds a program
    if not found:
        raise refusal.value
    task, flat = found[0]
    return task, replace(flat, weights=[w.to(META) for w in flat.weights])


def check(task: Task, flat: Flat) -> None:
    assert all(
        value.device.type == "cpu"
        for value in fake_values(flat, task.example)[1].values()
        if isinstance(value, torch.Tensor)
    )
    made = traced(flat, task.example, task.dims, META)
    fake = made.inputs[0].fake_mode  # type: ignore[attr-defined]  # of a fake tensor
    with torch.no_grad(), fake, enable_python_dispatcher():
        answers = leaves(made.module(*made.inputs))
    assert answers
    assert {answer.device.type for answer in answers} == {"meta"}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", cases.NAMES)
def test_networks(name: str, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*prepared(artifacts(name), monkeypatch))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "name", [n if n in PATTERNS else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_patterns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_case(CASES[name], tmp_path)
    try:
        task, flat = prepared(tmp_path / "e.wide", monkeypatch)
    except Unavailable as refusal:  # of ops whose operands only the eager backend checks
        assert name not in PATTERNS
        assert "eager" in str(refusal)
        return
    check(task, flat)
