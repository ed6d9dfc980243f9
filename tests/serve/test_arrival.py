"""Tests that the messages of one client of gRPC are read in turn, and that nobody else waits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch
from raw_http2 import RawCalls, allowed
from rpc_client import infer_message, served

import widepack
from widepack.inference.model import WideModel
from widepack_serve.errors import Busy
from widepack_serve.rpc import arrival
from widepack_serve.rpc.arrival import Turns

MB = 1_000_000
X = torch.rand(2, 6)


@pytest.fixture(scope="module")
def models(wide: dict[str, Path]) -> dict[str, WideModel]:
    return {"ens": widepack.load(wide["plain"])}


def test_turns_are_given_in_order_and_to_each_client() -> None:
    async def scene() -> None:
        turns, order = Turns(lambda: None), list[int]()

        async def message(number: int) -> None:
            await turns.take("a")
            order.append(number)

        await message(0)
        await asyncio.wait_for(turns.take("b"), 0.1)
        others = [asyncio.ensure_future(message(k)) for k in (1, 2, 3)]
        await asyncio.sleep(0.01)
        assert order == [0]
        others[1].cancel()
        await asyncio.sleep(0.01)
        for expected in ([0, 1], [0, 1, 3]):
            turns.give("a")
            await asyncio.sleep(0.01)
            assert order == expected
        turns.give("a")
        await asyncio.wait_for(turns.take("a"), 0.1)

    asyncio.run(scene())


def test_a_turn_is_passed_on_by_a_call_that_ends_with_it() -> None:
    async def scene() -> None:
        turns = Turns(lambda: None)
        await turns.take("a")
        first, second = (asyncio.ensure_future(turns.take("a")) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turns.give("a")
        first.cancel()
        await asyncio.wait_for(second, 0.1)
        turns.give("a")
        await asyncio.wait_for(turns.take("a"), 0.1)

    asyncio.run(scene())


def test_a_message_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "_MOST_WAIT_S", 0.05)

    async def scene() -> None:
        rejected: list[int] = []
        turns = Turns(lambda: rejected.append(1))
        await turns.take("a")
        with pytest.raises(Busy, match="are read in turn, and 0.05 seconds"):
            await turns.take("a")
        assert rejected == [1]
        turns.give("a")
        await asyncio.wait_for(turns.take("a"), 0.1)

    asyncio.run(scene())


def test_a_message_that_waits_is_not_received(
    models: dict[str, WideModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may go on, the next one may send no more than its first bytes until it has the turn."""
    monkeypatch.setattr(arrival, "_TURN_S", 4.0)

    async def scene() -> None:
        async with served(models) as client:
            raw = await RawCalls(client.address, "127.0.0.2").open()
            raw.begin(bytes(10_000), 50 * MB)
            raw.begin(bytes(10_000), 50 * MB)
            got = await raw.received(0.6)
            assert allowed(got, 0) > MB and allowed(got, 1) <= 1 << 16
            assert (await asyncio.wait_for(client.infer("ens", ("x", X)), 3.0)).outputs  # another client
            assert allowed(await raw.received(4.5), 1) > MB
            await raw.close()

    asyncio.run(scene())


def test_the_message_after_a_large_one_waits(
    models: dict[str, WideModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC copies a message on the thread of the event loop. Small ones do not wait for each other."""
    large = infer_message("ens", ("x", torch.rand(60_000, 6))).SerializeToString()
    monkeypatch.setattr(arrival, "_SHORT", 100_000)
    monkeypatch.setattr(arrival, "_PACE", (len(large) - 100_000) / 2.0)

    async def scene() -> None:
        async with served(models) as client:
            start = time.monotonic()
            for _ in range(5):
                assert (await client.infer("ens", ("x", X))).outputs
            assert time.monotonic() - start < 2.0
            start = time.monotonic()
            assert await client.send("ModelInfer", large)
            assert (await asyncio.wait_for(client("ServerLive"), 1.0)).live  # health waits for nothing
            assert (await client.infer("ens", ("x", X))).outputs
            assert time.monotonic() - start > 2.0

    asyncio.run(scene())


def test_large_messages_at_once_are_answered(models: dict[str, WideModel]) -> None:
    """Each as alone."""
    values = [torch.rand(30_000, 6, generator=torch.Generator().manual_seed(k)) for k in range(4)]

    async def scene() -> None:
        async with served(models) as client:
            data = [infer_message("ens", ("x", v)).SerializeToString() for v in values]
            alone = [await client.send("ModelInfer", d) for d in data]
            assert await asyncio.gather(*(client.send("ModelInfer", d) for d in data)) == alone

    asyncio.run(scene())
