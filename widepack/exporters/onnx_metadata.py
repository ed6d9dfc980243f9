"""Writes an ONNX model's metadata: the artifact, the entry, the members, and unchecked conditions.

ONNX cannot check a call. So bounds of dims and conditions on sizes are in the metadata, for readers.
"""

from __future__ import annotations

import json
from typing import Any

from ..version import __version__
from .onnx_names import node_outputs
from .subject import ExportSubject


def describe(subject: ExportSubject, model: Any, weights: str, states: dict[str, str]) -> None:
    """Writes the metadata of a model of onnx_ir.

    It removes the metadata of torch's exporter, which has paths of the machine that runs the export.
    """
    import onnx_ir.passes.common as passes

    passes.ClearMetadataAndDocStringPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    model.graph.metadata_props.clear()
    graph = model.graph
    for value in [*graph.inputs, *graph.initializers.values(), *node_outputs(graph)]:
        value.metadata_props.clear()
    manifest, unchecked = subject.artifact.manifest, subject.unchecked()
    graph.name = subject.name
    model.producer_name, model.producer_version = "widepack", __version__
    members = (
        f"member {subject.model.members[0]}"
        if subject.single
        else f"{subject.members} members, pattern {subject.pattern}: outputs [N, ...]"
    )
    conditions = f"; valid where {', '.join(unchecked)}, which ONNX does not check" if unchecked else ""
    model.doc_string = f"widepack: entry {subject.name} of {members}{conditions}"
    model.metadata_props.update(
        {
            "widepack.version": __version__,
            "widepack.artifact": manifest.digest,
            "widepack.entry": subject.name,
            "widepack.pattern": "" if subject.single else subject.pattern,
            "widepack.members": json.dumps(list(subject.model.members), ensure_ascii=False),
            "widepack.weights": weights,
            "widepack.states": json.dumps(states, ensure_ascii=False),
            "widepack.holds_where": "; ".join(unchecked),
        }
    )
