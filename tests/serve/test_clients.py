"""Tests a server with clients that others wrote: tritonclient and kserve's, through REST and gRPC.

They need versions of packages that the environment of the tests cannot have. `make clients` makes an
environment for tritonclient, and `make clients-kserve` one for kserve. Without them these tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_server import ServeProcess, command_server
from paths import ROOT
from support import Artifacts, Bound, double, must, run

import widepack
from cases import load
from widepack_serve.rpc.messages import CLASSES

CASE = load("mlp")
MEMBERS = [3, 0, 3, 7]
"""The member of each row, as in `clients/triton_calls.py`."""
X = CASE.sample(len(MEMBERS), 5)[0][0]
CLIENTS = Path(__file__).parent / "clients"


@dataclass
class Results:
    """What a client got. values: of JSON, by the name of the call. arrays: by the name of the call."""

    values: dict[str, Any]
    arrays: dict[str, torch.Tensor]

    def error(self, name: str) -> str:
        return str(self.values[name]["error"])

    def value(self, name: str) -> Any:
        assert "error" not in self.values[name], self.values[name]
        return self.values[name]["value"]


def python_of(environment: str, target: str) -> Path:
    """Returns the Python of the environment of a client. Skips the test without it."""
    found = ROOT / environment / "bin" / "python"
    if not (ROOT / environment / ".ready").exists():
        pytest.skip(f"there is no environment {environment} of the client: `make {target}` makes it")
    return found


def results_of(python: Path, script: str, folder: Path, *words: str) -> Results:
    """Runs a script of the client, and returns what it recorded."""
    np.savez(folder / "inputs.npz", x=X.numpy())
    done = subprocess.run(
        [python, CLIENTS / script, *words, folder / "inputs.npz", folder / "results"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    must(done)
    values = json.loads((folder / "results.json").read_text())
    with np.load(folder / "results.npz") as arrays:
        return Results(values, {name: torch.from_numpy(arrays[name]) for name in arrays.files})


@pytest.fixture(scope="module")
def server(artifacts: Artifacts) -> Iterator[ServeProcess]:
    with command_server(f"ens={artifacts('mlp')}", "--grpc-port", "0", "--drain", "0") as found:
        yield found


@pytest.fixture(scope="module", params=["http", "grpc"])
def triton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Results]:
    """Returns what tritonclient got through each interface."""
    python = python_of(".venv-clients", "clients")
    server: ServeProcess = request.getfixturevalue("server")
    kind: str = request.param
    address = server.http if kind == "http" else server.grpc
    return kind, results_of(python, "triton_calls.py", tmp_path_factory.mktemp(kind), kind, address)


def alone(number: int, x: torch.Tensor = X) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the answer of one member alone, and the same in float64."""
    member = CASE.member(number)
    return run(member, (x,), {}), run(member.double(), double((x,)), {})


def check_all(answer: torch.Tensor) -> None:
    """Checks the answers of all members to X."""
    assert answer.shape == (CASE.N, len(MEMBERS), 10)
    bound = Bound()
    for number in range(CASE.N):
        bound.add(answer[number], *alone(number))
    bound.check()


def check_rows(answer: torch.Tensor) -> None:
    """Checks that each row was answered by its member."""
    assert answer.shape == (len(MEMBERS), 10)
    for row, number in enumerate(MEMBERS):
        truth = alone(number, X[row : row + 1])[1][0]
        torch.testing.assert_close(answer[row].double(), truth, atol=1e-4, rtol=1e-4)


def test_health_and_metadata(triton: tuple[str, Results]) -> None:
    kind, found = triton
    assert [found.value(n) for n in ("live", "ready", "model ready", "member ready")] == [True] * 4
    server = found.value("server")
    assert (server["name"], server["version"]) == ("widepack", widepack.__version__)
    assert {"binary_tensor_data", "statistics"} <= set(server["extensions"])
    model = found.value("model")
    assert (model["name"], model["platform"]) == ("ens", "widepack_wide")
    assert found.value("version") == model
    shapes = {t["name"]: [int(s) for s in t["shape"]] for t in (*model["inputs"], *model["outputs"])}
    assert shapes == {"input": [-1, 64], "output": [CASE.N, -1, 10]}
    config = found.value("config")
    config = config["config"] if kind == "grpc" else config
    sizes = {t["name"]: [int(s) for s in t["dims"]] for t in (*config["input"], *config["output"])}
    assert (config["name"], config["input"][0]["data_type"], sizes) == ("ens", "TYPE_FP32", shapes)
    index = found.value("index")
    rows = index["models"] if kind == "grpc" else index
    assert {"ens", "ens.each", "ens.mlp-0", "ens.7"} <= {row["name"] for row in rows}
    assert {row["state"] for row in rows} == {"READY"}


def test_answers_are_those_of_the_members(triton: tuple[str, Results]) -> None:
    kind, found = triton
    forms = ["binary", "of the version", "of version 1"]
    if kind == "http":
        forms += ["json", "json in", "json out", "async"]
        forms += [f"{name} {form}" for name in ("gzip", "deflate") for form in ("request", "answer", "json")]
    else:
        forms += ["gzip", "deflate", "deadline", "asynchronous", "contents"]
    for name in forms:
        assert name in found.arrays, (name, found.values.get(name))
        check_all(found.arrays[name])
    rows = ["members by name", "members by number", *(["json members"] if kind == "http" else [])]
    for name in rows:
        assert name in found.arrays, (name, found.values.get(name))
        check_rows(found.arrays[name])
    assert found.arrays["no rows"].shape == (
        len(found.arrays["binary"]),
        0,
        *found.arrays["binary"].shape[2:],
    )
    torch.testing.assert_close(found.arrays["one member"].double(), alone(5)[1], atol=1e-4, rtol=1e-4)


def test_requested_figures(triton: tuple[str, Results]) -> None:
    _, found = triton
    truth = torch.stack([alone(n)[1] for n in range(CASE.N)])
    torch.testing.assert_close(found.arrays["mean"].double(), truth.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.arrays["std"].double(), truth.std(0, correction=0), atol=1e-4, rtol=1e-4)


def test_ids_and_statistics(triton: tuple[str, Results]) -> None:
    _, found = triton
    assert found.value("id") == ["request 42", "ens"]
    (row,) = found.value("statistics")["model_stats"]
    assert (row["name"], row["version"]) == ("ens.mlp-5", found.value("model")["versions"][0])
    assert int(row["inference_count"]) >= len(MEMBERS)
    assert int(row["inference_stats"]["success"]["count"]) >= 1


def test_errors_reach_the_client_as_sentences(triton: tuple[str, Results]) -> None:
    kind, found = triton
    codes = ("400", "404") if kind == "http" else ("StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
    invalid, unknown = (f"[{code}]" for code in codes)
    begins = {
        "unknown version": f"{unknown} model ens has no version '7'; its version is",
        "unknown model": f"{unknown} there is no model 'enz'; did you mean ens?",
        "unknown name": f"{unknown} there is no model 'enz'; did you mean ens?",
        "unknown output": f"{invalid} there is no output 'zz'; the outputs are output",
        "unknown input": f"{invalid} model ens has no input x",
        "unknown member": f"{invalid} no member is called 'mlp-79'",
        "half": f"{invalid} input input is FP16; the model takes FP32",
        "priority": f"{invalid} the request: all requests have one priority; leave out",
    }
    assert {n: found.error(n) for n, text in begins.items() if not found.error(n).startswith(text)} == {}
    if kind == "http":
        assert found.value("unknown ready") is False  # the client takes any other status for "not ready"
    else:
        assert found.error("unknown ready").startswith(f"{unknown} there is no model 'zz'")


def test_a_model_in_half_precision(artifacts: Artifacts, tmp_path: Path) -> None:
    python = python_of(".venv-clients", "clients")
    with command_server(f"ens={artifacts('mlp')}", "--grpc-port", "0", "--dtype", "fp16") as server:
        for kind, address in (("http", server.http), ("grpc", server.grpc)):
            found = results_of(python, "triton_calls.py", tmp_path, f"{kind}-half", address)
            answer = found.arrays["half"]
            assert answer.dtype == torch.float16
            truth = torch.stack([alone(n, X.half().float())[1] for n in range(CASE.N)])
            torch.testing.assert_close(answer.double(), truth, atol=1e-2, rtol=1e-2)
            assert "input input is FP32; the model takes FP16" in found.error("single")


def test_the_messages_are_those_of_the_published_protocol(triton: tuple[str, Results]) -> None:
    kind, found = triton
    if kind == "http":
        pytest.skip("REST has no messages")
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

    published = found.value("messages")
    seen = 0
    for name, kind_of_message in CLASSES.items():
        ours = DescriptorProto()
        kind_of_message.DESCRIPTOR.CopyToProto(ours)
        theirs = {tuple(field) for field in published[name]}
        for field in ours.field:
            repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
            assert (field.number, field.name, field.type, repeated, field.type_name) in theirs, name
            seen += 1
    assert seen > 60


@pytest.mark.slow
def test_the_clients_of_kserve(server: ServeProcess, tmp_path: Path) -> None:
    python = python_of(".venv-clients-kserve", "clients-kserve")
    found = results_of(python, "kserve_calls.py", tmp_path, server.http, server.grpc)
    for name in ("live", "ready", "model"):
        assert found.value(f"http {name}") is True and found.value(f"grpc {name}") is True
    for name in ("http binary", "http json", "grpc raw", "grpc contents"):
        assert name in found.arrays, (name, found.values.get(name))
        check_all(found.arrays[name])
    for name in ("http members binary", "http members json", "grpc members raw", "grpc members contents"):
        assert name in found.arrays, (name, found.values.get(name))
        check_rows(found.arrays[name])
    assert found.value("grpc id") == "request 7"
    assert "there is no model 'enz'" in found.error("grpc unknown")
    assert "404" in found.error("http unknown")
