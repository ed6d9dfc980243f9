"""A program of an artifact as an ONNX file for ONNX Runtime, or for whatever else reads ONNX (the extra `onnx`).

1. Inputs and outputs have the manifest's names, and named dims keep theirs. A lone output without a name is `output`; one that has an input's name gets `_new`
   behind it; a Ragged one is N outputs, `name@0` to `name@N-1`. Shared outputs are expanded to `[N, ...]`. States are inputs and outputs like all others.
2. Weights `inside`: what the weight prologue makes is written in the place of what it is made from, under the name of the node that makes it; all else has its name in
   the artifact. What is larger than a protobuf message may be goes into one more file beside the model, named by its content.
3. Weights `beside`: every initialiser points into the artifact's weights files; what is made from weights is made by nodes, which ONNX Runtime folds when it opens the model.
   ONNX takes relative paths into the model's own folder and below alone: the model stands in a folder that holds the artifact, or in the artifact's own.
4. ONNX cannot check a call: bounds and conditions stand in the model's metadata and in its description.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..system import atomic_file as single
from ..backends.flat import MOST_NODES, Flat, flatten, nodes_unrolled
from ..backends.onnx_model import OnnxModel, in_order, onnx_model, session, where_mapped
from ..backends.task import first_line
from ..errors import LoweringError, UsageError, WidepackError
from .subject import Run, Subject
from ..kernels.packed import decompose
from ..ir.fake_values import CPU
from ..runtime.graph_module import Executable
from ..version import __version__

OPSETS = range(18, 24)
"""Those that torch's exporter writes."""
OPSET = 20
"""torch's own default: GELU and grids of three dims are ops of their own from there on. ONNX Runtime reads it from 1.17 on."""
INSIDE_BYTES = 2_000_000_000
"""Of weights inside the model's own file: a protobuf message ends at 2 GiB."""
_PIECE = 16 * 2**20


@dataclass
class WrittenOnnx:
    """inputs, outputs: names and types, as the file has them. made: the initialisers that the prologue made. beside: files that belong to the model.
    order, booleans: as `session` takes them."""

    opset: int
    inputs: list[str]
    outputs: list[str]
    initializers: int
    made: int
    beside: list[Path] = field(default_factory=list)
    fresh: list[Path] = field(default_factory=list)  # those of them that were not there before
    order: list[int] = field(default_factory=list)
    booleans: list[bool] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)  # by the input's name the output that holds its new value
    lists: list[int] = field(default_factory=list)  # of each of the program's outputs: how many the model has, 0 for a single one


def needed() -> None:
    """Raises: UsageError where what writes ONNX is not installed."""
    for package in ("onnx", "onnxscript", "onnx_ir"):
        try:
            __import__(package)
        except ImportError as e:
            raise UsageError(f"writing ONNX needs the packages onnx and onnxscript ({e}): pip install 'widepack[onnx]'") from e


def location(root: Path, out: Path) -> str:
    """Where the artifact is, seen from the model's folder. Raises: UsageError where ONNX has no way to say it."""
    folder = os.path.realpath(out.parent)
    found = os.path.relpath(os.path.realpath(root), folder)
    if found.split(os.sep)[0] == os.pardir:
        raise UsageError(
            f"{out}: an ONNX model points at files in its own folder or below it alone, and {root} is not there; write the model into "
            f"{Path(os.path.realpath(root)).parent} or a folder above, or with its weights inside (weights='inside', --self-contained)"
        )
    return "" if found == os.curdir else f"{Path(found).as_posix()}/"


def write(subject: Subject, path: Path, out: Path, weights: str, opset: int) -> WrittenOnnx:
    """Write the file. path: where it is written. out: where it will stand, in the same folder.

    Raises: LoweringError for what ONNX, or torch's exporter, cannot say; UsageError.
    """
    program = decompose(subject.program)
    if (many := nodes_unrolled(program)) > MOST_NODES:
        raise LoweringError(
            f"{subject.said} has {many:,} nodes with its loops written out, and ONNX is written of up to {MOST_NODES:,}; export fewer members (members=[...]), or one (member=...)"
        )
    run = Executable(program, subject.values, CPU, prologue=weights == "inside")
    flat = in_order(flatten(run.main, run.given, "onnx", subject.said))
    if odd := next((i for i in subject.entry.inputs if i.type.startswith("complex")), None):
        raise LoweringError(f"{subject.said} takes {odd.name}={odd.type}, and ONNX Runtime has no complex numbers")
    try:
        made = onnx_model(flat, CPU, subject.dims, subject.example, subject.said, opset)
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.said} cannot be written as ONNX by torch {torch.__version__}: {type(e).__name__}: {first_line(_innermost(e))}"
        ) from e
    got = made.model.opset_imports.get("")
    if got != opset:
        raise LoweringError(f"{subject.said} needs ONNX opset {got}, and {opset} was asked for; torch {torch.__version__} cannot convert it")
    written = _named(subject, flat, made, weights)
    written.opset = opset
    _describe(subject, made.model, weights, written.states)
    try:
        if weights == "beside":
            _point(subject, flat, made, location(subject.held.reader.root, out))
        else:
            _put_in(flat, made, out, written)
        import onnx
        import onnx_ir

        onnx_ir.save(made.model, path)
        onnx.checker.check_model(str(path))
    except BaseException as e:
        discard(written)
        if isinstance(e, (WidepackError, OSError)) or not isinstance(e, Exception):
            raise
        raise LoweringError(f"{subject.said}: what was written is no sound ONNX model: {type(e).__name__}: {first_line(e)}; please report it") from e
    return written


def discard(written: WrittenOnnx) -> None:
    """Remove the files beside a model that is not kept."""
    for path in written.fresh:
        path.unlink(missing_ok=True)


def hold(subject: Subject, path: Path, written: WrittenOnnx) -> str:
    """Hold the file in ONNX Runtime to the artifact. Gives what was tried, in words, or that nothing was. Raises: VerificationError, LoweringError."""
    try:
        import onnxruntime

        version = metadata.version("onnxruntime")
    except (ImportError, metadata.PackageNotFoundError):
        return "not checked: onnxruntime is not installed (pip install 'widepack[onnx]')"
    try:
        flat_run = session(path, written.order, written.booleans, {}, onnxruntime)
        tried = subject.hold(_grouped(flat_run, written), f"{subject.said}, written as ONNX,")
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(f"{subject.said}: ONNX Runtime {version} does not run what was written: {type(e).__name__}: {first_line(e)}") from e
    return f"ONNX Runtime {version}: {'; '.join(tried)}" if tried else "not checked: the artifact has no probe, and no sizes to try"


def _grouped(run: Any, written: WrittenOnnx) -> Run:
    def grouped(inputs: Sequence[torch.Tensor]) -> list[Any]:
        found = iter(run(inputs))
        return [[next(found) for _ in range(many)] if many else next(found) for many in written.lists]

    return grouped


def _innermost(e: BaseException) -> Any:
    """What torch's exporter stumbled over: its own errors say at which stage alone."""
    while e.__cause__ is not None:
        e = e.__cause__
    return e


# ---------------------------------------------------------------- names


def _named(subject: Subject, flat: Flat, made: OnnxModel, weights: str) -> WrittenOnnx:
    """Give inputs, outputs and weights their names, each output a value of its own, and Shared ones the member axis."""
    import onnx_ir

    graph = made.model.graph
    groups = flat.outputs(list(graph.outputs))
    taken = {id(v) for v in graph.inputs} | {id(w.value) for w in made.weights} | {id(v) for v in graph.initializers.values()}
    wishes: list[tuple[Any, str]] = [(v, subject.entry.inputs[n].name) for v, n in zip(graph.inputs, made.inputs)]
    names_in = {name for _, name in wishes}
    comes_back = {s.output: subject.entry.inputs[s.input].name for s in subject.entry.state}
    outputs: list[Any] = []
    lists: list[int] = []
    for k, (group, output) in enumerate(zip(groups, subject.program.outputs, strict=True)):
        stem = subject.entry.outputs[k].name or comes_back.get(k, "output")
        stem = f"{stem}_new" if stem in names_in else stem
        parts = list(group) if isinstance(group, (list, tuple)) else [group]
        lists.append(len(parts) if isinstance(group, (list, tuple)) else 0)
        for i, value in enumerate(parts):
            if not isinstance(value, onnx_ir.Value):
                raise LoweringError(f"{subject.said} has an output that is no tensor ({stem}), which ONNX cannot say")
            if output.kind == "shared" and subject.members:
                value = _expanded(graph, value, subject.members)
            elif id(value) in taken:
                value = _another(graph, value, "Identity", [value], value.shape)
            taken.add(id(value))
            outputs.append(value)
            wishes.append((value, f"{stem}@{i}" if lists[-1] else stem))
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    slots, known = flat.program.weights, _in_the_artifact(subject)
    sources = {w.number: slots[w.number].source or known.get(_memory(flat.weights[w.number]), "") for w in made.weights}
    wishes += [(w.value, sources[w.number] or slots[w.number].name) for w in made.weights]
    names: set[str] = set()
    final: list[tuple[Any, str]] = []
    for value, wish in wishes:
        while wish in names:
            wish += "_"
        names.add(wish)
        final.append((value, wish))
    own = {id(v) for v, _ in final}
    for value in [*graph.initializers.values(), *(v for n in _nodes(graph) for v in n.outputs)]:
        if id(value) not in own and value.name in names:
            while value.name in names:
                value.name += "_"
            names.add(value.name)
    for i, (value, _) in enumerate(final):
        value.name = f"widepack.{i}"  # so that no name is that of two values on the way
    for value, name in final:
        value.name = name
    ours = {n: v.name for v, n in zip(graph.inputs, made.inputs)}
    first = [sum(n or 1 for n in lists[:k]) for k in range(len(lists))]
    return WrittenOnnx(
        opset=0,
        inputs=[f"{v.name}={_type(v)}" for v in graph.inputs],
        outputs=[f"{v.name}={_type(v)}" for v in outputs],
        initializers=len(made.weights),
        made=sum(not source for source in sources.values()),
        order=list(made.inputs),
        booleans=[v.dtype == onnx_ir.DataType.BOOL for v in outputs],
        lists=lists,
        states={ours[s.input]: str(outputs[first[s.output]].name) for s in subject.entry.state if s.input in ours},
    )


def _in_the_artifact(subject: Subject) -> dict[tuple[int, int], str]:
    """The names of the artifact's weights by their memory: what the prologue only turned or reshaped is still the weight that it was."""
    values = [(name, v) for name, v in subject.values.items() if isinstance(v, torch.Tensor)]
    return {_memory(v): name for name, v in values if v.numel()}


def _memory(weight: torch.Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight.numel() * weight.element_size()


def _nodes(graph: Any) -> Iterator[Any]:
    import onnx_ir

    return iter(onnx_ir.traversal.RecursiveGraphIterator(graph))


def _another(graph: Any, value: Any, op: str, inputs: list[Any], shape: Any) -> Any:
    """A new value, made by one more node at the end. value: of its type."""
    import onnx_ir

    node = onnx_ir.node(op, inputs)
    (made,) = node.outputs
    made.name, made.dtype, made.shape = f"{value.name}__{op.lower()}{len(graph)}", value.dtype, shape
    graph.append(node)
    return made


def _expanded(graph: Any, value: Any, members: int) -> Any:
    """A Shared value `[...]` as `[N, ...]`."""
    import onnx_ir

    rank = len(value.shape)
    sizes = onnx_ir.Value(name=f"{value.name}__members{len(graph)}", const_value=onnx_ir.tensor([members, *[1] * rank], dtype=onnx_ir.DataType.INT64))
    sizes.shape, sizes.dtype = onnx_ir.Shape([1 + rank]), onnx_ir.DataType.INT64
    graph.initializers[sizes.name] = sizes
    return _another(graph, value, "Expand", [value, sizes], onnx_ir.Shape([members, *value.shape]))


_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def _type(value: Any) -> str:
    """`float32[B,3,32]`, as specs are written."""
    name = _NAMES.get(value.dtype.name, value.dtype.name.lower())
    sizes = ("?" if (size := getattr(d, "value", d)) is None else str(size) for d in value.shape or ())
    return f"{name}[{','.join(sizes)}]"


def _describe(subject: Subject, model: Any, weights: str, states: dict[str, str]) -> None:
    """Say in the file what it is, and drop what torch's exporter says of it: places of files of whoever built it."""
    import onnx_ir.passes.common as passes

    passes.ClearMetadataAndDocStringPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    model.graph.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in _nodes(model.graph) for v in n.outputs)]:
        value.metadata_props.clear()
    manifest, unchecked = subject.held.manifest, subject.unchecked()
    model.graph.name = subject.name
    model.producer_name, model.producer_version = "widepack", __version__
    whose = f"member {subject.model.members[0]}" if subject.single else f"{subject.members} members, pattern {subject.pattern}: outputs [N, ...]"
    holds = f"; holds where {', '.join(unchecked)}, which ONNX does not check" if unchecked else ""
    model.doc_string = f"widepack: entry {subject.name} of {whose}{holds}"
    model.metadata_props.update(
        {
            "widepack.version": __version__,
            "widepack.artifact": manifest.digest,
            "widepack.entry": subject.name,
            "widepack.pattern": "" if subject.single else subject.pattern,
            "widepack.checkpoints.alignment": json.dumps(list(subject.model.members), ensure_ascii=False),
            "widepack.weights": weights,
            "widepack.states": json.dumps(states, ensure_ascii=False),
            "widepack.holds_where": "; ".join(unchecked),
        }
    )


# ---------------------------------------------------------------- weights


def _point(subject: Subject, flat: Flat, made: OnnxModel, at: str) -> None:
    """Every weight points into the artifact's files. Raises: LoweringError for one that is in none as it is."""
    import onnx_ir

    located = subject.held.located()
    for w in made.weights:
        weight = flat.weights[w.number]
        size = weight.numel() * weight.element_size()
        if not size:
            made.give(w, _tensor(weight, w.value.name))
            continue
        found = where_mapped(weight, located)
        if found is None:
            raise LoweringError(
                f"{subject.said}: the weight {w.value.name} does not lie in the artifact's files in one piece, as it does for all members or a single one; "
                "write its weights inside (weights='inside', --self-contained)"
            )
        made.give(w, onnx_ir.ExternalTensor(f"{at}{found[0]}", found[1], size, w.dtype, shape=w.shape, name=w.value.name, base_dir=""))


def _put_in(flat: Flat, made: OnnxModel, out: Path, written: WrittenOnnx) -> None:
    """Weights inside the model, or where they are too large for it in one file beside."""
    weights = {w.number: flat.weights[w.number].detach().contiguous() for w in made.weights}
    if sum(w.numel() * w.element_size() for w in weights.values()) <= INSIDE_BYTES:
        for w in made.weights:
            made.give(w, _tensor(weights[w.number], w.value.name))
        return
    import onnx_ir

    offsets: dict[int, tuple[int, int]] = {}
    seen = hashlib.sha256()
    with single.temporary(out, ".data") as temporary:
        with open(temporary, "wb") as file:
            for number, weight in weights.items():
                gap = memoryview(bytes(-file.tell() % 64))
                offsets[number] = file.tell() + len(gap), weight.numel() * weight.element_size()
                for part in (gap, *_bytes(weight)):
                    seen.update(part)
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())
        data_file = out.parent / f"{out.name}.{seen.hexdigest()[:16]}.data"
        written.beside.append(data_file)
        if not data_file.exists():
            written.fresh.append(data_file)
        os.replace(temporary, data_file)
    for w in made.weights:
        offset, size = offsets[w.number]
        made.give(w, onnx_ir.ExternalTensor(data_file.name, offset, size, w.dtype, shape=w.shape, name=w.value.name, base_dir=""))


def _bytes(weight: torch.Tensor) -> Iterator[memoryview]:
    """A contiguous tensor's memory, in pieces; they are valid while the tensor lives."""
    size = weight.numel() * weight.element_size()
    for start in range(0, size, _PIECE):
        yield memoryview((ctypes.c_char * min(_PIECE, size - start)).from_address(weight.data_ptr() + start)).cast("B")


def _tensor(weight: torch.Tensor, name: str) -> Any:
    from onnx_ir.tensor_adapters import TorchTensor

    return TorchTensor(weight, name=name)
