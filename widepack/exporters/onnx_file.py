"""Writes a program of an artifact as an ONNX file, and checks it in ONNX Runtime. It needs the extra `onnx`.

1. `onnx_names.py` names inputs, outputs and weights as the manifest does.
2. The model's metadata have what ONNX cannot check (bounds and conditions).
3. `onnx_weights.py` stores the weights. With weights `inside`, the weight prologue has run, and derived
   weights are written in place of what they are computed from. With weights `beside`, every initializer
   points into the artifact's weights files; nodes compute derived weights, and ONNX Runtime folds them when
   it opens the model.

ONNX takes only relative paths into the model's own folder and below. So a model with weights `beside` must be
in the artifact's folder, or in a folder that contains the artifact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..backends.flat import MOST_NODES, Flat, flatten, nodes_unrolled
from ..backends.onnx_model import OnnxModel, in_order, onnx_model, session
from ..backends.task import first_cause, first_line
from ..errors import LoweringError, UsageError
from ..ir.fake_values import CPU
from ..kernels.decompose import decompose
from ..runtime.executable import Executable
from ..version import __version__
from .onnx_names import WrittenOnnx, name_values, node_outputs
from .onnx_weights import point_into_artifact, store_weights
from .subject import ExportSubject, lowering_error

OPSETS = range(18, 24)
"""The opsets that torch's exporter writes."""
OPSET = 20
"""torch's default. It has single ops for GELU and grids of three dims. ONNX Runtime reads it from 1.17 on."""


def checked_opset(opset: int | None) -> int:
    """Returns the opset to write: the default for None. Raises: UsageError."""
    opset = OPSET if opset is None else opset
    if isinstance(opset, bool) or opset not in OPSETS:
        raise UsageError(
            f"opset={opset!r}: torch's exporter does not write it; give one of {OPSETS[0]} to {OPSETS[-1]}"
        )
    return opset


def require_packages() -> None:
    """Imports the packages that write ONNX. Raises: UsageError if one is not installed."""
    for package in ("onnx", "onnxscript", "onnx_ir"):
        try:
            __import__(package)
        except ImportError as e:
            raise UsageError(
                f"writing ONNX needs the packages onnx and onnxscript ({e}): pip install 'widepack[onnx]'"
            ) from e


def artifact_location(root: Path, out: Path) -> str:
    """Returns the artifact's folder relative to the model's folder, with a slash at the end.

    Raises: UsageError if the artifact is not below the model's folder.
    """
    relative = os.path.relpath(os.path.realpath(root), os.path.realpath(out.parent))
    if relative.split(os.sep)[0] == os.pardir:
        raise UsageError(
            f"{out}: an ONNX model can only refer to files in its own folder or below it, "
            f"and {root} is not there. Write the model into {Path(os.path.realpath(root)).parent} "
            "or a folder above, or with its weights inside (weights='inside', --self-contained)"
        )
    return "" if relative == os.curdir else f"{Path(relative).as_posix()}/"


def write(subject: ExportSubject, path: Path, out: Path, weights: str, opset: int) -> WrittenOnnx:
    """Writes the model to `path`. out: the file's final path, in the same folder.

    Raises: LoweringError for what ONNX, or torch's exporter, cannot express; UsageError.
    """
    flat = _flat_program(subject, prologue=weights == "inside")
    translated = _translate(subject, flat, opset)
    written = name_values(subject, flat, translated)
    _describe(subject, translated.model, weights, written.states)
    try:
        with lowering_error(
            f"{subject.title}: the ONNX checker refuses the model that was written", _to_report
        ):
            if weights == "beside":
                folder = artifact_location(subject.artifact.reader.root, out)
                point_into_artifact(subject, flat, translated, folder)
            else:
                store_weights(flat, translated, out, written)
            import onnx
            import onnx_ir

            onnx_ir.save(translated.model, path)
            onnx.checker.check_model(str(path))
    except BaseException:
        written.discard()
        raise
    return written


def _to_report(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}; please report it"


def _flat_program(subject: ExportSubject, prologue: bool) -> Flat:
    """Returns the program in ATen ops with its weights. prologue: whether to run the weight prologue now.

    Raises: LoweringError for a program that is too long, or has complex inputs.
    """
    program = decompose(subject.program)
    if (many := nodes_unrolled(program)) > MOST_NODES:
        raise LoweringError(
            f"{subject.title} has {many:,} nodes when its loops are unrolled; widepack writes "
            f"ONNX of at most {MOST_NODES:,} nodes. Export fewer members (members=[...]), or one (member=...)"
        )
    run = Executable(program, subject.values, CPU, prologue=prologue)
    flat = in_order(flatten(run.main, run.given, "onnx", subject.title))
    if unsupported := next((i for i in subject.entry.inputs if i.type.startswith("complex")), None):
        raise LoweringError(
            f"{subject.title} takes {unsupported.name}={unsupported.type}, and ONNX Runtime "
            "has no complex numbers"
        )
    return flat


def _translate(subject: ExportSubject, flat: Flat, opset: int) -> OnnxModel:
    """Translates the program with torch's exporter. Raises: LoweringError."""
    with lowering_error(
        f"{subject.title} cannot be written as ONNX by torch {torch.__version__}", first_cause
    ):
        translated = onnx_model(flat, CPU, subject.dims, subject.example, subject.title, opset)
    needed = translated.model.opset_imports.get("")
    if needed != opset:
        raise LoweringError(
            f"{subject.title} needs ONNX opset {needed}, but opset {opset} was requested; "
            f"torch {torch.__version__} cannot convert it"
        )
    return translated


def _describe(subject: ExportSubject, model: Any, weights: str, states: dict[str, str]) -> None:
    """Writes the metadata of a model of onnx_ir: the artifact, the entry, the members, and conditions.

    ONNX cannot check a call. So bounds of dims and conditions on sizes are in the metadata, for readers. The
    metadata of torch's exporter, which has paths of the machine that runs the export, is removed.
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


def check(subject: ExportSubject, path: Path, written: WrittenOnnx) -> str:
    """Runs the file in ONNX Runtime and compares its answers with the artifact's.

    Returns: what was compared, in words, or `not checked: ` and the reason. Raises: VerificationError,
    LoweringError.
    """
    try:
        import onnxruntime

        version = metadata.version("onnxruntime")
    except (ImportError, metadata.PackageNotFoundError):
        return "not checked: onnxruntime is not installed (pip install 'widepack[onnx]')"
    with lowering_error(f"{subject.title}: ONNX Runtime {version} does not run the file that was written"):
        flat_run = session(path, written.input_numbers, written.booleans, {}, onnxruntime)

        def run(inputs: Sequence[torch.Tensor]) -> list[Any]:
            outputs = iter(flat_run(inputs))
            lengths = written.list_lengths
            return [[next(outputs) for _ in range(n)] if n else next(outputs) for n in lengths]

        return subject.compare(run, "ONNX", f"ONNX Runtime {version}")
