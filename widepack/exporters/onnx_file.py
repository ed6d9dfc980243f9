"""Writes a program of an artifact as an ONNX file, and checks it in ONNX Runtime. It needs the extra `onnx`.

1. Inputs and outputs have the manifest's names. A single output without a name is `output`. An output that
   has the name of an input gets the suffix `_new`. A Ragged output is N outputs, `name@0` to `name@N-1`. A
   Shared output is expanded to `[N, ...]`. States are inputs and outputs like all others. A weight has its
   name in the artifact; a derived weight has the name of the node that computes it.
2. The model's metadata have what ONNX cannot check (bounds and conditions).
3. With weights `inside`, the weight prologue has run, and derived weights are written in place of what they
   are computed from. Weights that are larger than a protobuf message may be are in one more file beside the
   model, which is named by its content.
4. With weights `beside`, every initializer points into the artifact's weights files; nodes compute derived
   weights, and ONNX Runtime folds them when it opens the model.

ONNX takes only relative paths into the model's own folder and below. So a model with weights `beside` must be
in the artifact's folder, or in a folder that contains the artifact.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..backends.flat import MOST_NODES, Flat, flatten, in_order, nodes_unrolled
from ..backends.onnx_model import OnnxModel, external_tensor, onnx_model, where_mapped
from ..backends.onnx_rewrites import constant
from ..backends.onnx_session import options, session
from ..backends.task import first_cause, first_line
from ..errors import LoweringError, UsageError
from ..ir.fake_values import CPU
from ..ir.tensor_type import TensorType
from ..kernels.decompose import decompose
from ..runtime.executable import Executable
from ..system import atomic_file
from ..version import __version__
from .subject import ExportSubject, Written, lowering_error

OPSETS = range(18, 24)
"""The opsets that torch's exporter writes."""
OPSET = 20
"""torch's default. It has single ops for GELU and grids of three dims. ONNX Runtime reads it from 1.17 on."""
INSIDE_BYTES = 2_000_000_000
"""The most bytes of weights in the model's own file: a protobuf message ends at 2 GiB."""
_CHUNK_BYTES = 16 * 2**20
_ALIGNMENT = 64
_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}

Named = tuple[Any, str]
"""A value of onnx_ir, and the name that it gets."""


@dataclass(kw_only=True)
class WrittenOnnx(Written):
    """An ONNX model that was written.

    input_numbers: for each input of the model, its number in the program. booleans: which outputs are
    boolean. list_lengths: for each output of the program, how many outputs the model has; 0 for a single
    tensor. states: the output with the new value, by the input's name.
    """

    input_numbers: list[int]
    booleans: list[bool]
    list_lengths: list[int]
    states: dict[str, str]


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
    written = _name_values(subject, flat, translated)
    _describe(subject, translated.model, weights, written.states)
    try:
        with lowering_error(
            f"{subject.title}: the ONNX checker refuses the model that was written", _to_report
        ):
            if weights == "beside":
                folder = artifact_location(subject.artifact.reader.root, out)
                _point_into_artifact(subject, flat, translated, folder)
            else:
                _store_weights(flat, translated, out, written)
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
    for value in [*graph.inputs, *graph.initializers.values(), *_node_outputs(graph)]:
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


def _name_values(subject: ExportSubject, flat: Flat, translated: OnnxModel) -> WrittenOnnx:
    """Names a model's values. Each output becomes a separate value, and Shared outputs get the member axis.

    Raises: LoweringError for an output that is not a tensor.
    """
    import onnx_ir

    graph = translated.model.graph
    inputs = [(v, subject.entry.inputs[n].name) for v, n in zip(graph.inputs, translated.inputs)]
    outputs, list_lengths = _output_names(subject, flat, translated, {name for _, name in inputs})
    graph.outputs.clear()
    graph.outputs.extend(value for value, _ in outputs)
    slots, sources = flat.program.weights, _weight_sources(subject, flat, translated)
    weights = [(w.value, sources[w.number] or slots[w.number].name) for w in translated.weights]
    _rename(graph, [*inputs, *outputs, *weights])
    values = [value for value, _ in outputs]
    final_inputs = {n: v.name for v, n in zip(graph.inputs, translated.inputs)}
    first = [sum(n or 1 for n in list_lengths[:k]) for k in range(len(list_lengths))]
    return WrittenOnnx(
        opset=translated.model.opset_imports[""],
        inputs=[f"{v.name}={_type(v)}" for v in graph.inputs],
        outputs=[f"{v.name}={_type(v)}" for v in values],
        initializers=len(translated.weights),
        derived=sum(not source for source in sources.values()),
        input_numbers=list(translated.inputs),
        booleans=[v.dtype == onnx_ir.DataType.BOOL for v in values],
        list_lengths=list_lengths,
        states={
            final_inputs[s.input]: str(values[first[s.output]].name)
            for s in subject.entry.state
            if s.input in final_inputs
        },
    )


def _output_names(
    subject: ExportSubject, flat: Flat, translated: OnnxModel, input_names: set[str]
) -> tuple[list[Named], list[int]]:
    """Returns the model's outputs with their names, and how many of them each output of the program has (0: a
    single tensor). Raises: LoweringError for an output that is not a tensor.
    """
    import onnx_ir

    graph = translated.model.graph
    used = {id(v) for v in graph.inputs} | {id(w.value) for w in translated.weights}
    used |= {id(v) for v in graph.initializers.values()}
    state_names = {s.output: subject.entry.inputs[s.input].name for s in subject.entry.state}
    outputs: list[Named] = []
    list_lengths: list[int] = []
    groups = flat.outputs(list(graph.outputs))
    for k, (group, output) in enumerate(zip(groups, subject.program.outputs, strict=True)):
        name = subject.entry.outputs[k].name or state_names.get(k, "output")
        name = f"{name}_new" if name in input_names else name
        is_list = isinstance(group, (list, tuple))
        parts = list(group) if is_list else [group]
        list_lengths.append(len(parts) if is_list else 0)
        for i, value in enumerate(parts):
            if not isinstance(value, onnx_ir.Value):
                raise LoweringError(
                    f"{subject.title}: output {name} is not a tensor, which an ONNX model cannot have"
                )
            if output.kind == "shared" and subject.members:
                value = _expand(graph, value, subject.members)
            elif id(value) in used:
                value = _append_node(graph, value, "Identity", [value], value.shape)
            used.add(id(value))
            outputs.append((value, f"{name}@{i}" if list_lengths[-1] else name))
    return outputs, list_lengths


def _weight_sources(subject: ExportSubject, flat: Flat, translated: OnnxModel) -> dict[int, str]:
    """Returns the artifact's name of each weight by its number: "" for one that the prologue computed.

    Weights are also recognized by their memory, because a view of a weight is still this weight.
    """
    named = [(name, v) for name, v in subject.values.items() if isinstance(v, torch.Tensor)]
    by_memory = {_memory(v): name for name, v in named if v.numel()}
    slots = flat.program.weights
    return {
        w.number: slots[w.number].source or by_memory.get(_memory(flat.weights[w.number]), "")
        for w in translated.weights
    }


def _memory(weight: torch.Tensor) -> tuple[int, int]:
    """Returns the address and the size of a tensor in bytes."""
    return weight.data_ptr(), weight.numel() * weight.element_size()


def _rename(graph: Any, wishes: Sequence[Named]) -> None:
    """Gives values their names. A name that an earlier value has gets `_` behind it, and so do the names of
    all other values of the graph.
    """
    names: set[str] = set()
    final: list[Named] = []
    for value, name in wishes:
        while name in names:
            name += "_"
        names.add(name)
        final.append((value, name))
    renamed = {id(v) for v, _ in final}
    for value in [*graph.initializers.values(), *_node_outputs(graph)]:
        if id(value) not in renamed and value.name in names:
            while value.name in names:
                value.name += "_"
            names.add(value.name)
    for i, (value, _) in enumerate(final):
        value.name = f"widepack.{i}"  # two values must not share a name at any time
    for value, name in final:
        value.name = name


def _node_outputs(graph: Any) -> Iterator[Any]:
    """Yields the values that nodes compute, in subgraphs too."""
    import onnx_ir

    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        yield from node.outputs


def _append_node(graph: Any, value: Any, op: str, inputs: list[Any], shape: Any) -> Any:
    """Appends a node to the graph and returns its output, a new value of `value`'s dtype."""
    import onnx_ir

    node = onnx_ir.node(op, inputs)
    (output,) = node.outputs
    output.name, output.dtype, output.shape = f"{value.name}__{op.lower()}{len(graph)}", value.dtype, shape
    graph.append(node)
    return output


def _expand(graph: Any, value: Any, members: int) -> Any:
    """Expands a Shared value `[...]` to `[N, ...]`."""
    import onnx_ir

    sizes = constant(graph, f"{value.name}__members{len(graph)}", [members, *(1 for _ in value.shape)])
    return _append_node(graph, value, "Expand", [value, sizes], onnx_ir.Shape([members, *value.shape]))


def _type(value: Any) -> str:
    """Returns a value's dtype and shape in the form of input specs: `float32[B,3,32]`."""
    name = _NAMES.get(value.dtype.name, value.dtype.name.lower())
    sizes = ("?" if (size := getattr(d, "value", d)) is None else str(size) for d in value.shape or ())
    return str(TensorType(name, tuple(sizes)))


def _point_into_artifact(subject: ExportSubject, flat: Flat, translated: OnnxModel, folder: str) -> None:
    """Points every weight into the artifact's files.

    folder: of the artifact, as seen from the model's folder. Raises: LoweringError for a weight that is not
    in one piece in a file.
    """
    located = subject.artifact.weights.located()
    for initializer in translated.weights:
        weight = flat.weights[initializer.number]
        name = initializer.value.name
        size = weight.numel() * weight.element_size()
        if not size:
            translated.give(initializer, tensor_inside(weight, name))
            continue
        place = where_mapped(weight, located)
        if place is None:
            raise LoweringError(
                f"{subject.title}: the weight {name} is not in one piece in the artifact's files, "
                "as it is for all members or a single one; "
                "write its weights inside (weights='inside', --self-contained)"
            )
        file, offset = place
        translated.give(initializer, external_tensor(initializer, f"{folder}{file}", offset, size))


def _store_weights(flat: Flat, translated: OnnxModel, out: Path, written: Written) -> None:
    """Stores the weights inside the model. If they are too large for it, they go into one file beside it."""
    weights = {w.number: flat.weights[w.number].detach().contiguous() for w in translated.weights}
    if sum(w.numel() * w.element_size() for w in weights.values()) <= INSIDE_BYTES:
        for w in translated.weights:
            translated.give(w, tensor_inside(weights[w.number], w.value.name))
        return
    data_file, offsets = _write_data_file(weights, out, written)
    for w in translated.weights:
        translated.give(w, external_tensor(w, data_file.name, *offsets[w.number]))


def _write_data_file(
    weights: Mapping[int, torch.Tensor], out: Path, written: Written
) -> tuple[Path, dict[int, tuple[int, int]]]:
    """Writes weights into a file beside the model. Returns it, and each weight's offset and size in bytes."""
    offsets: dict[int, tuple[int, int]] = {}
    digest = hashlib.sha256()
    with atomic_file.temporary(out, ".data") as temporary:
        with open(temporary, "wb") as file:
            for number, weight in weights.items():
                padding = memoryview(bytes(-file.tell() % _ALIGNMENT))
                offsets[number] = file.tell() + len(padding), weight.numel() * weight.element_size()
                for part in (padding, *_chunks(weight)):
                    digest.update(part)
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())
        data_file = out.parent / f"{out.name}.{digest.hexdigest()[:16]}.data"
        written.data_files.append(data_file)
        if not data_file.exists():
            written.new_files.append(data_file)
        os.replace(temporary, data_file)
    return data_file, offsets


def _chunks(weight: torch.Tensor) -> Iterator[memoryview]:
    """Yields a contiguous tensor's memory in pieces. They are valid while the tensor exists."""
    size = weight.numel() * weight.element_size()
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        yield memoryview((ctypes.c_char * length).from_address(weight.data_ptr() + start)).cast("B")


def tensor_inside(weight: torch.Tensor, name: str) -> Any:
    """Returns a tensor of onnx_ir whose bytes are in the model's file."""
    from onnx_ir.tensor_adapters import TorchTensor

    return TorchTensor(weight, name=name)


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
        flat_run = session(path, written.booleans, {}, onnxruntime, options(onnxruntime))

        def run(inputs: Sequence[torch.Tensor]) -> list[Any]:
            outputs = iter(flat_run([inputs[i] for i in written.input_numbers]))
            lengths = written.list_lengths
            return [[next(outputs) for _ in range(n)] if n else next(outputs) for n in lengths]

        return subject.compare(run, "ONNX", f"ONNX Runtime {version}")
