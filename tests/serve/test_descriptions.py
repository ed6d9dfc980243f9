"""Tests what the server says of itself: metadata, readiness, the index, statistics and metrics."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi import InProcess
from infer import NAMES, binary_request, infer, read

import widepack
import widepack_serve
from widepack.version import __version__
from widepack_serve.server.check import check, curl, example_tensors

METRICS = {
    "widepack_requests_total",
    "widepack_request_seconds",
    "widepack_queue_seconds",
    "widepack_compute_seconds",
    "widepack_batch_rows",
    "widepack_batch_members",
    "widepack_queue_rows",
    "widepack_rejected_total",
    "widepack_swaps_total",
    "widepack_swap_pause_seconds",
    "widepack_reloads_total",
    "widepack_info",
    "widepack_ready",
    "widepack_member_rows_total",
}


def fits(described: list[dict[str, Any]], names: list[str], tensors: list[torch.Tensor]) -> None:
    """Checks tensors against a part of the metadata of a model."""
    assert [d["name"] for d in described] == names
    for row, value in zip(described, tensors):
        assert row["datatype"] == NAMES[value.dtype], row
        assert len(row["shape"]) == value.dim(), row
        assert all(a in (-1, b) for a, b in zip(row["shape"], value.shape)), (row, value.shape)


def models(server: InProcess) -> list[str]:
    return [row["name"] for row in server("POST", "/v2/repository/index").json]


def test_the_metadata_of_every_model_is_what_it_answers(server: InProcess) -> None:
    """Every model takes what its metadata says, and answers exactly the outputs of its metadata."""
    catalog = server.app.state.service.catalog
    names = models(server)
    assert len(names) > 60
    for name in names:
        described = server("GET", f"/v2/models/{name}").json
        assert set(described) == {"name", "versions", "platform", "inputs", "outputs"}
        assert (described["name"], described["platform"]) == (name, "widepack_wide")
        model = catalog.find(name)
        tensors = example_tensors(model)
        inputs = dict(zip([i.name for i in model.layout.inputs], tensors))
        fits(described["inputs"], list(inputs), tensors)
        answer = read(server.maybe(binary_request(name, inputs)))
        fits(described["outputs"], list(answer.outputs), list(answer.outputs.values()))
        assert answer.document["model_version"] == described["versions"][0]
        config = server("GET", f"/v2/models/{name}/config").json
        assert (config["name"], config["backend"], config["max_batch_size"]) == (name, "widepack", 0)
        for part in ("input", "output"):
            rows = [(r["name"], r["datatype"], r["shape"]) for r in described[f"{part}s"]]
            assert [
                (r["name"], r["data_type"].removeprefix("TYPE_"), r["dims"]) for r in config[part]
            ] == rows


def test_version_1_is_the_current_one(server: InProcess) -> None:
    path = "/v2/models/plain/versions/1"
    assert server("GET", path).json == server("GET", "/v2/models/plain").json
    assert server("GET", f"{path}/config").json == server("GET", "/v2/models/plain/config").json
    assert server("GET", f"{path}/ready").json == {"name": "plain", "ready": True}
    request = binary_request("plain/versions/1", {"x": torch.randn(2, 6)})
    assert read(server.maybe(request)).outputs["output"].shape == (4, 2, 3)


@pytest.fixture(scope="module")
def figures(wide: dict[str, Path]) -> Iterator[InProcess]:
    names = ["output.mean", "output.std", "output.vote", "output.entropy", "output.quantile(0.9)", "output"]
    app = widepack_serve.app(
        {"plain": wide["plain"], "score": wide["score"]}, outputs=names[:1], of="sigmoid", members=False
    )
    more = widepack_serve.app({"plain": wide["plain"]}, outputs=names, of="softmax")
    few, many = InProcess(app).start(), InProcess(more).start()
    many.few = few  # type: ignore[attr-defined]
    yield many
    few.close()
    many.close()


def test_the_metadata_of_default_figures_is_what_is_answered(figures: InProcess) -> None:
    for server, names in ((figures, ["plain", "plain.fold1", "plain.encode", "plain.each"]),):
        for name in names:
            described = server("GET", f"/v2/models/{name}").json["outputs"]
            x = torch.randn(4, 3, 6) if name == "plain.each" else torch.randn(3, 6)
            got = infer(server, name, {"x": x})
            fits(described, list(got), list(got.values()))
    got = infer(figures, "plain", {"x": torch.randn(3, 6)})
    assert [tuple(v.shape) for v in got.values()] == [(3, 3), (3, 3), (3,), (3,), (3, 3), (4, 3, 3)]
    p = got["output"].softmax(-1)
    torch.testing.assert_close(got["output.mean"], p.mean(0))
    routed = infer(figures, "plain", {"x": torch.randn(3, 6), "member": ["fold1"] * 3})
    assert list(routed) == ["output"]


def test_without_members_there_are_no_models_of_members(figures: InProcess) -> None:
    few: InProcess = figures.few  # type: ignore[attr-defined]
    assert models(few) == ["plain", "score", "plain.encode", "plain.each", "plain.encode.each", "score.each"]
    assert few("GET", "/v2/models/plain.fold1").status == 404
    got = infer(few, "score", {"x": torch.randn(5, 6)})
    assert got["output.mean"].shape == (5,) and bool(
        ((got["output.mean"] > 0) & (got["output.mean"] < 1)).all()
    )


def test_the_server_describes_itself(server: InProcess) -> None:
    found = server("GET", "/v2").json
    assert found == {
        "name": "widepack",
        "version": __version__,
        "extensions": ["binary_tensor_data", "model_configuration", "model_repository", "statistics"],
    }
    assert server("GET", "/v2/").json == found
    assert server("GET", "/v2/health/live").json == {"live": True}
    assert server("GET", "/v2/health/ready").json == {"ready": True}
    assert server("HEAD", "/v2/health/ready").status == 200
    assert server("GET", "/v2/models/plain.fold1/ready").json == {"name": "plain.fold1", "ready": True}
    index = server("POST", "/v2/repository/index", b"{}").json
    assert all(
        set(row) == {"name", "version", "state", "reason"} and row["state"] == "READY" for row in index
    )
    names = [row["name"] for row in index]
    assert len(set(names)) == len(names)
    for name in ("plain", "plain.each", "plain.encode", "plain.encode.each", "plain.3", "plain.encode.fold3"):
        assert name in names


@pytest.fixture
def fresh(wide: dict[str, Path]) -> Iterator[InProcess]:
    """Returns a server that has answered nothing."""
    started = InProcess(widepack_serve.app({"plain": wide["plain"], "text": wide["text"]})).start()
    yield started
    started.close()


def test_statistics(fresh: InProcess) -> None:
    server = fresh
    assert server("GET", "/v2/models/stats").json == {"model_stats": []}
    x = torch.randn(3, 6)
    for _ in range(4):
        infer(server, "plain.fold1", {"x": x})
    server.together([binary_request("plain.fold1", {"x": x})] * 5)
    assert server("POST", "/v2/models/plain.fold1/infer", b"{}").status == 400
    (row,) = server("GET", "/v2/models/plain.fold1/stats").json["model_stats"]
    assert (row["name"], row["inference_count"]) == ("plain.fold1", 27)
    stats = row["inference_stats"]
    assert stats["success"]["count"] == 9 and stats["success"]["ns"] > 0
    assert row["last_inference"] > 1e12
    (same,) = server("GET", "/v2/models/stats").json["model_stats"]
    assert same == row
    (unused,) = server("GET", "/v2/models/plain/stats").json["model_stats"]
    assert unused["inference_count"] == unused["execution_count"] == 0


def values(text: str) -> dict[str, float]:
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_metrics(fresh: InProcess) -> None:
    server = fresh
    for i in range(3):
        infer(server, f"plain.fold{i}", {"x": torch.randn(2, 6)})
    infer(server, "plain", {"x": torch.randn(5, 6)})
    infer(server, "plain.each", {"x": torch.randn(4, 5, 6)})
    infer(server, "plain.encode", {"x": torch.randn(1, 6)})
    assert server("POST", "/v2/models/plain/infer", b"{}").status == 400
    bad = {"x": torch.randn(2, 7)}
    for _ in range(2):
        assert server.maybe(binary_request("plain", bad)).status == 400  # type: ignore[union-attr]
    got = server("GET", "/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = got.body.decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families >= METRICS, METRICS - families
    found = values(text)
    assert found['widepack_requests_total{code="200",entry="forward",model="plain"}'] == 5
    assert found['widepack_requests_total{code="200",entry="encode",model="plain"}'] == 1
    assert found['widepack_requests_total{code="400",entry="forward",model="plain"}'] == 3
    assert found['widepack_compute_seconds_count{form="rows",model="plain"}'] == 3
    assert found['widepack_compute_seconds_count{form="all",model="plain"}'] == 2
    assert found['widepack_compute_seconds_count{form="each",model="plain"}'] == 1
    assert found['widepack_batch_rows_sum{model="plain"}'] == 17
    assert found['widepack_batch_members_sum{model="plain"}'] == 3 + 12
    assert found['widepack_member_rows_total{member="fold2",model="plain"}'] == 2
    assert found['widepack_request_seconds_count{model="plain"}'] == 9
    assert found["widepack_ready"] == 1 and found["widepack_queue_rows"] == 0
    info = next(name for name in found if name.startswith("widepack_info") and 'model="plain"' in name)
    for label in ("version", "torch", "digest", "backend", "device"):
        assert f'{label}="' in info


def test_members_are_no_labels_where_the_server_says_so(wide: dict[str, Path]) -> None:
    server = InProcess(widepack_serve.app({"plain": wide["plain"]}, metrics_by_member=False)).start()
    infer(server, "plain.fold1", {"x": torch.randn(2, 6)})
    assert 'member="fold1"' not in server("GET", "/metrics").body.decode()
    server.close()


def test_the_check_of_the_command_line_runs_every_model(wide: dict[str, Path]) -> None:
    app = widepack_serve.app(wide)
    lines = list(check(app.state.service))
    assert lines[0] == "plain: x FP32[?,6] -> output FP32[4,?,3]"
    assert lines[-1].startswith("and ")


def test_artifacts_that_cannot_be_served(wide: dict[str, Path], tmp_path: Path) -> None:
    for options, words in (
        ({"outputs": ["z.mean"]}, "there is no output 'z.mean'"),
        ({"outputs": ["output.entropy"]}, "needs probabilities"),
        ({"outputs": ["output", "output"]}, "output is named twice"),
        ({"token_file": tmp_path / "none"}, "cannot be read"),
    ):
        with pytest.raises(widepack.UsageError, match=words):
            widepack_serve.app(wide["plain"], **options)
    with pytest.raises(widepack.WidepackError):
        widepack_serve.app(tmp_path / "none.wide")


@pytest.mark.parametrize("name", ["plain.encode", "plain.each", "plain.0"])
def test_two_artifacts_whose_names_meet(name: str, wide: dict[str, Path]) -> None:
    for order in (("plain", name), (name, "plain")):
        with pytest.raises(widepack.UsageError, match=f"both have a model {name}; give one another name"):
            widepack_serve.app({each: wide["score" if each == name else "plain"] for each in order})


def test_the_request_for_a_name_with_a_space(wide: dict[str, Path]) -> None:
    catalog = widepack_serve.app({"it's b": wide["plain"]}).state.service.catalog
    words = shlex.split(curl("http://host", catalog.find("it's b")))
    assert words[1] == "http://host/v2/models/it%27s%20b/infer" and json.loads(words[3])["inputs"]
