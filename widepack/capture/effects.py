"""What a member does beside answering, seen in its export: what changes nothing is left out, and what would be lost is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils._python_dispatch import TorchDispatchMode

from .call import Call
from ..spec.entries import method_of
from ..errors import CaptureError
from .explain import no_form, source_of
from .export import calm, clone
from .module_tensors import tensors_of
from .results import known_forms

_READS = {"item", "_local_scalar_dense"}
_OWN_CHECK = re.compile(r"expression u\d+ (>= 0|<= 1) on node")  # torch's of a truth value
_SHAPED = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")  # read the shape of a value alone
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


def drop_first_changes(
    exported: torch.export.ExportedProgram, make: Callable[[], nn.Module], call: Call, entry: str, prefix: str, assigned: Collection[str]
) -> set[str]:
    """Leave out what a member writes in its first call alone (weights that are scaled for inference, a table that is kept for the next call): the program begins
    with the checkpoint's weights at every call, and so writes the same again.

    assigned: buffers in whose place the member puts another tensor. Returns: those among them that are no such.
    Raises: CaptureError for parameters that are none.
    """
    specs = exported.graph_signature.output_specs
    kinds = ("PARAMETER_MUTATION", "BUFFER_MUTATION")
    written = {i: str(s.target).removeprefix(prefix) for i, s in enumerate(specs) if s.kind.name in kinds}
    if not written and not assigned:
        return set()
    once, given = _written_once(make, call, entry, {*written.values(), *assigned})
    left = [written[i] for i, s in enumerate(specs) if s.kind.name == kinds[0] and written[i] not in once]
    if left:
        member = make()
        raise CaptureError(
            f"{type(member).__name__} changes its parameters {', '.join(left[:5])} {f'by what it is given when {entry} runs' if given & set(left) else f'at every call of {entry}'} "
            f"in {_mode(member)} mode; a member program has no side effects: make them buffers"
            f"{', of which a fused module keeps each member its own' if member.training else ' and build with --state, or change them in train mode alone'}"
        )
    gone = {i for i, name in written.items() if name in once}
    specs[:] = [s for i, s in enumerate(specs) if i not in gone]
    (output,) = (n for n in exported.graph.nodes if n.op == "output")
    output.args = (tuple(a for i, a in enumerate(output.args[0]) if i not in gone),)
    return set(assigned) - once


def _written_once(make: Callable[[], nn.Module], call: Call, entry: str, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Which of these a member writes in its first call alone, alike whatever it is given, and answers as in its first call from there on; and which of them
    are made of what it is given."""

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        turned = value.flip(tuple(range(value.ndim)))
        return turned * 0.5 if turned.is_floating_point() else turned

    def held(module: nn.Module) -> dict[str, torch.Tensor]:
        every = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
        return {n: every[n] for n in names}

    def run(module: nn.Module, change: Callable[[Any], Any]) -> tuple[dict[str, torch.Tensor], list[Any], set[str]]:
        args, kwargs = pytree.tree_map(change, (call.args, call.kwargs))
        with calm(), torch.no_grad(), _Followed(pytree.tree_leaves((args, kwargs))) as followed:
            answer = method_of(module, entry)(*args, **kwargs)
        values = held(module)
        made = {n for n, value in values.items() if followed.holds(value)}
        return {n: v.detach().clone() for n, v in values.items()}, pytree.tree_leaves(pytree.tree_map(clone, known_forms(answer))), made

    one = make()
    first, answer, given = run(one, clone)
    try:
        (second, again, _), (third, _, _), (fourth, _, _) = run(one, clone), run(one, other), run(make(), other)
    except Exception:  # noqa: BLE001  # inputs turned round that the member does not take
        return set(), given
    if len(answer) != len(again) or not all(_same(a, b) for a, b in zip(answer, again)):
        return set(), given
    return {n for n in names if n not in given and all(_same(first[n], later[n]) for later in (second, third, fourth))}, given


class _Followed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """A mode that follows where the values of some tensors go: whatever an op makes of them, or writes them into."""

    def __init__(self, begun: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[torch.Tensor] = []  # a storage that is let go could come back as another's
        self._storages: set[int] = set()
        self._add(begun)

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._kept.append(value)
                self._storages.add(value.untyped_storage()._cdata)

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a tensor is made of them."""
        return value.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        reads = any(isinstance(v, torch.Tensor) and self.holds(v) for v in pytree.tree_leaves((args, kwargs)))
        if reads and not func._opname.startswith(_SHAPED):
            self._add(pytree.tree_leaves(made))
            self._add(v for a, v in zip(func._schema.arguments, args) if a.alias_info is not None and a.alias_info.is_write)
        return made


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit, NaN beside NaN."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


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
            f"{type(module).__name__} changes {', '.join(changed)} when {entry} runs in {_mode(module)} mode; a member program has no side effects. To carry "
            f"{'it' if len(changed) == 1 else 'them'} from call to call, build with {named}: an input and an output of the program then; or make {entry} return the new value instead{', or work on a copy of its input' if inputs else ''}"
        )


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def drop_asserts(graph: fx.Graph, module: nn.Module) -> None:
    """Take out what only looks whether a value is as expected, and with it a number that is read from a tensor for that alone.

    A truth value of which torch itself says no more than that it is 0 or 1 was read for something else: a branch whose error the member's code caught.
    Raises: CaptureError.
    """
    for node in graph.nodes:
        if getattr(node.target, "_opname", "") in _READS:
            users = _reached(node, lambda m: m.users)
            checks = [n for n in users if getattr(n.target, "_opname", "") in _ASSERTS]
            used = any(n.op == "output" or isinstance(n.meta.get("val"), torch.Tensor) for n in users)
            if checks and not used and all(_OWN_CHECK.search(str(n.args[-1])) for n in checks):
                raise CaptureError(no_form("aten._local_scalar_dense.default", node.name, module, source_of(node, code=True)))
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
