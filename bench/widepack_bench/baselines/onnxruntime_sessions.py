"""Runs N sessions of ONNX Runtime: one exported member, with each member's weights.

This is the fastest form: every session reads and writes memory that was bound once, and its outputs are its
member's part of `[N, ...]`. Sessions have as many threads as torch. They do not spin between runs: N spinning
thread pools would slow all contestants down.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import Unavailable
from ..measure.answers import Run, leaves, members_of

# The numbers of torch's dtypes in ONNX files (onnx.TensorProto.DataType).
NUMBERS = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


def onnxruntime(modules: Sequence[nn.Module], each: bool) -> Run:
    """Returns a call of N sessions on the CPU, made at the first call of each shape.

    Raises: Unavailable without onnxruntime, onnx and onnxscript, or on another device.
    """
    device = next((t.device for m in modules for t in (*m.parameters(), *m.buffers())), torch.device("cpu"))
    if device.type != "cpu":
        raise Unavailable(
            f"sessions of ONNX Runtime run on the CPU only, but the members are on {device.type}"
        )
    missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if not _installed(name)]
    if missing:
        raise Unavailable(f"{', '.join(missing)} is not installed (pip install 'widepack[onnx]')")
    return _Lazy(modules, each)


class _Lazy:
    """Makes sessions at the first call of each shape."""

    def __init__(self, modules: Sequence[nn.Module], each: bool) -> None:
        self._modules, self._each = modules, each
        self._made: dict[Any, Sessions] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        key = tuple((v.shape, v.dtype) for v in tensors)
        if key not in self._made:
            self._made[key] = Sessions(exported(self._modules, self._each, args, kwargs))
        return self._made[key].run(tensors)

    def from_files(
        self, folder: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], Sessions]:
        """Exports to files now, and returns a function that opens the sessions.

        The memory of the sessions can then be measured without the memory of the export.
        """
        made = exported(self._modules, self._each, args, kwargs)
        paths: list[bytes | str] = []
        for i, data in enumerate(made.models):
            assert isinstance(data, bytes)
            paths.append(f"{folder}/{i}.onnx")
            with open(paths[-1], "wb") as file:
                file.write(data)
        return lambda: Sessions(replace(made, models=paths))


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


class Sessions:
    """Binds N sessions of one shape once. A call copies its inputs in, runs all, and copies each output out
    as one tensor.

    Binding at every call takes 15 us for each session, and so do results made by `session.run` (measured on
    an MLP of three layers). inputs: `[...]`, or `[N, ...]` where each member has its own; outputs: `[N,
    ...]`; both by name.

    workers: Python threads that share the sessions, which have then one thread each (`run` releases Python's
    lock); with 1, sessions have as many threads as torch.
    """

    def __init__(self, made: Exported, workers: int = 1) -> None:
        sessions = [opened(model, 1 if workers > 1 else torch.get_num_threads()) for model in made.models]
        self._workers, self._pool = workers, ThreadPoolExecutor(workers) if workers > 1 else None
        names = [i.name for i in sessions[0].get_inputs()]
        if len(names) != len(made.inputs):
            raise Unavailable(
                f"the exported program has {len(names)} inputs, but the call has {len(made.inputs)} tensors"
            )
        inputs = dict(zip(names, made.inputs, strict=True))
        outputs = {
            o.name: torch.empty((len(sessions), *shape), dtype=dtype)
            for o, (shape, dtype) in zip(sessions[0].get_outputs(), made.outputs, strict=True)
        }
        self._inputs, self._outputs, self._single = made.inputs, list(outputs.values()), made.single
        self._calls: list[tuple[Callable[[Any], None], Any]] = []
        for i, session in enumerate(sessions):
            binding = session.io_binding()
            for name, value in inputs.items():
                part = value[i] if made.each else value
                binding.bind_input(name, "cpu", 0, NUMBERS[part.dtype], tuple(part.shape), part.data_ptr())
            for name, value in outputs.items():
                binding.bind_output(
                    name, "cpu", 0, NUMBERS[value.dtype], tuple(value.shape[1:]), value[i].data_ptr()
                )
            self._calls.append((session.run_with_iobinding, binding))

    def run(self, tensors: Sequence[Tensor]) -> Any:
        for bound, value in zip(self._inputs, tensors, strict=True):
            bound.copy_(value)
        if self._pool is None:
            self._run(self._calls)
        else:
            list(self._pool.map(self._run, [self._calls[i :: self._workers] for i in range(self._workers)]))
        outs = [out.clone() for out in self._outputs]
        return outs[0] if self._single else outs

    @staticmethod
    def _run(calls: Sequence[tuple[Callable[[Any], None], Any]]) -> None:
        for run, binding in calls:
            run(binding)


def opened(model: bytes | str, threads: int) -> Any:
    """Returns a session of a model, whose threads do not spin between runs."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class Exported:
    """Members as ONNX models.

    models: for each member its bytes, made on request, or its file. inputs: the call's tensors, in order.
    outputs: the shape and dtype of each leaf of one member's answer. single: the answer is one tensor.
    """

    models: Iterable[bytes | str]
    inputs: list[Tensor]
    outputs: list[tuple[torch.Size, torch.dtype]]
    each: bool
    single: bool


def exported(
    modules: Sequence[nn.Module],
    each: bool,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic: bool = False,
) -> Exported:
    """Exports the first member; the others are its model with their weights.

    dynamic: the first dim of every input, all positional, may have another size.

    Raises: whatever the exporter raises; Unavailable for members of different shapes.
    """
    tensors = [
        v.clone(memory_format=torch.contiguous_format)
        for v in pytree.tree_leaves((args, kwargs))
        if isinstance(v, Tensor)
    ]
    first = modules[0]
    if each:
        args, kwargs = members_of(args, 0), members_of(kwargs, 0)
    answer = first(*args, **kwargs)
    result = leaves(answer)
    if any(t.dtype not in NUMBERS for t in result):
        raise Unavailable(f"ONNX has no dtype for {', '.join(sorted({str(t.dtype) for t in result}))}")
    with _silent(), torch.inference_mode(False), torch.no_grad():
        exported = torch.onnx.export(
            _Leaves(first),
            _plain(args),
            kwargs=_plain(dict(kwargs)),
            dynamo=True,
            dynamic_shapes=(tuple({0: torch.export.Dim.DYNAMIC} for _ in args),) if dynamic else None,
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    return Exported(
        _models(exported.model_proto, modules),
        tensors,
        [(t.shape, t.dtype) for t in result],
        each,
        isinstance(answer, Tensor),
    )


def _models(model: Any, modules: Sequence[nn.Module]) -> Iterator[bytes]:
    """Yields each member's model: the first one's with other weights, optimized as torch's exporter does by
    default. The exporter itself would fold the first member's weights. Without this, ONNX Runtime folds no
    batch norm: a small CNN takes 2.4 times as long.
    """
    import onnx

    weights = {f"member.{k}": k for k, _ in _named(modules[0])}
    for i, module in enumerate(modules):
        table = dict(_named(module))
        for initial in model.graph.initializer if i else ():
            if initial.name in weights:
                value = table[weights[initial.name]]
                if tuple(value.shape) != tuple(initial.dims):
                    raise Unavailable(
                        f"the members' {weights[initial.name]} have different shapes, and one exported "
                        "program needs equal shapes"
                    )
                initial.CopyFrom(
                    onnx.TensorProto(
                        name=initial.name,
                        dims=initial.dims,
                        data_type=initial.data_type,
                        raw_data=_bytes(value),
                    )
                )
        yield _optimized(model)


def _optimized(model: Any) -> bytes:
    """Returns a model with folded constants and fused ops. The given one stays as it is."""
    from onnxscript import ir, optimizer, rewriter

    graph = ir.from_proto(model)
    optimizer.optimize(graph)
    rewriter.rewrite(graph)
    data: bytes = ir.to_proto(graph).SerializeToString()
    return data


class _Leaves(nn.Module):
    """Returns the tensors of a member's output: an exported program has no place for other values."""

    def __init__(self, member: nn.Module) -> None:
        super().__init__()
        self.member = member

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(leaves(self.member(*args, **kwargs)))


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (k, t.detach())
        for k, t in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    ]


def _plain(value: Any) -> Any:
    """Copies inputs that were made in inference mode: an export cannot take them."""
    return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, value)


def _bytes(value: Tensor) -> bytes:
    value = value.contiguous().reshape(-1)
    return value.view(torch.uint8).numpy().tobytes() if value.numel() else b""


@contextmanager
def _silent() -> Iterator[None]:
    """Hides the exporter's messages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            log.setLevel(level)
