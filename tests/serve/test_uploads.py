"""Tests swaps whose checkpoint is the body of the request."""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import wire_models
from asgi import InProcess, Request, Response, exchange
from infer import infer
from paths import ROOT

import widepack_serve

ADMIN = "a" * 20
X = torch.arange(12, dtype=torch.float32).reshape(2, 6) / 7
PATH = "/v2/repository/models/plain.fold1/load"


def state(number: int) -> dict[str, torch.Tensor]:
    return wire_models.MODELS["plain"].member(number).state_dict()


def alone(number: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = wire_models.MODELS["plain"].member(number)(X)
    return found


def headers(**more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {ADMIN}", "content-type": "application/octet-stream", **more}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of temporary files, which must be empty after each request."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def server(wide: dict[str, Path], tmp_path: Path, temporary: Path) -> Iterator[InProcess]:
    """Returns a server that takes swaps, without a folder of checkpoints."""
    (tmp_path / "admin").write_text(ADMIN)
    app = widepack_serve.app(wide["plain"], admin_token_file=str(tmp_path / "admin"), receive_timeout=1.0)
    started = InProcess(app).start()
    yield started
    started.close()


def send(server: InProcess, body: Any, path: str = PATH, given: Mapping[str, str] | None = None) -> Response:
    found = server.maybe(Request("POST", path, body, headers() if given is None else given))
    assert found is not None
    return found


def check_unchanged(server: InProcess, temporary: Path) -> None:
    got = infer(server, "plain", {"x": X})["output"]
    for member in range(4):
        torch.testing.assert_close(got[member], alone(member), rtol=1e-4, atol=1e-5)
    assert not list(temporary.iterdir())


def test_the_curl_command_of_the_page(server: InProcess) -> None:
    page = (ROOT / "docs" / "how-to" / "serve-http.md").read_text(encoding="utf-8")
    words = shlex.split(next(line for line in page.splitlines() if "--data-binary" in line))
    given = dict(words[k + 1].split(": ") for k, word in enumerate(words) if word == "-H")
    given = {name.lower(): value.replace("$(cat admin.token)", ADMIN) for name, value in given.items()}
    path = words[1].removeprefix("http://127.0.0.1:8080").replace("/ens.", "/plain.")
    got = send(server, safetensors.torch.save(state(7)), path, given)
    assert got.json == {"message": "plain.fold2 is now the checkpoint of the request"}


def test_a_checkpoint_that_is_sent_becomes_the_member(server: InProcess, temporary: Path) -> None:
    """Whole, in parts, and in float64, which is wider than the artifact."""
    for number, parts, dtype in ((7, 1, torch.float32), (8, 5, torch.float32), (9, 2, torch.float64)):
        body = safetensors.torch.save({n: v.to(dtype) for n, v in state(number).items()})
        size = -(-len(body) // parts)
        got = send(server, [body[k : k + size] for k in range(0, len(body), size)])
        assert got.status == 200, got.body
        assert got.json == {"message": "plain.fold1 is now the checkpoint of the request"}
        answers = infer(server, "plain", {"x": X})["output"]
        torch.testing.assert_close(answers[1], alone(number), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answers[0], alone(0), rtol=1e-4, atol=1e-5)
        assert not list(temporary.iterdir())
    service = server.app.state.service
    assert [c.name for c in service.catalog.find("plain").artifact.model.checkpoints] == [
        f"fold{i}" for i in range(4)
    ]


def forged(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def hostile() -> dict[str, tuple[bytes, int]]:
    """Returns bodies that are refused, each with its status."""
    good = safetensors.torch.save(state(7))
    pickled = Path(tempfile.gettempdir()) / "pickled"
    torch.save(state(7), pickled)
    zipped = pickled.read_bytes()
    pickled.unlink()
    row = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    whole = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    data = good[8 + int.from_bytes(good[:8], "little") :]
    overlapping = {n: dict(r, data_offsets=[0, 64]) for n, r in whole.items() if n != "__metadata__"}
    return {
        "nothing": (b"", 400),
        "a few bytes": (good[:8], 400),
        "a pickle": (b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR.", 400),
        "what torch.save writes": (zipped, 400),
        "JSON": (b'{"parameters": {"checkpoint": "m7.pt"}}', 400),
        "cut in the header": (good[:40], 409),
        "cut in the data": (good[:-5], 409),
        "more bytes at the end": (good + b"more", 409),
        "a header of exabytes": ((1 << 62).to_bytes(8, "little") + b"{" + b" " * 100, 409),
        "no JSON in the header": ((6).to_bytes(8, "little") + b"{nope}", 409),
        "a shape without end": (forged({"x": {**row, "shape": [1 << 40, 1 << 40]}}, b"\0" * 8), 409),
        "offsets backwards": (forged({"x": {**row, "data_offsets": [8, 0]}}, b"\0" * 8), 409),
        "one place for all": (forged(overlapping, data), 409),
        "another model": (safetensors.torch.save({"x": torch.zeros(3)}), 409),
        "another shape": (safetensors.torch.save({**state(7), "head.bias": torch.zeros(4)}), 409),
        "NaN": (safetensors.torch.save({**state(7), "head.bias": torch.full((3,), torch.nan)}), 409),
        "numbers beyond the dtype": (
            safetensors.torch.save({**state(7), "head.bias": torch.full((3,), 1e300, dtype=torch.float64)}),
            409,
        ),
        "too large": (good + bytes(3 << 20), 413),
    }


def test_hostile_bodies_change_nothing(server: InProcess, temporary: Path) -> None:
    for name, (body, status) in hostile().items():
        got = send(server, body)
        assert got.status == status, (name, got.body[:300])
        assert str(temporary) not in got.error and "widepack-swap" not in got.error, name
        check_unchanged(server, temporary)
    too_large = bytes(1 << 20)
    assert send(server, [safetensors.torch.save(state(7)), *[too_large] * 3]).status == 413
    assert send(server, b"", given=headers(**{"content-length": str(1 << 40)})).status == 413
    assert send(server, b"", given=headers(**{"content-length": "-1"})).status == 400
    check_unchanged(server, temporary)


def test_who_may_send_a_checkpoint(server: InProcess, temporary: Path) -> None:
    body = safetensors.torch.save(state(7))
    for given, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 403),
        (headers(), 404),
    ):
        path = PATH if status != 404 else PATH.replace("fold1", "fold9")
        assert send(server, body, path, {**headers(authorization=""), **given}).status == status
    for model in ("plain", "plain.each"):
        got = send(server, body, PATH.replace("plain.fold1", model))
        assert (got.status, "a swap replaces one member" in got.error) == (400, True)
    named = send(
        server, b'{"parameters": {"checkpoint": "m7.pt"}}', given={"authorization": f"Bearer {ADMIN}"}
    )
    assert named.status == 403 and "--swap-from, or send the checkpoint as a safetensors" in named.error
    check_unchanged(server, temporary)


def test_slow_clients_and_several_at_once(server: InProcess, temporary: Path) -> None:
    body = safetensors.torch.save(state(7))
    assert send(server, [body[:100]], given=headers()).status == 409  # an end too early

    async def both() -> tuple[Response | None, Response | None]:
        gate = asyncio.Event()
        first = Request("POST", PATH, [body[:100], body[100:]], headers(), gate=gate)
        waiting = asyncio.ensure_future(exchange(server.app, first))
        await asyncio.sleep(0.1)
        second = await exchange(server.app, Request("POST", PATH, body, headers()))
        gate.set()
        return await waiting, second

    first, second = server.run(both())
    assert first is not None and first.status == 200
    assert second is not None and second.status == 503 and second.headers["retry-after"] == "1"
    assert send(server, safetensors.torch.save(state(1))).status == 200

    async def slow() -> Response | None:
        gate = asyncio.Event()  # never set
        return await exchange(
            server.app, Request("POST", PATH, [body[:100], body[100:]], headers(), gate=gate)
        )

    late = server.run(slow())
    assert late is not None and late.status == 408
    cut = Request("POST", PATH, [body[:100], body[100:]], headers(), cut=True)
    assert server.maybe(cut) is None
    check_unchanged(server, temporary)
