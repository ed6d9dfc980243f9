"""Answers requests about one model.

Their paths are `/v2/models/NAME[/versions/VERSION][/ready | /infer | /config | /stats]`.
"""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from ..catalog.metadata import model_config, model_metadata
from ..errors import NotFound, RequestError
from ..lifecycle.documents import model_statistics
from ..lifecycle.service import Service
from .inference import answer_inference
from .send import send_document

_ROOT = "v2/models"
_ACTIONS = {"": "GET", "ready": "GET", "config": "GET", "stats": "GET", "infer": "POST"}


class WrongMethod(RequestError):
    """Raised for a path that takes another HTTP method."""

    status = 405


def path_parts(scope: Scope) -> list[str]:
    """Returns the parts of a path, without those of the mount, each decoded: a name may contain `/` as `%2F`.

    Raises: NotFound for bytes that are no text.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.partition(b"?")[0].decode("latin-1")
    root: str = scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :]
    try:
        return [unquote(part, errors="strict") for part in path.strip("/").split("/")]
    except UnicodeDecodeError:
        raise NotFound("the path is not UTF-8") from None


def named(parts: list[str]) -> tuple[str, str, str]:
    """Returns the name, the version and the action of a path after `/v2/models`. Raises: NotFound."""
    name, rest = parts[0], parts[1:]
    version = ""
    if len(rest) >= 2 and rest[0] == "versions":
        version, rest = rest[1], rest[2:]
    if not name or len(rest) > 1 or (rest and rest[0] not in _ACTIONS):
        raise NotFound(
            f"there is no path /{_ROOT}/{'/'.join(parts)[:120]}; known: NAME, and after it /ready, "
            "/infer, /config, /stats; write / in a name as %2F"
        )
    return name, version, rest[0] if rest else ""


async def answer_of_model(
    service: Service, parts: list[str], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers a request. parts: of the path, after `/v2/models`. Raises: RequestError; Disconnected."""
    name, version, action = named(parts)
    if scope["method"] != _ACTIONS[action] and not (_ACTIONS[action] == "GET" and scope["method"] == "HEAD"):
        raise WrongMethod(f"{scope['method']} is not the method of this path; it takes {_ACTIONS[action]}")
    if action == "infer":
        await answer_inference(service, name, version, scope, receive, send)
        return
    model = service.catalog.find(name, version)
    if action == "ready":
        await send_document(send, {"name": name, "ready": service.ready}, 200 if service.ready else 503)
    elif action == "stats":
        await send_document(send, {"model_stats": [model_statistics(service, model)]})
    else:
        await send_document(send, model_config(model) if action == "config" else model_metadata(model))
