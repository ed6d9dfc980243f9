"""Replaces a member in all processes of a server or in none. It is a two-phase commit, and the first
process is the coordinator.

1. A process that gets a swap asks the coordinator, which copies the checkpoint and orders the swap.
2. Each process checks the checkpoint, computes all that it will write, and agrees.
3. If all agree, each exchanges the member, verifies its answers, and agrees again.
4. If all agree, the swap is made. The coordinator keeps the checkpoint for processes that start later.

If a process refuses or ends before that, the others restore the old member. If one ends later, it starts
again with the swaps that were made.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import Busy, Failed, RequestError

Message = dict[str, Any]
"""One key says what it is. Of a process: `ask`, `agrees`, `ended`. Of the coordinator: `made` (first),
`swap`, `go`, `stop`, `answer`, `close`.
"""
_STEPS, _LOOK_S = 2, 0.1
SHUTS_DOWN = "this server shuts down, and no member was replaced"


def send(connection: Connection, **message: Any) -> None:
    """Sends a message. That the other process has ended shows when its next message is read."""
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def received(connection: Connection) -> Message | None:
    """Returns the next message; None if the other process has ended."""
    try:
        found: Message = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return found


def error_message(error: RequestError) -> Message:
    """Returns an error for another process."""
    return {"error": str(error), "status": error.status}


class SwapCoordinator:
    """Coordinates the swaps of all processes, one after the other.

    Args:
        folder: Where it keeps checkpoints.
        ending: Returns whether the server ends, so that no process is waited for.
    """

    def __init__(self, folder: Path, ending: Callable[[], bool]) -> None:
        self._folder, self._ending, self._count = folder, ending, 0
        self._made: dict[tuple[str, int], Message] = {}
        self._asked: deque[tuple[Connection, Message]] = deque()

    @property
    def made(self) -> list[Message]:
        """The swaps that a process has to make before it serves."""
        return list(self._made.values())

    def take(self, connection: Connection) -> bool:
        """Reads a message of a process, which waits for `answer_all`. Returns: False if the process has
        ended.
        """
        message = received(connection)
        if message is not None:
            self._asked.append((connection, message))
        return message is not None

    def answer_all(self, connections: Sequence[Connection], *, complete: bool) -> None:
        """Makes all swaps that processes have asked for.

        Args:
            connections: Of the processes that are alive.
            complete: Whether these are all, and ready.
        """
        while self._asked:
            asker, message = self._asked.popleft()
            if complete:
                result = self._swap(message["ask"], connections)
            else:
                result = error_message(Busy("a process of this server starts now; try again soon"))
            send(asker, answer=result, number=message["number"])

    def _swap(self, order: Message, connections: Sequence[Connection]) -> Message:
        """Returns the result of a swap in all processes, or an error, after which all are as before."""
        try:
            order = {**order, "path": self._copied(order["path"])}
        except (OSError, shutil.Error) as e:
            return error_message(Failed(f"{order['title']} cannot be copied: {e}; no member was replaced"))
        for connection in connections:
            send(connection, swap=order)
        waiting = list(connections)
        for step in range(_STEPS):
            replies = [self._reply(c) for c in waiting]
            waiting = [c for c, r in zip(waiting, replies) if "ended" not in r]
            refused: list[Message] = [r["ended"] for r in replies if "ended" in r]
            if refused:
                for connection in waiting:
                    send(connection, stop=refused[0])
                for connection in waiting:
                    self._reply(connection)  # it has restored the old member
                _remove(order)
                return refused[0]
            if step == _STEPS - 1:
                self._keep(order)
            for connection in waiting:
                send(connection, go=True)
        results = [self._reply(c)["ended"] for c in waiting]
        pauses = [r["pause"] for r in results if "pause" in r]
        return {
            "pause": max(pauses, default=0.0),
            "uncalibrated": any(r.get("uncalibrated", False) for r in results),
        }

    def _reply(self, connection: Connection) -> Message:
        """Returns the next message of a process in a swap. What else it asks waits."""
        while True:
            while not connection.poll(_LOOK_S):
                if self._ending():
                    return {"ended": error_message(Busy(SHUTS_DOWN))}
            if (message := received(connection)) is None:
                text = "a process of this server ended during the swap, and no member was replaced; try again"
                return {"ended": error_message(Busy(text))}
            if "ask" not in message:
                return message
            self._asked.append((connection, message))

    def _copied(self, path: str) -> str:
        """Copies a checkpoint, so that all processes read the same bytes, also later. Returns: its path."""
        self._count += 1
        copy = self._folder / f"swap-{self._count}" / Path(path).name
        copy.parent.mkdir(parents=True)
        try:
            (shutil.copytree if Path(path).is_dir() else shutil.copyfile)(path, copy)
        except BaseException:
            shutil.rmtree(copy.parent, ignore_errors=True)
            raise
        return str(copy)

    def _keep(self, order: Message) -> None:
        key = order["artifact"], order["member"]
        if (before := self._made.get(key)) is not None:
            _remove(before)
        self._made[key] = order


def _remove(order: Message) -> None:
    shutil.rmtree(Path(order["path"]).parent, ignore_errors=True)
