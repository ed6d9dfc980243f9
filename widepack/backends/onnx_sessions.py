"""`onnxruntime`: an ONNX Runtime session for the main part of a wide program (the extra `onnx`).

1. The ONNX file is written once, into the cache, and holds no weights: a weight that is in the artifact as it is points into the weights file, by offset; one
   that the prologue makes points nowhere. The session is given all of them from memory, the mapped file's pages included, without a copy of its own file.
2. Inputs and outputs cross by DLPack, without a copy. Threads inside an op are torch's.
3. Named dims stay dynamic; before the file is kept, and again when a session is made by the artifact's probe, answers are held to the flat graph's.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils.dlpack import from_dlpack

from widepack_artifacts.program import Node, Ref, Slot

from ..compiled_cache import CompiledCache, default_folder
from ..errors import ArtifactError, LoweringError, WidepackError
from .flat import Flat, flatten
from .onnx_shapes import simplify_reshapes
from .task import Function, Mapped, Task, Unavailable, first_line, quiet, sizes_to_try, words
from .variants import Checked, Variant

NAME = "onnxruntime"
COPIES = True
MODEL = "program.onnx"
MADE = "made-by-the-prologue"  # the file of weights that are in no file
_FORM = 3


def bind(task: Task) -> Function:
    """Raises: Unavailable without the package, or without a file that may not be made now; LoweringError for what ONNX cannot say."""
    if task.device.type != "cpu":
        raise Unavailable(f"backend 'onnxruntime' runs on the cpu in this version, and the model is on {task.device}; load with backend='eager'")
    try:
        version = metadata.version("onnxruntime")
        import onnxruntime
    except (ImportError, metadata.PackageNotFoundError) as e:
        raise Unavailable(
            f"backend 'onnxruntime' needs the package onnxruntime ({e}): pip install 'widepack[onnx]', or load with backend='eager'"
        ) from e
    flat = flatten(task.program, task.weights, NAME, task.said)
    flat = in_order(flat)
    cache = CompiledCache(task.cache or default_folder())
    key = key_of(task, flat)
    found = cache.find(key)
    if found is None:
        if not task.compile:
            raise Unavailable(
                f"{task.said} has not been written as ONNX: {cache.folder} holds no file of torch {torch.__version__} for it, and loading never compiles unless it "
                "is asked to. `widepack compile ARTIFACT --backend onnxruntime` fills the cache, load(compile='now') does it here, and backend='eager' runs without"
            )
        found = cache.make(key, lambda folder: _write(task, flat, folder, onnxruntime))
    place, record = found
    try:
        run = _session(place / MODEL, record, flat, onnxruntime, task.workers)
    except Exception as e:
        raise ArtifactError(
            f"{place}: ONNX Runtime {version} does not take this file ({type(e).__name__}: {first_line(e)}); remove the folder and make it again: "
            "`widepack compile --backend onnxruntime`"
        ) from e
    least = {str(d): int(n) for d, n in record["least"].items()}
    return Checked(task.device, flat, [Variant(run, (), least)], task.eager, place)


def key_of(task: Task, flat: Flat) -> str:
    """All that the file hangs on; a session is of whatever processor loads it."""
    parts = {
        "form": _FORM,
        "backend": NAME,
        "program": task.content,
        "pattern": task.pattern,
        "weights": [[str(w.dtype), list(w.shape)] for w in flat.weights],
        "dims": {d: list(v) for d, v in task.dims.items()},
        "torch": [torch.__version__, torch.version.git_version],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- running


def _session(path: Path, record: Mapping[str, Any], flat: Flat, onnxruntime: Any, workers: int = 0) -> Any:
    """A session over the weights in memory: flat inputs -> flat outputs. workers: how many ops at once, each on a thread of its own; 0 for one, on all threads."""
    options = onnxruntime.SessionOptions()
    if workers > 1:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.intra_op_num_threads = 1 if workers > 1 else torch.get_num_threads()
    options.inter_op_num_threads = max(1, workers)
    # its threads wait for the next call asleep: in a loop they take the processors from torch's, and from other sessions'
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    value = onnxruntime.OrtValue.from_dlpack
    held = [value(flat.weights[i].detach()) for i in record["weights"]]
    options.add_external_initializers(list(record["names"]), held)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names, takes = [o.name for o in session.get_outputs()], [i.name for i in session.get_inputs()]
    numbers, booleans = list(record["inputs"]), list(record["booleans"])
    if len(names) != len(booleans) or len(takes) != len(numbers):
        raise ValueError("inputs and outputs are not those of the record")

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given = {name: value(inputs[i].detach()) for name, i in zip(takes, numbers)}
        found = [from_dlpack(v) for v in session.run_with_ort_values(names, given)]
        return [f.view(torch.bool) if b and f.dtype != torch.bool else f for f, b in zip(found, booleans)]

    run.keeps = held  # type: ignore[attr-defined]  # the session looks into their memory
    return run


# ---------------------------------------------------------------- writing


def _write(task: Task, flat: Flat, folder: Path, onnxruntime: Any) -> dict[str, Any]:
    """Write the ONNX file and hold a session of it to the flat graph. Gives the record. Raises: LoweringError."""
    if task.progress:
        task.progress(f"writing {task.said} as ONNX", 0, 1)
    try:
        record = _export(task, flat, folder / MODEL)
        run = _session(folder / MODEL, record, flat, onnxruntime)
    except WidepackError:
        raise
    except ImportError as e:
        raise Unavailable(
            f"writing ONNX needs the packages onnx and onnxscript ({e}): pip install 'widepack[onnx]', or load with backend='eager'"
        ) from e
    except Exception as e:
        raise LoweringError(
            f"{task.said} cannot be written as ONNX by torch {torch.__version__}, or not so that ONNX Runtime takes it: {type(e).__name__}: {first_line(e)}; "
            "load with backend='eager'"
        ) from e
    return {**record, "least": _agree(task, flat, run)}


def _agree(task: Task, flat: Flat, run: Any) -> dict[str, int]:
    """Hold a session to the flat graph. Gives the dims that it does not hold for at 1. Raises: LoweringError."""
    least: dict[str, int] = {}
    for sizes in sizes_to_try(task):
        try:
            inputs = [x.contiguous() for x in task.inputs(sizes)]
            with torch.inference_mode():
                want = task.eager(*inputs)
        except (RuntimeError, ValueError, IndexError):
            continue  # inputs that members do not take at these sizes
        try:
            with torch.inference_mode():
                wrong = task.differ(flat.outputs(run(inputs)), want)
        except Exception as e:  # noqa: BLE001  a session fails in its own ways
            wrong = f"is none: {type(e).__name__}: {first_line(e)}"
        ones = [d for d, s in sizes.items() if s == 1 and task.example[d] != 1]
        if wrong and not ones:
            raise LoweringError(
                f"{task.said}: ONNX Runtime's answer differs from the flat graph's at {words(sizes) or 'its sizes'}: {wrong}. It is not kept; load with backend='eager'"
            )
        least.update(dict.fromkeys(ones, 2) if wrong else {})
    return least


def _export(task: Task, flat: Flat, path: Path) -> dict[str, Any]:
    import onnx_ir
    import onnxscript.optimizer

    exported, booleans = _exported(task, flat)
    located = task.located()
    with warnings.catch_warnings(), quiet(), torch.no_grad():
        warnings.simplefilter("ignore")
        made: Any = torch.onnx.export(exported, dynamo=True, optimize=False, verbose=False, external_data=False)
    model = made.model
    takes = [v.name for v in model.graph.inputs]
    held = {name: v for name, v in model.graph.initializers.items() if name.startswith("w") and name[1:].isdecimal()}
    # Sizes are computed now, so that a session can fold what hangs on weights and sizes alone. Weights are inputs meanwhile: no value of one may get into the file,
    # which is for all artifacts of this program.
    kept = {name: v.const_value for name, v in held.items()}
    for name, value in held.items():
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
    onnxscript.optimizer.optimize(model)
    if simplify_reshapes(model):
        onnxscript.optimizer.remove_unused_nodes(model)  # a session runs what nothing reads
    for value in held.values():
        model.graph.inputs.remove(value)
    weights: list[int] = []
    names: list[str] = []
    for name, value in held.items():
        if not value.uses():
            continue
        number = int(name[1:])
        weight = flat.weights[number]
        file, offset = _place(weight, located)
        value.const_value = onnx_ir.ExternalTensor(
            file, offset, weight.numel() * weight.element_size(), kept[name].dtype, shape=kept[name].shape, name=name, base_dir=""
        )
        assert value.name is not None  # another one than before where the program gives the weight back as it is
        model.graph.initializers[value.name] = value
        weights.append(number)
        names.append(value.name)
    onnx_ir.save(model, path)
    return {"form": _FORM, "said": task.said, "weights": weights, "names": names, "inputs": [int(str(n)[1:]) for n in takes], "booleans": booleans}


def _place(weight: torch.Tensor, located: Sequence[Mapped]) -> tuple[str, int]:
    """The file and the offset of a weight that is part of a mapped tensor."""
    at, size = weight.data_ptr(), weight.numel() * weight.element_size()
    return next(((m.file, m.offset + at - m.at) for m in located if size and m.at <= at and at + size <= m.at + m.bytes), (MADE, 0))


def in_order(flat: Flat) -> Flat:
    """Weights in the order of their memory, as DLPack hands them over, and permuted by the program: a transposed view of a mapped weight stays that weight."""
    slots: list[Slot] = []
    nodes: list[Node] = []
    weights: list[torch.Tensor] = []
    for slot, weight in zip(flat.program.weights, flat.weights):
        if weight.is_contiguous():
            slots.append(slot)
            weights.append(weight)
            continue
        strides = list(weight.stride())
        order = sorted(range(weight.dim()), key=lambda d: (-strides[d], -weight.shape[d], d))
        slots.append(replace(slot, name=f"{slot.name}__in_order", source="", type=""))
        weights.append(weight.permute(order).contiguous())
        nodes.append(Node(slot.name, "aten.permute.default", (Ref(slots[-1].name), [order.index(d) for d in range(len(order))])))
    return Flat(replace(flat.program, weights=tuple(slots), nodes=(*nodes, *flat.program.nodes)), weights, flat.shape, flat.parts)


def _exported(task: Task, flat: Flat) -> tuple[ExportedProgram, list[bool]]:
    """The program as torch's exporters take it, put together from the nodes that are there; and which outputs are booleans."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    from ..replay import Fakes, replay
    from ..runtime import graph_module

    program = flat.program
    fakes = Fakes({d: max(2, s) for d, s in task.example.items()})
    values = replay(program, fakes, {s.name: fakes.mode.from_tensor(w, static_shapes=True) for s, w in zip(program.weights, flat.weights)})
    module = graph_module(program, task.device)
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    names = [s.name for s in (*program.weights, *program.inputs)] + [n.name for n in program.nodes]
    for node, name in zip(nodes, names, strict=True):
        node.meta["val"] = values[name]
    count = len(program.weights)
    inputs = nodes[count : count + len(program.inputs)]
    for i, node in enumerate(inputs):
        node._rename(f"x{i}")
        node.target = node.name
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    outs: Sequence[Any] = output.args[0]
    found = [values[o.value.name] for o in program.outputs]
    if not all(isinstance(v, torch.Tensor) for v in found):
        raise LoweringError(f"{task.said} has an output that is no tensor, which ONNX cannot say; load with backend='eager'")
    specs = [InputSpec(InputKind.BUFFER, TensorArgument(n.name), f"w{i}", True) for i, n in enumerate(nodes[:count])]
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in inputs]
    call = ModuleCallSignature(
        [], [], pytree.tree_structure((tuple(range(len(inputs))), {})), pytree.tree_structure(tuple(range(len(outs)))), [n.name for n in inputs]
    )
    module.graph.lint()
    module.recompile()
    exported = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(specs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in outs]),
        state_dict={f"w{i}": w for i, w in enumerate(flat.weights)},
        range_constraints={
            fakes.dims[d].node.expr: ValueRanges(max(least, 1), int_oo if most is None else most) for d, (least, most, _) in task.dims.items()
        },
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=None,
        constants={},
    )
    return exported, [v.dtype == torch.bool for v in found]
