"""What a member does beside answering, seen in its export: what changes nothing is left out, and what would be lost is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from .calling import Call
from .entries import method_of
from .errors import CaptureError
from .explain import no_form, user_line
from .exporting import calm
from .own_tensors import tensors_of

_READS = {"item", "_local_scalar_dense"}
_OWN_CHECK = re.compile(r"expression u\d+ (>= 0|<= 1) on node")  # torch's of a truth value
_ASSERTS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async"}


def refuse_shared_memory(module: nn.Module, buffers: Sequence[str]) -> None:
    """Refuse a state whose memory the member reaches by another name too: what it writes under one name it would not see under the other. Raises: CaptureError."""
    held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False)), **dict(tensors_of(module))}
    for name in buffers:
        own = held[name].untyped_storage()._cdata
        others = sorted(n for n, t in held.items() if n != name and t.untyped_storage()._cdata == own)
        if others:
            raise CaptureError(
                f"state {name} of {type(module).__name__} lies in the memory of {', '.join(others)} too; a state has one name: register a tensor of its own, for example with .clone()"
            )


def drop_first_changes(exported: torch.export.ExportedProgram, make: Callable[[], nn.Module], call: Call, entry: str, prefix: str) -> None:
    """Leave out what a member writes into its parameters in its first call alone (weights that are scaled for inference, once): the program begins with the
    checkpoint's weights at every call, and so writes the same again. A member that goes on writing is refused.
    """
    specs = exported.graph_signature.output_specs
    written = {i: str(s.target).removeprefix(prefix) for i, s in enumerate(specs) if s.kind.name == "PARAMETER_MUTATION"}
    if not written:
        return
    inputs = {s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT}
    (output,) = (n for n in exported.graph.nodes if n.op == "output")
    hanging = [name for i, name in written.items() if any(n.name in inputs for n in _reached(output.args[0][i], lambda m: m.all_input_nodes))]
    if hanging:
        raise CaptureError(
            f"{type(make()).__name__} changes its parameters {', '.join(hanging[:5])} by what it is given when {entry} runs in eval mode; a member program has "
            "no side effects: make them buffers and build with --state, or change them in train mode alone"
        )
    module = make()
    held = dict(module.named_parameters(remove_duplicate=False))
    first: dict[str, torch.Tensor] = {}
    for scale in (1, 1, 0.5):  # other inputs too: what is written must hang on none
        args, kwargs = pytree.tree_map(
            lambda t, k=scale: (t * k if t.is_floating_point() else t.clone()) if isinstance(t, torch.Tensor) else t, (call.args, call.kwargs)
        )
        with calm(), torch.no_grad():
            method_of(module, entry)(*args, **kwargs)
        first = first or {n: held[n].detach().clone() for n in written.values()}
        moved = [n for n, value in first.items() if not torch.equal(held[n], value)]
        if moved:
            raise CaptureError(
                f"{type(module).__name__} changes its parameters {', '.join(moved[:5])} at every call of {entry} in eval mode; a member program has no side effects: "
                "make them buffers and build with --state, or change them in train mode alone"
            )
    specs[:] = [s for i, s in enumerate(specs) if i not in written]
    output.args = (tuple(a for i, a in enumerate(output.args[0]) if i not in written),)


def refuse_changes(exported: torch.export.ExportedProgram, module: nn.Module, call: Call, entry: str, prefix: str, assigned: Collection[str]) -> None:
    """Refuse a member that changes buffers or inputs that are no states, or anything else. Raises: CaptureError."""
    signature = exported.graph_signature
    known = (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    other = next((s for s in signature.output_specs if s.kind not in known), None)
    if other is not None:
        what = f"changes {str(other.target).removeprefix(prefix)}" if other.target else "has a side effect"
        raise CaptureError(
            f"{type(module).__name__} {what} when {entry} runs in eval mode ({other.kind.name.lower().replace('_', ' ')}); a member program has no side effects"
        )
    tensors = [s.arg.name for s in signature.input_specs if s.kind is InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    names = {name: leaf.name for name, leaf in zip(tensors, call.leaves)}
    buffers = {str(n).removeprefix(prefix) for n in signature.buffers_to_mutate.values()} | set(assigned)
    inputs = {names.get(str(n), str(n)) for n in signature.user_inputs_to_mutate.values()}
    changed = sorted(buffers | inputs)
    if changed:
        named = " ".join(f"--state {name}" for name in changed)
        raise CaptureError(
            f"{type(module).__name__} changes {', '.join(changed)} when {entry} runs in eval mode; a member program has no side effects. To carry "
            f"{'it' if len(changed) == 1 else 'them'} from call to call, build with {named}: an input and an output of the program then; or make {entry} return the new value instead{', or work on a copy of its input' if inputs else ''}"
        )


def drop_asserts(graph: fx.Graph, module: nn.Module) -> None:
    """Take out what only looks whether a value is as expected, and with it a number that is read from a tensor for that alone.

    A truth value of which torch itself says no more than that it is 0 or 1 was read for something else: a branch whose error the member's code caught.
    Raises: CaptureError.
    """
    for node in graph.nodes:
        if getattr(node.target, "_opname", "") in _READS:
            checks = [n for n in _reached(node, lambda m: m.users) if getattr(n.target, "_opname", "") in _ASSERTS]
            if checks and all(_OWN_CHECK.search(str(n.args[-1])) for n in checks):
                raise CaptureError(
                    no_form("aten._local_scalar_dense.default", node.name, module, user_line(node.meta.get("stack_trace") or "", code=True))
                )
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "_opname", "") in _ASSERTS and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _reached(node: fx.Node, steps: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Whatever one comes to from a node by these steps."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        new = set(steps(waiting.pop())) - found
        found |= new
        waiting += new
    return found
