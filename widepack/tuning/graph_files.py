"""Puts the ONNX graphs of members into an artifact whose plans name ONNX Runtime.

A load that may trust the artifact then needs neither onnx nor onnxscript.
"""

from __future__ import annotations

from os import PathLike

from widepack_artifacts.file_list import ONNX, graph_stem
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

from ..backends.onnx_graphs import graph_in
from ..inference.load import load

_BACKEND = "onnxruntime"


def publish_graphs(path: str | PathLike[str], digest: str) -> str:
    """Adds the graphs of the programs that the artifact's plans run on ONNX Runtime.

    They are in the user's cache, as the plans were measured. digest: that the artifact must have. Returns:
    the new digest; the same if there is nothing to add. Raises: ArtifactError.
    """
    reader = Reader(path, digest)
    named = {
        (name, w.pattern)
        for name, e in reader.manifest.entries.items()
        for w in e.wide
        if w.plan.get("backend") == _BACKEND
    }
    if not named:
        return digest
    ens = load(path, device="cpu", expect=digest, warmup=False)
    found: dict[str, bytes] = {}
    for name, pattern in sorted(named):
        for bound in ens.entry(name).programs.of(pattern):
            if bound.backend == _BACKEND and bound.place is not None:
                found.update(graph_in(bound.place))
    if not found:
        return digest
    with Writer(path, force=True) as writer:
        reader = Reader(path, digest)
        writer.keep(reader.manifest.files)
        for content, data in found.items():
            writer.file(graph_stem(content), ONNX, data)
        return writer.publish(reader.manifest).digest
