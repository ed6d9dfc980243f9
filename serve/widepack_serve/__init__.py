"""Serves widepack artifacts over the Open Inference Protocol, version 2.

    widepack serve ens.wide

| in | out | start reading |
|---|---|---|
| artifacts and settings | an ASGI app, for uvicorn or another server | `rest/app.py` |
| requests | answers, batched over all members | `lifecycle/service.py`, `batching/batcher.py` |

Imports go down this list: `server`, `rest` and `rpc`, `lifecycle`, `metrics`, `batching`, `catalog`,
`protocol`, `settings`, `errors`. Only `rest` imports Starlette, and only `rpc` imports gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from widepack.inference.model import WideModel

__all__ = ["app"]


def app(
    artifacts: str | PathLike[str] | WideModel | Mapping[str, str | PathLike[str] | WideModel],
    *,
    outputs: Sequence[str] = (),
    **settings: Any,
) -> Starlette:
    """Returns an ASGI app that serves artifacts.

    Args:
        artifacts: The path of an artifact or a loaded model; or several, by their names on the wire. The
            name of a path is that of its folder, and the name of a loaded model is `ens`.
        outputs: The outputs of a model of all members if a client requests none, such as
            `logits.mean`.
        **settings: Fields of `widepack_serve.settings.Settings`, for example `max_batch=64`, `timeout=30`.

    Returns:
        An app for any ASGI server: `uvicorn.run(app)`, Ray's `serve.ingress(app)`.

    Raises:
        WidepackError: An artifact cannot be loaded or served, or a setting is wrong.

    Example:
        >>> import uvicorn
        >>> import widepack_serve
        >>> uvicorn.run(widepack_serve.app("ens.wide"), port=8080)
    """
    from widepack.inference.model import WideModel

    from .lifecycle.service import Service
    from .rest.app import ServeApp
    from .settings import Settings, named_artifacts

    given: dict[str, Any]
    if isinstance(artifacts, WideModel):
        given = {"ens": artifacts}
    elif isinstance(artifacts, Mapping):
        given = dict(artifacts)
    else:
        given = dict(named_artifacts([fspath(artifacts)]))
    paths = {n: fspath(a) for n, a in given.items() if isinstance(a, (str, PathLike))}
    models = {n: a for n, a in given.items() if n not in paths}
    return ServeApp(Service(Settings(paths, outputs=tuple(outputs), **settings), models))
