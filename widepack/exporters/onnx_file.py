"""Writes a program of an artifact as an ONNX file, and checks it in ONNX Runtime. It needs the extra `onnx`.

1. `onnx_names.py` names inputs, outputs and weights as the manifest does.
2. `onnx_metadata.py` writes what ONNX cannot check (bounds and conditions) into the model's metadata.
3. `onnx_weights.py` stores the weights. With weights `inside`, the weight prologue has run, and derived
   weights are written in place of what they are computed from. With weights `beside`, every initializer
   points into the artifact's weights files; nodes compute derived weights, and ONNX Runtime folds them when
   it opens the model.

ONNX takes only relative paths into the model's own folder and below. So a model with weights `beside` must be
in the artifact's folder, or in a folder that contains the artifact.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..backends.flat import MOST_NODES, Flat, flatten, nodes_unrolled
from ..backends.onnx_model import OnnxModel, in_order, onnx_model, session
from ..backends.task import first_cause, first_line
from ..errors import LoweringError, UsageError, WidepackError
from ..ir.fake_values import CPU
from ..kernels.decompose import decompose
from ..runtime.executable import Executable
from .onnx_metadata import describe
from .onnx_names import name_values
from .onnx_weights import point_into_artifact, store_weights
from .subject import ExportSubject, Run
from .written_onnx import WrittenOnnx

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
    describe(subject, translated.model, weights, written.states)
    try:
        if weights == "beside":
            folder = artifact_location(subject.artifact.reader.root, out)
            point_into_artifact(subject, flat, translated, folder)
        else:
            store_weights(flat, translated, out, written)
        import onnx
        import onnx_ir

        onnx_ir.save(translated.model, path)
        onnx.checker.check_model(str(path))
    except BaseException as e:
        written.discard()
        if isinstance(e, (WidepackError, OSError)) or not isinstance(e, Exception):
            raise
        raise LoweringError(
            f"{subject.title}: the ONNX checker refuses the model that was written: {type(e).__name__}: "
            f"{first_line(e)}; please report it"
        ) from e
    return written


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
    try:
        translated = onnx_model(flat, CPU, subject.dims, subject.example, subject.title, opset)
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.title} cannot be written as ONNX by torch {torch.__version__}: {first_cause(e)}"
        ) from e
    needed = translated.model.opset_imports.get("")
    if needed != opset:
        raise LoweringError(
            f"{subject.title} needs ONNX opset {needed}, but opset {opset} was requested; "
            f"torch {torch.__version__} cannot convert it"
        )
    return translated


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
    try:
        flat_run = session(path, written.input_numbers, written.booleans, {}, onnxruntime)
        compared = subject.compare(_grouped(flat_run, written), f"{subject.title}, written as ONNX,")
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.title}: ONNX Runtime {version} does not run the file that was written: "
            f"{type(e).__name__}: {first_line(e)}"
        ) from e
    if not compared:
        return "not checked: the artifact has no probe, and no other sizes to try"
    return f"ONNX Runtime {version}: {'; '.join(compared)}"


def _grouped(run: Any, written: WrittenOnnx) -> Run:
    """Returns a function that joins the outputs of the session to the program's outputs."""

    def grouped(inputs: Sequence[torch.Tensor]) -> list[Any]:
        outputs = iter(run(inputs))
        return [
            [next(outputs) for _ in range(length)] if length else next(outputs)
            for length in written.list_lengths
        ]

    return grouped
