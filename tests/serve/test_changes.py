"""Tests tokens, swaps and reloads."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import wire_models
from asgi import InProcess, Request, Response, exchange
from command_server import command_server
from infer import binary_request, infer, json_request, read
from torch import nn

import widepack
import widepack_serve
from widepack.inference.model import WideModel
from widepack_serve.lifecycle.loading import digest_of, loaded

TOKEN, ADMIN = "t" * 20, "a" * 20
X = torch.arange(12, dtype=torch.float32).reshape(2, 6) / 7


def load(server: InProcess, model: str, checkpoint: Any, token: str | None = ADMIN) -> Response:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    body = orjson.dumps({"parameters": {"checkpoint": checkpoint}})
    found = server.maybe(Request("POST", f"/v2/repository/models/{model}/load", body, headers))
    assert found is not None
    return found


def shards(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint as a folder of two shards and their index, as Hugging Face does."""
    folder.mkdir()
    names = {key: f"pytorch_model-0000{k % 2 + 1}-of-00002.bin" for k, key in enumerate(state)}
    for file in set(names.values()):
        torch.save({key: v for key, v in state.items() if names[key] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with checkpoints, good and bad, and files beside it."""
    folder = tmp_path / "new"
    (folder / "more").mkdir(parents=True)
    (folder / "empty").mkdir()
    shards(folder / "shards", wire_models.MODELS["plain"].member(7).state_dict())
    for i in (7, 8):
        torch.save(wire_models.MODELS["plain"].member(i).state_dict(), folder / f"m{i}.pt")
    shutil.copy(folder / "m8.pt", folder / "more" / "m8.pt")
    shutil.copy(folder / "m8.pt", tmp_path / "outside.pt")
    torch.save(nn.Linear(3, 3).state_dict(), folder / "other.pt")
    (folder / "broken.pt").write_bytes(b"no checkpoint")
    (folder / "link.pt").symlink_to(tmp_path / "outside.pt")
    (folder / "inside.pt").symlink_to(folder / "m8.pt")
    (folder / "circle.pt").symlink_to(folder / "circle.pt")
    (folder / "up").symlink_to(tmp_path)
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "admin").write_text(ADMIN)
    return folder


@pytest.fixture
def server(wide: dict[str, Path], folder: Path, tmp_path: Path) -> Iterator[InProcess]:
    """Returns a server of a copy of the artifact `plain` that takes swaps."""
    shutil.copytree(wide["plain"], tmp_path / "plain.wide")
    app = widepack_serve.app(
        tmp_path / "plain.wide", admin_token_file=str(tmp_path / "admin"), swap_from=str(folder)
    )
    started = InProcess(app).start()
    yield started
    started.close()


def alone(i: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = wire_models.MODELS["plain"].member(i)(X)
    return found


def test_a_swap(server: InProcess) -> None:
    for member, model, checkpoint, number in (
        (1, "plain.fold1", "m7.pt", 7),
        (1, "plain.1", "more/m8.pt", 8),
        (2, "plain.encode.fold2", "./more/../m7.pt", 7),
        (3, "plain.fold3", "inside.pt", 8),
        (3, "plain.fold3", "shards", 7),
    ):
        got = load(server, model, checkpoint)
        assert got.json == {"message": f"{model} is now {checkpoint}"}
        torch.testing.assert_close(
            infer(server, "plain", {"x": X})["output"][member], alone(number), rtol=1e-4, atol=1e-5
        )
    torch.testing.assert_close(infer(server, "plain.0", {"x": X})["output"], alone(0), rtol=1e-4, atol=1e-5)
    metrics = server("GET", "/metrics").body.decode()
    assert 'widepack_swaps_total{result="done"} 5.0' in metrics
    assert "widepack_swap_pause_seconds_count 5.0" in metrics


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize(
    ("model", "checkpoint", "status", "words"),
    [
        ("plain.fold9", "m7.pt", 404, "there is no model 'plain.fold9'"),
        ("plain", "m7.pt", 400, "a swap replaces one member"),
        ("plain.each", "m7.pt", 400, "a swap replaces one member"),
        ("plain.0", "../outside.pt", 400, "is outside of the folder of --swap-from"),
        ("plain.0", "/etc/passwd", 400, "it is a path relative to the folder"),
        ("plain.0", "link.pt", 400, "is outside of the folder"),
        ("plain.0", "up/outside.pt", 400, "is outside of the folder"),
        ("plain.0", "circle.pt", 400, "there is no checkpoint"),
        ("plain.0", "m7.pt/more", 400, "there is no checkpoint"),
        ("plain.0", "empty", 409, "empty"),
        ("plain.0", ".", 400, "there is no checkpoint"),
        ("plain.0", "", 400, "it is a path relative to the folder"),
        ("plain.0", "a\x00b", 400, "it is a path relative to the folder"),
        ("plain.0", "a" * 300, 400, "there is no checkpoint 'aaa"),
        ("plain.0", "a/" * 30_000, 400, "there is no checkpoint"),
        ("plain.0", 7, 400, "or a safetensors file with the header Content-Type: application/octet-stream"),
        ("plain.0", None, 400, "the body is a JSON object"),
        ("plain.0", "other.pt", 409, "name it: model=, or --model of widepack update"),
        ("plain.0", "broken.pt", 409, "broken.pt"),
    ],
)
def test_swaps_that_are_refused(
    model: str, checkpoint: Any, status: int, words: str, server: InProcess
) -> None:
    got = load(server, model, checkpoint)
    assert got.status == status, got.body
    assert words in got.error
    torch.testing.assert_close(infer(server, "plain.0", {"x": X})["output"], alone(0), rtol=1e-4, atol=1e-5)


def test_bodies_of_swaps_that_are_refused(server: InProcess) -> None:
    for body, status in ((b"", 400), (b"[]", 400), (b'{"parameters": []}', 400), (b" " * 70_000, 413)):
        headers = {"authorization": f"Bearer {ADMIN}"}
        got = server.maybe(Request("POST", "/v2/repository/models/plain.0/load", body, headers))
        assert got is not None
        assert got.status == status
        assert "with the header Content-Type: application/octet-stream" in got.error


def test_tokens(wide: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """The token is for all requests but those of health; the admin token is for swaps, and for them alone."""
    app = widepack_serve.app(
        wide["plain"],
        token_file=str(tmp_path / "token"),
        admin_token_file=str(tmp_path / "admin"),
        swap_from=str(folder),
    )
    server = InProcess(app).start()
    request = json_request("plain", {"x": X})
    assert isinstance(request.body, bytes)
    for method, path, body in (
        ("POST", request.path, request.body),
        ("GET", "/v2", b""),
        ("GET", "/metrics", b""),
        ("GET", "/v2/models/none", b""),
        ("GET", "/nothing", b""),
        ("POST", "/v2/repository/models/plain.0/load", b""),
    ):
        none = server(method, path, body)
        assert (none.status, none.headers["www-authenticate"]) == (401, "Bearer")
        admin = "this action needs the admin token (--admin-token-file)" if path.endswith("/load") else ""
        assert (
            none.error
            == f"{admin or 'this server needs a token'}: send the header Authorization: Bearer TOKEN"
        )
        for header in ("Basic " + TOKEN, TOKEN, "Bearer", ""):
            assert server(method, path, body, authorization=header).status in (401, 403)
        wrong = server(method, path, body, authorization="Bearer wrong\xff")
        assert (wrong.status, wrong.error) == (403, f"the token is wrong{admin and ': ' + admin}")
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert server("GET", path).status == 200
    for scheme in ("Bearer", "bearer"):
        assert server("POST", request.path, request.body, authorization=f"{scheme} {TOKEN}").status == 200
    assert load(server, "plain.0", "m7.pt", TOKEN).status == 403
    assert load(server, "plain.0", "m7.pt", ADMIN).status == 200
    server.close()


def test_token_files_that_are_refused(wide: dict[str, Path], tmp_path: Path) -> None:
    for text in ("short", "ü" * 20, "a" * 20 + "\n" + "b" * 20):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(widepack.UsageError, match="at least 16 printable ASCII characters"):
            widepack_serve.app(wide["plain"], token_file=str(tmp_path / "bad"))


# ---------------------------------------------------------------- reloads


def test_reloads_while_requests_go_on(server: InProcess, tmp_path: Path, folder: Path) -> None:
    path, service = tmp_path / "plain.wide", server.app.state.service
    before = server("GET", "/v2/models/plain").json["versions"][0]
    widepack.update(path, {1: folder / "m7.pt"})

    async def scene() -> list[Response | None]:
        ended, found = asyncio.Event(), []

        async def client(i: int) -> None:
            while not ended.is_set():
                found.append(await exchange(server.app, binary_request(f"plain.{i}", {"x": X})))
                await asyncio.sleep(0.001)

        clients = [asyncio.ensure_future(client(i)) for i in (1, 1, 2)]
        await service.reload()
        await asyncio.sleep(0.4)  # the old one is closed
        ended.set()
        await asyncio.gather(*clients)
        return found

    versions = set()
    for response in server.run(scene()):
        answer = read(response)
        version, model = answer.document["model_version"], answer.document["model_name"]
        versions.add(version)
        number = 2 if model == "plain.2" else 1 if version == before else 7
        torch.testing.assert_close(answer.outputs["output"], alone(number), rtol=1e-4, atol=1e-5)
    assert len(versions) == 2
    assert server("GET", f"/v2/models/plain/versions/{before}").status == 404
    metrics = server("GET", "/metrics").body.decode()
    assert 'widepack_reloads_total{result="done"} 1.0' in metrics
    assert (
        sum(line.startswith("widepack_info") and line.endswith(" 1.0") for line in metrics.splitlines()) == 1
    )


def test_a_body_that_arrives_during_a_reload_is_answered(
    server: InProcess, tmp_path: Path, folder: Path
) -> None:
    """The model is that of the time at which the body is complete: the old one may be closed by then."""
    widepack.update(tmp_path / "plain.wide", {1: folder / "m7.pt"})

    async def scene() -> Response | None:
        whole = binary_request("plain.1", {"x": X})
        assert isinstance(whole.body, bytes)
        gate = asyncio.Event()
        slow = Request("POST", whole.path, [whole.body[:20], whole.body[20:]], whole.headers, gate=gate)
        task = asyncio.ensure_future(exchange(server.app, slow))
        await asyncio.sleep(0.1)  # the first part has arrived
        await server.app.state.service.reload()
        gate.set()
        return await task

    got = read(server.run(scene())).outputs["output"]
    torch.testing.assert_close(got, alone(7), rtol=1e-4, atol=1e-5)


def test_the_end_abandons_a_reload(
    wide: dict[str, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.wide"
    shutil.copytree(wide["plain"], path)
    server = InProcess(widepack_serve.app({"plain": path}, reload=0.1)).start()
    service, catalog = server.app.state.service, server.app.state.service.catalog
    began, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> WideModel:
        began.set()
        assert go_on.wait(30)
        return loaded(*args)

    monkeypatch.setattr("widepack_serve.lifecycle.service.loaded", slow)
    widepack.update(path, {0: folder / "m8.pt"})

    async def until_it_loads() -> Response | None:
        while not began.is_set():
            await asyncio.sleep(0.02)
        return await exchange(server.app, binary_request("plain.0", {"x": X}))

    torch.testing.assert_close(
        read(server.run(until_it_loads())).outputs["output"], alone(0), rtol=1e-4, atol=1e-5
    )
    server.close()
    assert service.loading and not go_on.is_set()
    go_on.set()
    limit = time.monotonic() + 30
    while service.loading and time.monotonic() < limit:
        time.sleep(0.02)
    assert not service.loading
    assert service.catalog is catalog  # its result is dropped
    assert b"widepack_reloads_total{" not in service.metrics_text()


SLOW_RELOAD = """
import sys, time
from widepack_cli.__main__ import main
from widepack_serve.lifecycle import service

loaded, calls = service.loaded, []
def slow(*args):
    calls.append(args)
    if len(calls) > 1:
        print("loading", file=sys.stderr, flush=True)
        while True:
            pass
    return loaded(*args)

service.loaded = slow
main()
"""


@pytest.mark.extended
def test_a_process_ends_during_a_reload(wide: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.wide"
    shutil.copytree(wide["plain"], path)
    with command_server(path, "--drain", "0", program=("-c", SLOW_RELOAD)) as server:
        assert server.process.stderr is not None
        widepack.update(path, {0: folder / "m8.pt"})
        server.process.send_signal(signal.SIGHUP)
        assert server.process.stderr.readline() == "loading\n"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert server.process.stderr.read() == ""


def test_a_reload_of_something_bad_changes_nothing(server: InProcess, tmp_path: Path) -> None:
    path, service = tmp_path / "plain.wide", server.app.state.service
    (path / "manifest.json").rename(path / "gone.json")
    server.run(service.reload())
    (path / "manifest.json").write_bytes(b"{}")
    server.run(service.reload())
    os.remove(path / "manifest.json")
    torch.testing.assert_close(infer(server, "plain.1", {"x": X})["output"], alone(1), rtol=1e-4, atol=1e-5)
    assert 'widepack_reloads_total{result="failed"} 2.0' in server("GET", "/metrics").body.decode()


def test_the_path_is_looked_at_now_and_then(
    wide: dict[str, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that raises anything does not end the looks."""
    path = tmp_path / "own.wide"
    shutil.copytree(wide["plain"], path)
    server = InProcess(widepack_serve.app({"plain": path}, reload=0.1)).start()
    failures = [RuntimeError("no memory"), KeyError("x")]
    real = digest_of

    def digest(p: str) -> str:
        if failures:
            raise failures.pop()
        return real(p)

    monkeypatch.setattr("widepack_serve.lifecycle.service.digest_of", digest)
    widepack.update(path, {0: folder / "m8.pt"})

    async def until_new() -> None:
        for _ in range(200):
            await asyncio.sleep(0.05)
            answer = await exchange(server.app, binary_request("plain.0", {"x": X}))
            if torch.allclose(read(answer).outputs["output"], alone(8), rtol=1e-4, atol=1e-5):
                return
        raise AssertionError("the artifact was not loaded again")

    server.run(until_new())
    assert 'widepack_reloads_total{result="failed"} 2.0' in server("GET", "/metrics").body.decode()
    server.close()
