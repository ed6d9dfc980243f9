"""Loads a server over many connections, and checks every answer against the versions of its members."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
import wire_models
from asgi import Request, Response
from infer import binary_request, read
from serve_requests import on_the_wire
from server_process import Connection, Lost

MEMBERS = 4
VERSIONS = 5
BANK = 48
SHOWN = 20


def version(member: int, number: int) -> torch.nn.Module:
    """Returns the module of a version of a member. Version 0 is in the artifact at first."""
    return wire_models.MODELS["plain"].member(member + 10 * number)


def write_versions(folder: Path) -> None:
    """Writes the checkpoint of every version: `m1v3.pt`."""
    folder.mkdir(parents=True)
    for member in range(MEMBERS):
        for number in range(VERSIONS):
            torch.save(version(member, number).state_dict(), folder / f"m{member}v{number}.pt")


class Truth:
    """The answers of every version of every member to some inputs, in float64, and the bound of each.

    The bound is 4 times the largest error of the version alone in float32, and 4 units in the last place of
    the root mean square of the answers.
    """

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.inputs = [torch.randn(1 + k % 3, 6, generator=g) for k in range(BANK)]
        self._exact: list[list[list[torch.Tensor]]] = []
        self._bounds = torch.zeros(MEMBERS, VERSIONS)
        with torch.no_grad():
            for member in range(MEMBERS):
                rows = []
                for number in range(VERSIONS):
                    module = version(member, number)
                    alone = [module(x).double() for x in self.inputs]
                    module.double()
                    rows.append([module(x.double()) for x in self.inputs])
                    error = max(float((a - e).abs().max()) for a, e in zip(alone, rows[-1]))
                    scale = float(torch.cat(rows[-1]).square().mean().sqrt())
                    self._bounds[member, number] = 4 * error + 4 * torch.finfo(torch.float32).eps * scale
                self._exact.append(rows)

    def versions(self, k: int, row: slice, member: int, answer: torch.Tensor) -> list[int]:
        """Returns the versions of a member whose answer to some rows of an input this is, within bounds."""
        return [
            number
            for number in range(VERSIONS)
            if float((answer.double() - self._exact[member][number][k][row]).abs().max())
            <= float(self._bounds[member, number])
        ]


@dataclass
class Counts:
    """What the clients saw. times: seconds of a request with status 200, and when it ended."""

    answers: int = 0
    rows: int = 0
    dropped: int = 0
    bad: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    times: list[tuple[float, float]] = field(default_factory=list)
    versions: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def refuse(self, why: str) -> None:
        """Keeps what must not happen."""
        if len(self.wrong) < SHOWN:
            self.wrong.append(why[:600])
            print(f"WRONG {why[:300]}", flush=True)


BAD: list[Callable[[Request], Request]] = [
    lambda r: Request(r.method, r.path, b"{}", {}),
    lambda r: Request(r.method, r.path, b'{"inputs": [', {}),
    lambda r: Request(r.method, r.path, r.body, {}),
    lambda r: Request(r.method, r.path, bytes(r.body[:-1]) if isinstance(r.body, bytes) else b"", r.headers),
    lambda r: Request(
        r.method,
        r.path,
        orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 7], "data": [0.0] * 7}]}),
        {},
    ),
]


class Client:
    """One connection that sends requests one after the other.

    Args:
        port: Of the server.
        truth: The right answers.
        counts: Where it counts.
        seed: Of its choices.
        losses: The share of requests after which it closes the connection, and that of bad requests.
    """

    def __init__(self, port: int, truth: Truth, counts: Counts, seed: int, losses: float = 0.01) -> None:
        self._truth, self._counts, self._losses = truth, counts, losses
        self._draw = random.Random(seed)
        self.connection = Connection(port)

    def _request(self) -> tuple[Request, int, list[int]]:
        """Returns a request, the number of its input, and the member of each row; none for all members."""
        draw = self._draw
        k = draw.randrange(BANK)
        x = self._truth.inputs[k]
        kind = draw.choice(["one", "one", "one", "routed", "all"])
        if kind == "one":
            member = draw.randrange(MEMBERS)
            return binary_request(f"ens.fold{member}", {"x": x}), k, [member] * len(x)
        if kind == "routed":
            members = [draw.randrange(MEMBERS) for _ in range(len(x))]
            return binary_request("ens", {"x": x, "member": torch.tensor(members)}), k, members
        return binary_request("ens", {"x": x}), k, []

    async def step(self) -> None:
        """Sends one request, and checks its answer. Raises: Lost; OSError."""
        draw, counts = self._draw, self._counts
        request, k, members = self._request()
        chance = draw.random()
        if chance < self._losses:
            data = on_the_wire(request)
            await self.connection.write(data if draw.random() < 0.5 else data[: draw.randrange(len(data))])
            await asyncio.sleep(draw.choice([0.0, 0.001, 0.01]))
            await self.connection.reset()
            counts.dropped += 1
            return
        if chance < 2 * self._losses:
            await self.connection.write(on_the_wire(draw.choice(BAD)(request)))
            response = await self.connection.response()
            counts.bad += 1
            if response.status != 400:
                counts.refuse(f"a bad request got {response.status} {response.body[:200]!r}")
            return
        start = time.perf_counter()
        await self.connection.write(on_the_wire(request))
        self.check(await self.connection.response(), k, members, start)

    def check(self, response: Response, k: int, members: Sequence[int], start: float) -> None:
        """Checks an answer: of each member, exactly one version."""
        counts, now = self._counts, time.perf_counter()
        counts.statuses[response.status] += 1
        if response.status != 200:
            counts.refuse(f"status {response.status} {response.body[:300]!r}")
            return
        counts.answers += 1
        counts.times.append((now - start, now))
        y = read(response).outputs["output"]
        whole = slice(None)
        parts: list[tuple[int, slice, torch.Tensor]]
        if members:
            counts.rows += len(members)
            one = len(set(members)) == 1
            parts = (
                [(members[0], whole, y)]
                if one
                else [(m, slice(r, r + 1), y[r : r + 1]) for r, m in enumerate(members)]
            )
        else:
            counts.rows += y.shape[1]
            parts = [(m, whole, y[m]) for m in range(MEMBERS)]
        for member, row, answer in parts:
            found = self._truth.versions(k, row, member, answer)
            if len(found) != 1:
                counts.refuse(f"input {k}, member {member}: the answer is of the versions {found}")
            else:
                counts.versions[f"m{member}v{found[0]}"] += 1

    async def run(self, ended: asyncio.Event) -> None:
        """Sends requests until the end."""
        while not ended.is_set():
            try:
                await self.step()
            except (Lost, OSError) as e:
                self._counts.refuse(f"a request got no answer: {e!r}")
                await self.connection.reset()
        await self.connection.close()


def percentile(times: Sequence[float], share: float) -> float:
    """Returns a percentile in milliseconds."""
    ordered = sorted(times)
    return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2) if ordered else 0.0


async def asked(
    connection: Connection, method: str, path: str, body: Any = None, token: str = ""
) -> Response:
    """Sends a request with a JSON body. Raises: Lost; OSError."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    data = b"" if body is None else orjson.dumps(body)
    await connection.write(on_the_wire(Request(method, path, data, headers)))
    return await connection.response(method)
