"""Sends requests that a server must refuse, and checks how it refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from asgi import InProcess, Request

X = torch.arange(12, dtype=torch.float32).reshape(2, 6) / 7
GOOD = {"x": X}
Change = Callable[[dict[str, Any]], Any]


def sent(body: bytes, model: str = "plain", **headers: str) -> Request:
    return Request(
        "POST", f"/v2/models/{model}/infer", body, {k.replace("_", "-"): v for k, v in headers.items()}
    )


def refused(server: InProcess, request: Request, status: int, words: str) -> None:
    got = server.maybe(request)
    assert got is not None
    assert (got.status, list(got.json)) == (status, ["error"]), got.body
    assert words in got.error, got.error
    assert len(got.error.splitlines()) <= 5 and len(got.error) < 1000
    assert got.headers["content-type"] == "application/json"


def change(**values: Any) -> Change:
    """Returns a change of the first input. A value of `...` removes its key."""

    def changed(request: dict[str, Any]) -> None:
        for key, value in values.items():
            if value is ...:
                del request["inputs"][0][key]
            else:
                request["inputs"][0][key] = value

    return changed


def whole(**values: Any) -> Change:
    """Returns a change of members of the JSON object."""
    return lambda request: request.update(values)


def outputs(*rows: Any) -> Change:
    return whole(outputs=[{"name": r} if isinstance(r, str) else r for r in rows])
