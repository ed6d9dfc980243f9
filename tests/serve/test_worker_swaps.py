"""Tests swaps of a server of several processes: each is made in all of them or in none."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command_server import ServeProcess, command_server
from loaded import saved
from torch import nn

from widepack.errors import UsageError
from widepack.inference.model import WideModel, swap_together
from widepack_serve.server.swap_coordinator import SwapCoordinator, received, send

TOKEN = "a" * 20
LIMIT_S = 60.0


class Versioned(nn.Module):
    """A member whose every answer is its version."""

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.randn(2)[:1].expand(2).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * 0 + self.version


def body(version: float, size: int = 2) -> bytes:
    return safetensors.torch.save({"version": torch.full((size,), version)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[WideModel, Path]:
    """Returns a loaded artifact of two members, and its path."""
    folder = tmp_path_factory.mktemp("versions")
    ens = saved(Versioned, folder, "x=float32[B,3]", members=2)
    (path,) = folder.glob("*.wide")
    return ens, path


@dataclass
class Worker:
    """A connection to one process of a server, which stays open."""

    pid: int
    connection: http.client.HTTPConnection

    def ask(self, path: str, data: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        self.connection.request("POST", path, data, headers)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def versions(self) -> list[float]:
        """Returns the version of each member in one answer."""
        x = {"name": "x", "datatype": "FP32", "shape": [5, 3], "data": [0.0] * 15}
        status, found = self.ask("/v2/models/ens/infer", json.dumps({"inputs": [x]}))
        assert status == 200, found
        y = torch.tensor(found["outputs"][0]["data"]).reshape(2, 10)
        assert (y == y[:, :1]).all()  # no answer mixes versions of a member
        return y[:, 0].tolist()

    def swap(self, data: bytes, member: int = 1) -> tuple[int, dict[str, Any]]:
        path = f"/v2/repository/models/ens.{member}/load"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/octet-stream"}
        return self.ask(path, data, **headers)


def open_files(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            yield os.readlink(file)


class Served:
    """A server of two processes.

    Attributes:
        server: The first process.
        port: Of all.
    """

    def __init__(self, server: ServeProcess, at_end: ExitStack) -> None:
        self.server, self._at_end = server, at_end
        self.port = int(server.http.split(":")[1])

    def children(self) -> list[int]:
        pid = self.server.process.pid
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def workers(self) -> dict[int, Worker]:
        """Connects to each process. The kernel chooses the process of a connection by its port."""
        found: dict[int, Worker] = {}
        limit = time.monotonic() + LIMIT_S
        while len(found) < 2:
            began = time.monotonic()
            assert began < limit
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
            self._at_end.callback(connection.close)
            try:
                Worker(0, connection).versions()  # so that a process has accepted it
            except OSError:
                continue  # it was the connection of a process that ended
            pid = self._pid_of(connection)
            if time.monotonic() - began > 2:
                found.clear()  # it waited for a process that starts, and idle ones are closed after 5 seconds
            found[pid] = Worker(pid, connection)
        return found

    def _pid_of(self, connection: http.client.HTTPConnection) -> int:
        ends = (self.port, connection.sock.getsockname()[1])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (inode,) = [r[9] for r in rows if tuple(int(end.split(":")[1], 16) for end in r[1:3]) == ends]
        links = {pid: list(open_files(pid)) for pid in self.children()}
        (pid,) = [pid for pid, files in links.items() if f"socket:[{inode}]" in files]
        return pid


@contextmanager
def served(path: Path, folder: Path) -> Iterator[Served]:
    (folder / "token").write_text(TOKEN)
    named, admin = f"ens={path}", ("--admin-token-file", folder / "token")
    with command_server(named, "--workers", "2", "--drain", "0", *admin) as server, ExitStack() as at_end:
        yield Served(server, at_end)


@dataclass
class Stream:
    """Requests to one process, one after the other, until the block ends: versions of member 1."""

    worker: Worker
    seen: list[float] = field(default_factory=list)

    def __enter__(self) -> Stream:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ended.is_set():
            self.seen.append(self.worker.versions()[1])

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_a_swap_is_made_in_all_processes_or_in_none(model: tuple[WideModel, Path], tmp_path: Path) -> None:
    with served(model[1], tmp_path) as server:
        first, second = server.workers().values()
        swapping = server.workers()[first.pid]
        before = first.versions()
        with Stream(first) as a, Stream(second) as b:
            for version in (1.0, 2.0, 3.0):
                status, found = swapping.swap(body(version))
                assert (status, found) == (200, {"message": "ens.1 is now the checkpoint of the request"})
                asked = len(a.seen), len(b.seen)  # the answer that runs now may be of the version before
                while len(a.seen) < asked[0] + 5 or len(b.seen) < asked[1] + 5:
                    time.sleep(0.01)
                assert set(a.seen[asked[0] + 1 :]) == set(b.seen[asked[1] + 1 :]) == {version}
            for data, reason in (
                (body(9.0, size=3), "[3]"),
                (body(float("nan")), "NaN"),
                (body(9.0)[:-3], "is truncated"),
            ):
                status, found = swapping.swap(data)
                assert status == 409 and reason in found["error"], found
                assert "the checkpoint of the request" in found["error"] and "/" not in found["error"], found
        assert set(a.seen) | set(b.seen) <= {before[1], 1.0, 2.0, 3.0}
        assert first.versions() == second.versions() == [before[0], 3.0]


def restarted(server: Served, ended: int) -> None:
    """Waits until another process has taken the place of one that ended."""
    limit = time.monotonic() + LIMIT_S
    while ended in server.children() or len(server.children()) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.extended
def test_a_process_that_ends_leaves_no_mixed_state(model: tuple[WideModel, Path], tmp_path: Path) -> None:
    """One that ends during a swap ends the swap, and one that starts later has the swaps that were made."""
    with served(model[1], tmp_path) as server:
        first, second = server.workers().values()
        assert first.swap(body(1.0))[0] == 200
        os.kill(second.pid, signal.SIGSTOP)  # it never agrees
        ended = threading.Timer(1.0, os.kill, (second.pid, signal.SIGKILL))
        ended.start()
        status, found = first.swap(body(2.0))
        ended.join()
        assert status == 503 and "ended during the swap, and no member was replaced" in found["error"]
        assert first.versions()[1] == 1.0
        restarted(server, second.pid)
        first, third = server.workers().values()
        assert first.versions() == third.versions() and third.versions()[1] == 1.0
        assert third.swap(body(3.0), member=0)[0] == 200
        os.kill(first.pid, signal.SIGKILL)
        restarted(server, first.pid)
        assert [w.versions() for w in server.workers().values()] == [[3.0, 1.0]] * 2


@pytest.mark.extended
def test_all_processes_end_with_the_first(model: tuple[WideModel, Path], tmp_path: Path) -> None:
    with served(model[1], tmp_path) as server:
        pids = server.children()
        server.server.process.kill()
        limit = time.monotonic() + LIMIT_S
        while any(Path(f"/proc/{pid}/fd/0").exists() for pid in pids):
            assert time.monotonic() < limit
            time.sleep(0.05)


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize("call", [1, 2])
def test_a_process_that_does_not_agree_keeps_its_member(call: int, model: tuple[WideModel, Path]) -> None:
    """It restores the old member if the others refuse after the exchange."""
    ens, path = model
    calls: list[list[float]] = []
    x = torch.zeros(1, 3)
    before = ens(x)[:, 0, 0].tolist()

    def agreed() -> None:
        calls.append(ens(x)[:, 0, 0].tolist())
        if len(calls) == call:
            raise UsageError("another process refuses")

    (path.parent / "new.safetensors").write_bytes(body(5.0))
    with pytest.raises(UsageError, match="another process refuses"):
        swap_together(ens, 1, path.parent / "new.safetensors", agreed)
    assert calls == [before, [before[0], 5.0]][:call]
    assert ens(x)[:, 0, 0].tolist() == before and ens.checkpoints[1].name == ens.members[1]


class Others:
    """Two processes in the place of those of a server, which answer what a test says."""

    def __init__(self, folder: Path, ending: bool = False) -> None:
        self.coordinator = SwapCoordinator(folder, lambda: ending)
        pairs = [Pipe(), Pipe()]
        self.here: list[Connection] = [here for here, _ in pairs]
        self.there: list[Connection] = [there for _, there in pairs]

    def swap(self, path: Path, replies: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Returns the answer, where each process sends some messages. One with too few has ended then."""
        order = {"artifact": "ens", "digest": "d", "member": 1, "path": str(path), "title": "it"}
        send(self.there[0], ask=order, number=1)
        assert self.coordinator.take(self.here[0])
        for there, messages in zip(self.there, replies):
            for message in messages:
                send(there, **message)
        for there, messages in zip(self.there[1:], replies[1:]):
            if messages and "ended" not in messages[-1]:
                there.close()
        self.coordinator.answer_all(self.here, complete=True)
        found: list[dict[str, Any]] = []
        while "answer" not in (message := received(self.there[0]) or {"answer": None}):
            found.append(message)
        self.orders = [key for m in found for key in m]
        answer: dict[str, Any] = message["answer"]
        return answer


AGREES: dict[str, Any] = {"agrees": True}
DONE: dict[str, Any] = {"ended": {"pause": 0.5, "uncalibrated": False}}
REFUSED: dict[str, Any] = {"ended": {"error": "it does not fit", "status": 409}}


@pytest.mark.parametrize(
    ("first", "second", "orders", "answer"),
    [
        ([AGREES, AGREES, DONE], [AGREES, AGREES, DONE], ["swap", "go", "go"], DONE["ended"]),
        ([AGREES, REFUSED], [REFUSED], ["swap", "stop"], REFUSED["ended"]),
        ([AGREES, AGREES, REFUSED], [AGREES, REFUSED], ["swap", "go", "stop"], REFUSED["ended"]),
        ([AGREES, AGREES, REFUSED], [AGREES], ["swap", "go", "stop"], None),  # it ended after the exchange
        ([AGREES, AGREES, DONE], [AGREES, AGREES], ["swap", "go", "go"], DONE["ended"]),  # or after the end
    ],
)
def test_the_coordinator(
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    orders: list[str],
    answer: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    (tmp_path / "new.pt").write_bytes(b"bytes")
    others = Others(tmp_path / "copies")
    got = others.swap(tmp_path / "new.pt", [first, second])
    assert others.orders == orders
    if answer is None:
        assert got["status"] == 503 and "a process of this server ended" in got["error"]
    else:
        assert got == answer
    copies = [p for p in (tmp_path / "copies").rglob("*") if p.is_file()]
    made = others.coordinator.made
    assert len(copies) == len(made) == (orders[-1] == "go")
    for order in made:  # it does not depend on the file of the request
        assert order["path"] != str(tmp_path / "new.pt") and Path(order["path"]).read_bytes() == b"bytes"


def test_a_server_that_ends_waits_for_no_swap(tmp_path: Path) -> None:
    """A process may have stopped and never answer."""
    (tmp_path / "new.pt").write_bytes(b"bytes")
    others = Others(tmp_path / "copies", ending=True)
    got = others.swap(tmp_path / "new.pt", [[AGREES, REFUSED], []])
    assert got == {"error": "this server shuts down, and no member was replaced", "status": 503}
    assert others.orders == ["swap", "stop"] and not others.coordinator.made


def test_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    got = Others(tmp_path / "copies").swap(tmp_path / "gone.pt", [[], [DONE]])
    assert got["status"] == 500 and got["error"].startswith("it cannot be copied: ")
    assert not list((tmp_path / "copies").rglob("*"))
