"""Tests the files for NVIDIA Triton in examples/deploy against a real export, and model.py with a stand-in of
Triton's module.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from deploy_files import DEPLOY, configuration
from loaded import save_members
from torch import nn

import widepack

CONFIGS = {
    name: configuration((DEPLOY / "triton" / name / "config.pbtxt").read_text(encoding="utf-8"))
    for name in ("ens_onnx", "ens_route")
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(x)}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    widepack.build(
        save_members(Net, folder), folder / "ens.wide", model=Net, inputs=["x=float32[B,64]"], budget=0
    )
    return folder / "ens.wide"


# ---------------------------------------------------------------- the ONNX export


def test_the_configuration_is_that_of_the_export(artifact: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    widepack.export(artifact, tmp_path / "model.onnx", to="onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    config = CONFIGS["ens_onnx"]
    assert described(graph.input) == tensors(config["input"])
    assert described(graph.output) == tensors(config["output"])
    assert config["backend"] == ["onnxruntime"] and config["max_batch_size"] == [0]


def described(values: Any) -> dict[str, tuple[str, list[int]]]:
    """Returns the type and dims of each value of an ONNX graph, in Triton's words."""
    found = {}
    for value in values:
        type_ = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in type_.shape.dim]
        found[value.name] = ({1: "TYPE_FP32"}[type_.elem_type], dims)
    return found


def tensors(rows: list[dict[str, list[Any]]]) -> dict[str, tuple[str, list[int]]]:
    return {row["name"][0]: (row["data_type"][0], row["dims"]) for row in rows}


def test_the_names_of_the_models_are_those_of_their_folders() -> None:
    assert {name: config["name"] for name, config in CONFIGS.items()} == {n: [n] for n in CONFIGS}
    text = (DEPLOY / "triton" / "ens_onnx" / "config.pbtxt").read_text(encoding="utf-8")
    assert "widepack export ens.wide --to onnx -o ens_onnx/1/model.onnx" in text


# ---------------------------------------------------------------- model.py


class Tensor:
    """Triton's tensor: a name, and memory that others read by DLPack."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def to_dlpack(self) -> Any:
        return torch.utils.dlpack.to_dlpack(self._value)  # type: ignore[attr-defined] # torch's stubs leave it out

    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> Tensor:
        return Tensor(name, torch.utils.dlpack.from_dlpack(capsule).clone())


class TritonError(Exception):
    pass


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.outputs, self.error = output_tensors or [], error


def request(x: torch.Tensor, members: list[int]) -> list[Tensor]:
    return [Tensor("x", x), Tensor("member", torch.tensor(members).reshape(-1, 1))]


@pytest.fixture
def model(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields a started TritonPythonModel."""
    module = ModuleType("triton_python_backend_utils")
    module.__dict__.update(
        Tensor=Tensor,
        TritonError=TritonError,
        InferenceResponse=InferenceResponse,
        get_input_tensor_by_name=lambda given, name: next(t for t in given if t.name() == name),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = DEPLOY / "triton" / "ens_route" / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("triton_model", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    config = CONFIGS["ens_route"]
    assert config["parameters"] == [{"key": ["artifact"], "value": [{"string_value": ["/models/ens.wide"]}]}]
    document = {
        "input": [{"name": row["name"][0]} for row in config["input"]],
        "output": [{"name": row["name"][0]} for row in config["output"]],
        "parameters": {"artifact": {"string_value": str(artifact)}},
    }
    started = found.TritonPythonModel()
    started.initialize({"model_config": json.dumps(document)})
    yield started
    started.finalize()


def test_the_configuration_of_the_python_backend_is_that_of_the_artifact(artifact: Path) -> None:
    config = CONFIGS["ens_route"]
    entry = widepack.load(artifact).manifest.entries["forward"]
    assert [(i.name, i.type) for i in entry.inputs] == [("x", "float32[B,64]")]
    assert [(o.name, o.type) for o in entry.outputs] == [("logits", "float32[B,10]")]
    assert tensors(config["input"]) == {"x": ("TYPE_FP32", [64]), "member": ("TYPE_INT64", [1])}
    assert tensors(config["output"]) == {"logits": ("TYPE_FP32", [10])}
    assert config["max_batch_size"][0] > 1 and config["dynamic_batching"] == [{}]


def test_requests_of_a_batch_are_answered_by_their_members(model: Any, artifact: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    asked = [(torch.randn(len(m), 64, generator=generator), m) for m in ([3], [0, 2, 0], [1, 3])]
    responses = model.execute([request(x, members) for x, members in asked])
    single = [{k: v.double() for k, v in torch.load(artifact.parent / f"m{i}.pt").items()} for i in range(4)]
    assert len(responses) == 3
    for (x, members), response in zip(asked, responses):
        assert response.error is None
        (output,) = response.outputs
        assert output.name() == "logits"
        got = torch.utils.dlpack.from_dlpack(output.to_dlpack())
        exact = torch.stack(
            [row.double() @ single[m]["head.weight"].T + single[m]["head.bias"] for row, m in zip(x, members)]
        )
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_wrong_request_of_a_batch_fails_alone(model: Any) -> None:
    x = torch.randn(1, 64)
    right, wrong, after = model.execute([request(x, [1]), request(x, [4]), request(x, [1])])
    assert right.error is None and after.error is None
    assert "4" in str(wrong.error) and wrong.outputs == []
    first, second = (torch.utils.dlpack.from_dlpack(r.outputs[0].to_dlpack()) for r in (right, after))
    assert torch.equal(first, second)
