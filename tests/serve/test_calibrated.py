"""Tests that the server applies a recorded calibration to figures, alone and in shared batches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi import InProcess, Request
from infer import binary_request, infer, read
from safetensors.torch import save_file

import widepack
import widepack_serve
from widepack.errors import UsageError

X = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
SOFTMAX = {"of": "softmax", "calibrated": True}


@pytest.fixture
def path(wide: dict[str, Path], tmp_path: Path) -> Path:
    """Returns a copy of the artifact `plain` with a temperature."""
    path = tmp_path / "plain.wide"
    shutil.copytree(wide["plain"], path)
    y = torch.randint(3, (60,), generator=torch.Generator().manual_seed(0))
    save_file({"x": torch.randn(60, 6), "y": y}, tmp_path / "val.safetensors")
    widepack.evaluate(path, tmp_path / "val.safetensors", target="y", of="softmax", calibrate=True, save=True)
    return path


@pytest.fixture
def server(path: Path, tmp_path: Path) -> Iterator[InProcess]:
    (tmp_path / "admin").write_text("a" * 20)
    app = widepack_serve.app(path, admin_token_file=str(tmp_path / "admin"), swap_from=str(tmp_path))
    started = InProcess(app).start()
    yield started
    started.close()


def outputs(*names: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": parameters} for name in names]


def error(server: InProcess, wanted: list[dict[str, Any]]) -> str:
    found = server.maybe(binary_request("plain", {"x": X}, wanted))
    assert found is not None and found.status == 400
    return found.error


def test_figures_are_those_of_the_model(server: InProcess, path: Path) -> None:
    ens = widepack.load(path)
    expected = ens.reduce(X, "mean", "entropy", of="softmax", calibrated=True)
    assert not torch.allclose(expected["mean"], ens.mean(X, of="softmax"), atol=1e-3)
    wanted = [
        *outputs("output.mean", "output.entropy", **SOFTMAX),
        *outputs("output.std", of="softmax"),
        {"name": "output"},
    ]
    found = read(server.maybe(binary_request("plain", {"x": X}, wanted))).outputs
    torch.testing.assert_close(found["output.mean"], expected["mean"])
    torch.testing.assert_close(found["output.entropy"], expected["entropy"])
    torch.testing.assert_close(found["output.std"], ens.std(X, of="softmax"))
    requests = [
        binary_request("plain", {"x": row}, outputs("output.mean", **SOFTMAX)) for row in torch.split(X, 2)
    ]
    plain = binary_request("plain", {"x": X[:2]}, outputs("output.mean", of="softmax"))
    *calibrated, other = [read(one).outputs["output.mean"] for one in server.together([*requests, plain])]
    torch.testing.assert_close(torch.cat(calibrated), expected["mean"])
    torch.testing.assert_close(other, ens.mean(X[:2], of="softmax"))


def test_what_is_refused(server: InProcess, path: Path, tmp_path: Path) -> None:
    assert "calibrated is 2; it is true or false" in error(server, outputs("output.mean", calibrated=2))
    assert "are of a figure" in error(server, outputs("output", calibrated=True))
    assert "std has no calibrated value" in error(server, outputs("output.std", **SOFTMAX))
    assert "Give of='softmax' (--of softmax)" in error(server, outputs("output.mean", calibrated=True))
    torch.save(widepack.load(path).state_dict(1), tmp_path / "new.pt")
    body, headers = b'{"parameters": {"checkpoint": "new.pt"}}', {"authorization": "Bearer " + "a" * 20}
    answer = server.maybe(Request("POST", "/v2/repository/models/plain.fold0/load", body, headers))
    assert answer is not None and answer.status == 200
    assert answer.json == {"message": "plain.fold0 is now new.pt; the calibration no longer counts"}
    assert "a member was swapped" in error(server, outputs("output.mean", **SOFTMAX))


def test_a_server_that_calibrates_by_default(path: Path, wide: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"outputs": ["output.mean"], "of": "softmax", "calibrated": True}
    started = InProcess(widepack_serve.app(path, **settings)).start()
    ens = widepack.load(path)
    found = infer(started, "plain", {"x": X})["output.mean"]
    torch.testing.assert_close(found, ens.mean(X, of="softmax", calibrated=True))
    wanted = outputs("output.mean", calibrated=False)
    found = read(started.maybe(binary_request("plain", {"x": X}, wanted))).outputs["output.mean"]
    torch.testing.assert_close(found, ens.mean(X, of="softmax"))
    started.close()
    with pytest.raises(UsageError, match="this artifact records no calibration"):
        widepack_serve.app(wide["plain"], **settings)
