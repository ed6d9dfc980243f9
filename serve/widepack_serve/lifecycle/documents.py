"""Describes what a server serves and has done, for REST and gRPC: Triton's extensions `model_repository` and
`statistics`.
"""

from __future__ import annotations

from typing import Any

from ..catalog.served import ServedModel
from ..metrics import Statistics
from .service import Service


def repository_index(service: Service, *, ready: bool = False) -> list[dict[str, str]]:
    """Returns a row for each model, with its state. ready: whether only those that are ready."""
    if ready and not service.ready:
        return []
    state = "READY" if service.ready else "UNAVAILABLE"
    return [
        {"name": m.name, "version": m.artifact.version, "state": state, "reason": ""} for m in service.catalog
    ]


def model_statistics(service: Service, model: ServedModel) -> dict[str, Any]:
    """Returns what a model has done, in the form of the statistics extension; times in nanoseconds."""
    found = service.metrics.statistics.get(model.name, Statistics())

    def times(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": int(seconds * 1e9)}

    return {
        "name": model.name,
        "version": model.artifact.version,
        "last_inference": int(found.last * 1000),
        "inference_count": found.rows,
        "execution_count": found.executions,
        "inference_stats": {
            "success": times(found.successes, found.seconds),
            "fail": times(found.failures, 0.0),
            "queue": times(found.successes, found.queue_seconds),
        },
    }


def all_statistics(service: Service) -> list[dict[str, Any]]:
    """Returns what each model has done that had a request."""
    used = service.metrics.statistics
    return [model_statistics(service, m) for m in service.catalog if m.name in used]
