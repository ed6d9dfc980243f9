"""Serves an artifact in replicas with Ray Serve: `serve run ray_serve:build artifact=ens.wide replicas=2`.

Each replica loads the artifact and answers the Open Inference Protocol, as `widepack serve` does.
Needs `pip install "widepack[serve]" "ray[serve]"`.
"""

from os.path import abspath
from typing import Any

from ray import serve
from ray.serve import Application


def build(options: dict[str, str]) -> Application:
    """Returns the application. options: `artifact`, and `replicas` (default 1)."""
    artifact = abspath(options["artifact"])

    def app() -> Any:
        import widepack_serve  # in the replica

        return widepack_serve.app(artifact)

    replicas = int(options.get("replicas", "1"))
    return serve.deployment(serve.ingress(app)(), num_replicas=replicas).bind()
