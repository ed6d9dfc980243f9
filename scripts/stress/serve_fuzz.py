#!/usr/bin/env python3
"""Sends changed requests to the server: in this process through its ASGI app, and over sockets to `widepack
serve`.

Valid requests are changed at random: JSON, headers, sizes of binary tensors, gzip and deflate (damaged, or
bombs), names, paths, methods, chunked bodies, clients that go, and over sockets HTTP itself. In the process,
eight changed requests and one valid request are sent at a time, so that they share batches. The valid one
must be answered as the members alone answer. There must be no status from 500 on, except 504 for a timeout
that a request sets itself, no answer after more than 5 seconds, no answer that is not of the protocol, and
no growth of memory beyond two bodies of the largest size for each request in flight.

    python scripts/stress/serve_fuzz.py [--requests 100000] [--socket 5000] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import widepack_serve
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

import wire_models  # noqa: E402
from asgi import InProcess, Request, Response, exchange  # noqa: E402
from infer import read  # noqa: E402
from serve_requests import Requests, Valid, damaged, is_complete, on_the_wire  # noqa: E402
from server_process import Connection, Lost, ServerProcess, usage  # noqa: E402

TOGETHER = 8
SECONDS = 5.0
WAIT_S = 0.3
"""For how long an answer to a request that may not be complete is waited for."""
MAX_BODY = 1_000_000
IDLE_S = 2.0
SHOWN = 20


@dataclass
class Found:
    """What happened. slowest_s: the longest time of a request. wrong: what must not happen."""

    requests: int = 0
    valid: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    anon_before: int = 0
    anon_largest: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def refuse(self, why: str, request: Any = None) -> None:
        """Keeps what must not happen."""
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{why}: {request!r}"[:1500])
            print(f"WRONG {self.wrong[-1][:300]}", file=sys.stderr, flush=True)

    def check(self, request: Any, response: Response | None, seconds: float) -> None:
        """Checks the answer to a changed request."""
        self.requests += 1
        self.slowest_s = max(self.slowest_s, seconds)
        if seconds > SECONDS:
            self.refuse(f"it took {seconds:.1f} s", request)
        status = "none" if response is None else str(response.status)
        self.statuses[status] += 1
        if response is None:
            return
        if response.status >= 500 and response.status not in (503, 504):
            self.refuse(f"status {status} {response.body[:300]!r}", request)

    def document(self) -> dict[str, Any]:
        """Returns the counts."""
        return {
            "requests": self.requests,
            "valid_requests_between": self.valid,
            "statuses": dict(sorted(self.statuses.items())),
            "slowest_ms": round(1000 * self.slowest_s, 1),
            "anon_growth_mb": round((self.anon_largest - self.anon_before) / 1e6, 1),
            "seconds": round(self.seconds, 1),
            "wrong": self.wrong,
        }


class Truth:
    """The members of the models, for answers to valid requests."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, int], torch.nn.Module] = {}

    def check(self, found: Found, one: Valid, response: Response | None) -> None:
        """Checks the answer to a valid request."""
        found.valid += 1
        if response is None or response.status != 200:
            found.refuse(f"a valid request got {response}", one.request)
            return
        got = read(response).outputs
        count = wire_models.MODELS[one.model].members
        members = sorted(set(one.members)) or range(count)
        with torch.no_grad():
            answers = {i: self._answer(one, i) for i in members}
        for name, value in got.items():
            if one.members:
                expected = torch.stack([answers[m][name][row] for row, m in enumerate(one.members)])
            else:
                expected = torch.stack([answers[i][name] for i in range(count)])
            if value.dtype in (torch.bool, torch.int64):
                close = torch.equal(value, expected)
            else:
                bound = 1e-2 if value.dtype in (torch.float16, torch.bfloat16) else 1e-4
                close = torch.allclose(value.double(), expected.double(), rtol=bound, atol=bound)
            if not close:
                found.refuse(f"{name} is not what the members answer", one.request)

    def _answer(self, one: Valid, i: int) -> dict[str, torch.Tensor]:
        module = self._members.get((one.model, i))
        if module is None:
            module = self._members[one.model, i] = wire_models.MODELS[one.model].member(i)
        answer = module(**one.inputs)
        return dict(answer) if isinstance(answer, dict) else {"output": answer}


def of_the_protocol(found: Found, request: Request, response: Response | None) -> None:
    """Checks that an answer of the app is one of the protocol."""
    if response is None:
        return
    try:
        if int(response.headers["content-length"]) != len(response.body):
            found.refuse("the length of the answer is wrong", request)
        elif response.status >= 400:
            error = json.loads(response.body)
            assert list(error) == ["error"] and isinstance(error["error"], str) and error["error"]
            assert len(error["error"]) < 3000 and "Traceback" not in error["error"]
    except (AssertionError, KeyError, ValueError):
        found.refuse(f"the answer is not of the protocol: {response.body[:300]!r}", request)


async def timed(app: Any, request: Request) -> tuple[Response | None, float]:
    """Sends a request. Returns: the answer and the seconds."""
    start = time.perf_counter()
    response = await exchange(app, request)
    return response, time.perf_counter() - start


def in_process(paths: dict[str, Path], count: int, seed: int) -> Found:
    """Sends changed requests to the app."""
    found, truth, requests = Found(), Truth(), Requests(random.Random(seed))
    logging.getLogger("widepack.serve").setLevel(logging.CRITICAL)
    app = widepack_serve.app(paths, max_body=MAX_BODY, receive_timeout=2.0, timeout=10.0, max_queue=4096)
    server = InProcess(app).start()
    began = time.perf_counter()

    async def together() -> None:
        changed = [requests.changed() for _ in range(TOGETHER)]
        valid = requests.valid()
        answers = await asyncio.gather(*(timed(app, r) for r in (*changed, valid.request)))
        for request, (response, seconds) in zip(changed, answers):
            found.check(request, response, seconds)
            of_the_protocol(found, request, response)
        truth.check(found, valid, answers[-1][0])
        found.slowest_s = max(found.slowest_s, answers[-1][1])

    step = 0
    while found.requests < count:
        server.run(together())
        step += 1
        if step == max(count // TOGETHER // 20, 1):
            found.anon_before = usage(os.getpid()).anon
        if found.anon_before and step % 50 == 0:
            found.anon_largest = max(found.anon_largest, usage(os.getpid()).anon)
        if step % 1000 == 0:
            print(f"{found.requests} requests, {dict(found.statuses)}", flush=True)
    if "widepack_queue_rows 0.0" not in server("GET", "/metrics").body.decode():
        found.refuse("rows still wait at the end")
    server.close()
    if found.anon_largest - found.anon_before > 2 * MAX_BODY * (TOGETHER + 1):
        found.refuse(f"memory grew by {found.anon_largest - found.anon_before} bytes")
    found.seconds = time.perf_counter() - began
    return found


# ---------------------------------------------------------------- over sockets


async def one_on_the_wire(port: int, requests: Requests, found: Found) -> None:
    """Sends one changed request on a connection of its own: in pieces, pipelined, or not to its end."""
    draw = requests.draw
    several = [requests.changed() for _ in range(draw.choice([1, 1, 1, 1, 2, 3]))]
    data = b"".join(map(on_the_wire, several))
    complete = is_complete(several[0])
    if draw.random() < 0.1:
        data = data.replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    if draw.random() < 0.3:
        data, complete = damaged(data, draw), False
    connection, start, response = Connection(port), time.perf_counter(), None
    try:
        if draw.random() < 0.2:
            at = draw.randrange(len(data) + 1)
            await connection.write(data[:at])
            await asyncio.sleep(0.005)
            await connection.write(data[at:])
        else:
            await connection.write(data)
        answer = connection.response(several[0].method)
        response = await asyncio.wait_for(answer, SECONDS if complete else WAIT_S)
    except asyncio.TimeoutError:  # an OSError, too
        if complete:
            found.refuse("no answer", data)
        start += WAIT_S  # it waits for the rest of a request that is not complete
    except (Lost, OSError, ValueError, asyncio.LimitOverrunError, IndexError):
        pass  # the server closes a connection whose requests it cannot read
    found.check(data, response, time.perf_counter() - start)
    await connection.reset()


async def over_sockets(server: ServerProcess, count: int, seed: int) -> Found:
    """Sends changed requests to a server of its own process, and a valid one now and then."""
    found, truth, requests = Found(), Truth(), Requests(random.Random(seed))
    start = began = time.perf_counter()
    steady = Connection(server.port)
    while found.requests < count:
        await asyncio.gather(*(one_on_the_wire(server.port, requests, found) for _ in range(TOGETHER)))
        valid = requests.valid()
        if time.perf_counter() - start > IDLE_S:
            await steady.close()  # the server closes it after five seconds
        start = time.perf_counter()
        try:
            await steady.write(on_the_wire(valid.request))
            response = await asyncio.wait_for(steady.response(), SECONDS)
            truth.check(found, valid, response)
        except (Lost, OSError, asyncio.TimeoutError) as e:
            found.refuse(f"a valid request got no answer: {e!r}")
            await steady.reset()
        found.slowest_s = max(found.slowest_s, time.perf_counter() - start)
        if not found.anon_before and found.requests > count // 10:
            found.anon_before = server.usage().anon
        if found.anon_before:
            found.anon_largest = max(found.anon_largest, server.usage().anon)
    await steady.close()
    await asyncio.sleep(0.5)
    if found.anon_largest - found.anon_before > 2 * MAX_BODY * (TOGETHER + 1):
        found.refuse(f"memory grew by {found.anon_largest - found.anon_before} bytes")
    if server.process.poll() is not None:
        found.refuse("the server ended")
    found.seconds = time.perf_counter() - began
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=95_000)
    parser.add_argument("--socket", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/serve-fuzz.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        paths = wire_models.all_built(Path(folder) / "artifacts")
        inside = in_process(paths, options.requests, options.seed)
        server = ServerProcess([*map(str, paths.values()), "--max-body", str(MAX_BODY)])
        try:
            outside = asyncio.run(over_sockets(server, options.socket, options.seed + 1))
            if (at := server.log().find("Traceback")) >= 0:
                outside.refuse("the log has a traceback", server.log()[max(at - 300, 0) :])
        finally:
            server.close()
    document = {
        "what": " ".join((__doc__ or "").split("\n\n    python")[0].split()),
        "environment": environment("cpu", 1),
        "seed": options.seed,
        "in_process": inside.document(),
        "over_sockets": outside.document(),
        "wrong": len(inside.wrong) + len(outside.wrong),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in document.items() if k != "environment"}, indent=1)[:5000])
    return 1 if document["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
