"""Runs a program on symbolic tensors, and records every kernel that it starts.

Composite ops run as torch implements them, so that copies appear as copies. An op with a formula of its own
(`flop_formulas.own_formula`), such as attention or a recurrent layer, counts as one kernel. Values are freed
after their last use, as the program's own runs free them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts.program import Kind, Node, Program, refs, substitute

from ..ir import ops
from ..ir.encoding import decode
from ..ir.fake_values import CPU, Fakes, member_slice, replay, run_node, slot_value
from ..ir.limits import recurrent_result, tensors
from ..ir.op_records import is_recurrent_layer
from ..ir.torch_internals import is_overload
from ..runtime.flop_formulas import FlopFormula, kernel_formula, own_formula
from ..runtime.kernel_count import NO_KERNEL, is_view
from .counts import Kernel
from .expressions import SizeSymbols
from .live_storages import LiveStorages

_RESAMPLING = ("aten.upsample_", "aten._upsample_")
"""Ops that torch implements by others where sizes are symbols, and by one kernel where they are numbers."""


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Records the kernels that torch dispatches in a block; `kernels` has them in order."""

    def __init__(self, symbols: SizeSymbols) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.live = LiveStorages(symbols)
        self._symbols = symbols
        self._node = Node("", "")
        self._shared = True
        self._times = 1
        self._silent = False

    @contextmanager
    def at(self, node: Node, shared: bool, times: int = 1) -> Iterator[None]:
        """What runs in the block belongs to a node. times: how often it runs in a call."""
        before = self._node, self._shared, self._times
        self._node, self._shared, self._times = node, shared, times * self._times
        try:
            yield
        finally:
            self._node, self._shared, self._times = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = ops.name_of(func).split(".")[1] if is_overload(func) else ""
        if func.namespace != "prim" and not self._silent and not is_view(func) and name not in NO_KERNEL:
            self.add(func, args, kwargs or {}, result, kernel_formula(func))
        self.note(result)
        return result

    def add(
        self, op: Any, args: Any, kwargs: Mapping[str, Any], result: Any, formula: FlopFormula | None
    ) -> None:
        """Adds a kernel."""
        if next(tensors(result), None) is None:
            return
        given = list(tensors([*args, *kwargs.values()]))
        kernel = Kernel(
            self._node,
            ".".join(ops.name_of(op).split(".")[:2]),
            self._shared,
            self._times,
            tuple(tuple(t.shape) for t in given),
            tuple(given[0].stride()) if given else (),
            tuple(next(tensors(result)).shape),
        )
        kernel.count(op, args, kwargs, result, formula, self._symbols, self.live)
        self.kernels.append(kernel)

    def note(self, result: Any) -> None:
        """Notes the memory of a result, and what is live now."""
        for tensor in tensors(result):
            self.live.made(tensor, shared=self._shared)
        self.live.remember()

    @contextmanager
    def memory_only(self) -> Iterator[None]:
        """Tracks memory in the block, and adds no kernels."""
        self._silent = True
        try:
            with self:
                yield
        finally:
            self._silent = False


@torch.inference_mode(False)  # in inference mode torch does not split composite ops
@torch.no_grad()
def record(
    program: Program,
    fakes: Fakes,
    kinds: Mapping[str, Kind],
    recorder: KernelRecorder,
    early: Collection[str] = (),
) -> set[int]:
    """Runs a program and records its kernels. Returns the serials of its outputs.

    kinds: of every value. early: the nodes that ran before the call; their results are weights.
    """
    values: dict[str, Any] = {}
    for slots, weight in ((program.weights, True), (program.inputs, False)):
        for slot in slots:
            values[slot.name] = slot_value(fakes, slot, program.members)
            for tensor in tensors(values[slot.name]):
                recorder.live.hold(tensor, weight=weight, shared=kinds[slot.name] == "shared")
    for node in program.nodes:
        if node.name in early:
            values[node.name] = run_node(node, values, fakes, program.members)
            for tensor in tensors(values[node.name]):
                recorder.live.hold(tensor, weight=True, shared=kinds[node.name] == "shared")
    nodes = [n for n in program.nodes if n.name not in early]
    _run(nodes, program, fakes, kinds, recorder, values)
    outputs = [values[r] for o in program.outputs for r in refs(o.value)]
    storages = [recorder.live.of(t) for t in tensors(outputs)]
    return {s.serial for s in storages if s is not None}


def _run(
    nodes: Sequence[Node],
    program: Program,
    fakes: Fakes,
    kinds: Mapping[str, Kind],
    recorder: KernelRecorder,
    values: dict[str, Any],
) -> None:
    """Runs nodes of a program, and frees every value that they make after its last use."""
    last = {r: n.name for n in nodes for r in refs((n.args, n.kwargs))}
    kept = {r for o in program.outputs for r in refs(o.value)} | set(values)
    for node in nodes:
        with recorder.at(node, kinds.get(node.name, "shared") == "shared"):
            values[node.name] = _run_node(node, values, fakes, recorder, program.members)
        for name in {*refs((node.args, node.kwargs)), node.name} - kept:
            if last.get(name, node.name) == node.name:
                del values[name]


def _run_node(
    node: Node, values: Mapping[str, Any], fakes: Fakes, recorder: KernelRecorder, members: int
) -> Any:
    args = decode(substitute(node.args, values.__getitem__), CPU)
    if node.body is not None:
        return _run_loop(node, node.body, args, fakes, recorder, members)
    kwargs = decode(substitute(node.kwargs, values.__getitem__), CPU)
    formula = own_formula(node.op)
    resampling = node.op.startswith(_RESAMPLING)
    inside = recorder.memory_only() if formula is not None else nullcontext() if resampling else recorder
    with fakes.on(), inside:
        result = recurrent_result(node.op, args, kwargs) if is_recurrent_layer(node.op) else None
        if result is None:
            result = ops.checked(node.op)(*args, **kwargs)
    if formula is None and not resampling:
        return result
    recorder.note(result)
    recorder.add(ops.resolve(node.op), args, kwargs, result, formula)
    return result


def _run_loop(
    node: Node, body: Program, args: Any, fakes: Fakes, recorder: KernelRecorder, members: int
) -> Any:
    """Runs the body of a loop once, as for the first member. Its kernels count for each member.

    The memory for the results of all members exists before the body runs.
    """
    first = {s.name: member_slice(fakes, a, s.kind, 0) for s, a in zip(body.inputs, args, strict=True)}
    shapes = replay(body, fakes, dict(first))
    outs = [substitute(o.value, shapes.__getitem__) for o in body.outputs]
    with fakes.on():
        joined = [
            torch.empty([members, *o.shape], dtype=o.dtype) if k.kind == "stacked" else None
            for o, k in zip(outs, body.outputs)
        ]
    recorder.note(joined)
    with recorder.at(node, True, members):
        _run(body.nodes, body, fakes, {}, recorder, first)
    return [
        [substitute(o.value, first.__getitem__)] * members if made is None else made
        for o, made in zip(body.outputs, joined)
    ]
