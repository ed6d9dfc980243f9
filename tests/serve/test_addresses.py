"""Tests Unix sockets, processes by the cores, pages of other origins, and byte order marks."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from asgi import InProcess, Request
from click.testing import CliRunner
from command_server import command
from infer import described, document, json_request, read, to_bytes

import widepack
from widepack_cli.commands import serve as command_module
from widepack_cli.main import cli
from widepack_serve.errors import AddressInUse
from widepack_serve.server.run import listening_at
from widepack_serve.settings import Settings

X = torch.arange(12, dtype=torch.float32).reshape(2, 6) / 7
BOM = b"\xef\xbb\xbf"
ORIGIN = "https://app.example.org"
Started = Callable[..., InProcess]


# ---------------------------------------------------------------- Unix sockets


class UnixConnection(http.client.HTTPConnection):
    """A connection of HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


def ask(path: Path, method: str, target: str, body: bytes | None = None) -> Any:
    connection = UnixConnection(path)
    with contextlib.closing(connection):
        connection.request(method, target, body)
        answer = connection.getresponse()
        assert answer.status == 200
        return orjson.loads(answer.read())


@contextlib.contextmanager
def unix_server(*words: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        command(*words, "--drain", "0"),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    killer = threading.Timer(90, process.kill)
    killer.start()
    try:
        line = next((ln for ln in process.stderr if ln.startswith("serving")), "")
        assert line, "the server did not start"
        yield process, line
    finally:
        killer.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stderr.close()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_unix_socket(workers: int, wide: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "ens.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # left behind by a process that was killed
    more = ["--workers", str(workers)] if workers > 1 else []
    with unix_server(wide["plain"], "--uds", path, *more) as (process, line):
        assert f"on unix:{path}" in line
        if workers == 1:
            assert f"curl --unix-socket {path} http://localhost/v2/models/plain/infer" in line
        body = orjson.dumps(document({"x": X}))
        for _ in range(8):
            answer = ask(path, "POST", "/v2/models/plain/infer", body)
            assert answer["outputs"][0]["shape"] == [4, 2, 3]
        done = subprocess.run(
            command(wide["plain"], "--uds", path), capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (
            1,
            f"Error: cannot listen on {path}: another process does; choose another --uds\n",
        )
        assert ask(path, "GET", "/v2/health/ready") == {"ready": True}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()


def test_paths_that_can_have_no_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, words in (
        (tmp_path / "file", "is a file or a folder, not a socket"),
        (tmp_path, "is a file or a folder, not a socket"),
        (tmp_path / "none" / "a.sock", "No such file or directory; choose another --uds"),
        (tmp_path / "file" / "a.sock", "Not a directory; choose another --uds"),
        (tmp_path / ("a" * 200), "path too long"),
    ):
        with pytest.raises(widepack.UsageError, match=words):
            listening_at(str(path))
    assert (tmp_path / "file").read_text() == "mine"
    with listening_at(str(tmp_path / "a.sock")), pytest.raises(AddressInUse, match="another process does"):
        listening_at(str(tmp_path / "a.sock"))


# ---------------------------------------------------------------- processes by the cores


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--workers", "auto"], (6, 1)),
        (["--workers", "auto", "--threads", "4"], (1, 4)),
        (["--workers", "auto", "--threads", "2"], (3, 2)),
        (["--workers", "auto", "--threads", "16"], (1, 16)),
        (["--workers", "auto", "--device", "cuda:0"], (1, None)),
        (["--workers", "auto", "--grpc-port", "0"], (1, None)),
        (["--workers", "auto", "--admin-token-file", "x", "--threads", "2"], (3, 2)),
        (["--workers", "3"], (3, None)),
        ([], (1, None)),
    ],
)
def test_processes_by_the_cores(
    words: list[str], expected: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int | None]] = []

    def served(settings: Any, host: str, port: int, uds: str | None, workers: int, *_: Any) -> None:
        found.append((workers, settings.threads))

    monkeypatch.setattr("widepack.system.cores.usable_cores", lambda: 6)
    monkeypatch.setattr(command_module, "_serve", served)
    done = CliRunner().invoke(cli, ["serve", "ens.wide", *words])
    assert (done.exit_code, found) == (0, [expected]), done.output


def test_options_that_exclude_each_other() -> None:
    for words, text in (
        (["--uds", "a.sock", "--port", "80"], "--uds with --port: the server listens on one of them"),
        (["--uds", "a.sock", "--host", "::"], "--uds with --host"),
        (["--workers", "many"], "'many' is not a valid integer"),
        (["--workers", "0"], "Or auto."),
        (["--cors", "app.example.org"], "is not an origin without a path"),
        (["--cors", f"{ORIGIN}/page"], "is not an origin without a path"),
    ):
        done = CliRunner().invoke(cli, ["serve", "ens.wide", *words])
        assert done.exit_code == 2 and text in done.output, (words, done.output)


# ---------------------------------------------------------------- pages of other origins


def test_pages_of_an_allowed_origin_may_read_answers(serve: Started) -> None:
    server = serve(cors=(ORIGIN,))
    request = json_request("plain", {"x": X}, headers={"origin": ORIGIN})
    allowed = server.maybe(request)
    assert allowed is not None and read(allowed).outputs["output"].shape == (4, 2, 3)
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "inference-header-content-length" in allowed.headers["access-control-expose-headers"]
    for origin in ("https://other.example.org", "null", f"{ORIGIN}.evil", ORIGIN.upper()):
        other = server("GET", "/v2/models/none", origin=origin)
        assert "access-control-allow-origin" not in other.headers and other.headers["vary"] == "Origin"
    assert server("GET", "/v2/models/none", origin=ORIGIN).headers["access-control-allow-origin"] == ORIGIN
    anyone = serve(cors=("*",))
    assert anyone("GET", "/v2", origin="null").headers["access-control-allow-origin"] == "*"
    closed = serve()
    assert not {"vary", "access-control-allow-origin"} & set(closed("GET", "/v2", origin=ORIGIN).headers)


def test_the_question_before_a_request_needs_no_token(serve: Started, tmp_path: Path) -> None:
    """Browsers ask without it. The request itself needs it."""
    (tmp_path / "token").write_text("t" * 20)
    server = serve(cors=(ORIGIN,), token_file=str(tmp_path / "token"))
    question: Any = {"access_control_request_method": "POST"}
    path = "/v2/models/plain/infer"
    got = server("OPTIONS", path, origin=ORIGIN, **question)
    assert (got.status, got.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "authorization" in got.headers["access-control-allow-headers"]
    assert "POST" in got.headers["access-control-allow-methods"]
    other = server("OPTIONS", path, origin="https://other.example.org", **question)
    assert (other.status, "access-control-allow-origin" in other.headers) == (400, False)
    refused = server("POST", path, b"{}", origin=ORIGIN)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    assert server("OPTIONS", path, origin=ORIGIN).status == 401
    assert serve()("OPTIONS", path, origin=ORIGIN, **question).status == 405


def test_the_origins_reach_other_processes() -> None:
    there = Settings.from_json(orjson.loads(orjson.dumps(Settings({}, cors=(ORIGIN, "*")).to_json())))
    assert there.cors == (ORIGIN, "*")


# ---------------------------------------------------------------- byte order marks


@pytest.mark.parametrize("rows", [2, 3000])
def test_a_byte_order_mark_before_the_request_is_ignored(rows: int, serve: Started) -> None:
    """In small and large bodies, and where binary data follows."""
    server, x = serve(), torch.randn(rows, 6)
    path = "/v2/models/plain/infer"
    text = orjson.dumps(document({"x": x}))
    expected = read(server("POST", path, text)).outputs["output"]
    torch.testing.assert_close(read(server("POST", path, BOM + text)).outputs["output"], expected)
    data = to_bytes(x)
    row = {**described("x", x), "parameters": {"binary_data_size": len(data)}}
    head = BOM + orjson.dumps({"inputs": [row]})
    length: Any = {"inference_header_content_length": str(len(head))}
    torch.testing.assert_close(read(server("POST", path, head + data, **length)).outputs["output"], expected)
    assert server("POST", path, BOM + BOM + text).status == 400
    assert server("POST", path, BOM).status == 400
    index = server.maybe(Request("POST", "/v2/repository/index", BOM + b'{"ready": true}'))
    assert index is not None and index.status == 200
