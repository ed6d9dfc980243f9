"""Records and holds back the batches of a server in this process, and checks its answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import wire_models
from asgi import InProcess, Request, Response, exchange
from infer import read

from widepack_serve.batching import execution
from widepack_serve.batching.job import Part


class Batches:
    """Records the batches that run, and can hold them back.

    Attributes:
        parts: The parts of each batch.
    """

    def __init__(self) -> None:
        self.parts: list[list[Part]] = []
        self._free = threading.Event()
        self._free.set()

    def run(self, parts: Sequence[Part]) -> None:
        self._free.wait(20)
        self.parts.append(list(parts))
        execution.run_batch(parts)

    @property
    def rows(self) -> list[int]:
        """The rows of each batch."""
        return [sum(p.rows for p in parts) for parts in self.parts]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Batches wait in this block."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def text(count: int, words: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(20, (count, words), generator=g),
        "x": torch.randn(count, 4, generator=g),
        "loud": torch.rand(count, generator=g) > 0.5,
    }


def expected(name: str, member: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found = wire_models.MODELS[name].member(member)(**inputs)
    return dict(found) if isinstance(found, dict) else {"output": found}


def check(response: Response | None, name: str, member: int, inputs: dict[str, torch.Tensor]) -> None:
    for key, value in expected(name, member, inputs).items():
        torch.testing.assert_close(read(response).outputs[key], value, rtol=1e-4, atol=1e-5)


async def sent(server: InProcess, request: Request) -> asyncio.Task[Response | None]:
    """Sends a request, and returns its task when the request waits."""
    task = asyncio.ensure_future(exchange(server.app, request))
    await asyncio.sleep(0.02)
    return task
