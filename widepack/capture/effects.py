"""Finds the side effects of a member in its export by torch.export.

A side effect without consequence (an assert, a value that the first call caches) is removed from the program.
Any other side effect would be lost, so the member is refused with the names of what it changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import OutputKind
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts.errors import some

from ..checkpoints.differences import bit_equal
from ..errors import CaptureError
from ..ir.torch_internals import buffers_of, memory_id, op_base_name, schema_of
from ..spec.entries import callable_of
from .call import MemberCall
from .derivatives import weights_fixed
from .explain import ASSERTS, ITEM, no_form, source_of
from .export import calm, clone, run_once
from .exported import output_of, reached, state_tensors, tensor_inputs
from .named_fields import known_forms
from .reachable import tensors_of
from .state import ExportedMember

_READS = {"item", "_local_scalar_dense"}
_OWN_CHECK = re.compile(r"expression u\d+ (>= 0|<= 1) on node")  # torch's own check of a truth value
# These ops read only the shape of a value.
_SHAPED = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")


def refuse_shared_memory(module: nn.Module, buffers: Sequence[str]) -> None:
    """Refuses a state whose memory the member also reaches by another name.

    In the program, a write under one name is not visible under the other. A module that is a part under two
    names has one buffer: a write is visible under both. Raises: CaptureError.
    """
    tensors = {**state_tensors(module), **dict(tensors_of(module))}
    slots = {
        f"{path}.{name}".lstrip("."): (id(part), name)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in buffers_of(part)
    }
    for name in buffers:
        storage = memory_id(tensors[name])
        others = sorted(
            n
            for n, t in tensors.items()
            if memory_id(t) == storage and n != name and slots.get(n) != slots[name]
        )
        if others:
            raise CaptureError(
                f"state {name} of {type(module).__name__} shares its memory with {', '.join(others)}; "
                "a state needs separate memory: register a copy, for example with .clone()"
            )


def changed_constants(
    error: Exception | None, make: Callable[[], nn.Module], call: MemberCall, entry: str
) -> str:
    """Returns the message for a member that writes into plain tensors, with their names; "" if none is found.

    error: of the export. make: makes a fresh member. entry: the exported method.
    """
    if "is mutated in the forward method" not in str(error):
        return ""
    member = make()
    before = [(name, value, value.detach().clone()) for name, value in tensors_of(member)]
    if run_once(member, call, entry)[1] is not None:
        return ""  # the export says why
    changed = [name for name, value, numbers in before if not _same(value.detach(), numbers)]
    if not changed:
        return ""
    by = "a fused module keeps for each member" if member.training else "--state carries from call to call"
    return (
        f"{type(member).__name__} writes into {some(changed)} when {entry} runs, plain "
        "tensors that are no buffers; a member program has no side effects. Make them buffers with "
        f"register_buffer, which {by}"
    )


def registered_buffers(make: Callable[[], nn.Module], call: MemberCall, entry: str) -> str:
    """Returns the message for a member that registers buffers when it runs, with their names; "" for others.

    torch.export knows only buffers that a member has before the call.
    """
    member = make()
    before = set(state_tensors(member))
    run_once(member, call, entry)
    added = sorted(set(state_tensors(member)) - before)
    if not added:
        return ""
    them = "it" if len(added) == 1 else "them"
    return (
        f"{type(member).__name__} registers the buffer{'s' if len(added) > 1 else ''} {some(added)}"
        f" when {entry} runs, and a program cannot add a buffer. If later calls need {them}, register {them}"
        f" in __init__; if not, compute {them} as a local value"
    )


def drop_first_changes(member: ExportedMember, assigned: Collection[str]) -> set[str]:
    """Removes the writes that a member makes in its first call only.

    Examples are weights that are scaled for inference, or a table that is cached for the next call. The
    program starts from the checkpoint's weights at every call, so each call would write the same again.

    Args:
        member: The exported member. The outputs of its export are changed in place.
        assigned: Buffers that the member replaces by another tensor.

    Returns:
        The buffers of `assigned` that are not written in the first call only.

    Raises:
        CaptureError: The member changes parameters in other calls too.
    """
    specs = member.program.graph_signature.output_specs
    kinds = ("PARAMETER_MUTATION", "BUFFER_MUTATION")
    written = {i: member.own(s.target) for i, s in enumerate(specs) if s.kind.name in kinds}
    if not written and not assigned:
        return set()
    once, from_inputs = _written_once(member, {*written.values(), *assigned})
    left = [written[i] for i, s in enumerate(specs) if s.kind.name == kinds[0] and written[i] not in once]
    if left:
        raise CaptureError(_changed_parameters(member, left, bool(from_inputs & set(left))))
    dropped = {i for i, name in written.items() if name in once}
    specs[:] = [s for i, s in enumerate(specs) if i not in dropped]
    output = output_of(member.program)
    output.args = (tuple(a for i, a in enumerate(output.args[0]) if i not in dropped),)
    return set(assigned) - once


def _changed_parameters(member: ExportedMember, names: Sequence[str], from_inputs: bool) -> str:
    """The message for a member that changes parameters. from_inputs: the new values depend on the inputs."""
    entry = member.entry
    when = f"by what it is given when {entry} runs" if from_inputs else f"at every call of {entry}"
    way = (
        "make them buffers, which a fused module keeps for each member"
        if member.module.training
        else "make them buffers and build with --state, or change them in train mode only"
    )
    return (
        f"{member.name} changes its parameters {some(names)} {when} in {member.mode} "
        f"mode; a member program has no side effects: {way}"
    )


def _written_once(member: ExportedMember, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Returns which tensors the member writes in its first call only, and which depend on the inputs.

    A tensor of the first set gets the same value whatever the inputs are, and the member's answers stay those
    of its first call.
    """
    module = member.make()
    first = _observe(member, module, names, clone)
    try:
        second = _observe(member, module, names, clone)
        third = _observe(member, module, names, _turned)
        fourth = _observe(member, member.make(), names, _turned)
    except Exception:  # noqa: BLE001  # the member does not take the changed inputs
        return set(), first.from_inputs
    # a later call with other inputs may read what the first one kept of its inputs
    if not (_same_answer(first, second) and _same_answer(third, fourth)):
        return set(), first.from_inputs
    once = {
        n
        for n in names
        if n not in first.from_inputs
        and all(_same(first.values[n], later.values[n]) for later in (second, third, fourth))
    }
    return once, first.from_inputs


def _same_answer(one: _Observed, other: _Observed) -> bool:
    """Whether two calls have equal answers."""
    return len(one.answer) == len(other.answer) and all(map(_same, one.answer, other.answer))


def _turned(value: Any) -> Any:
    """Returns other values of the same dtype and shape: the tensor flipped, and halved if it is a float."""
    if not isinstance(value, torch.Tensor):
        return value
    flipped = value.flip(tuple(range(value.ndim)))
    return flipped * 0.5 if flipped.is_floating_point() else flipped


class _Observed(NamedTuple):
    """One call of a member: tensors after it, leaves of the answer, and the tensors that depend on inputs."""

    values: dict[str, torch.Tensor]
    answer: list[Any]
    from_inputs: set[str]


def _observe(
    member: ExportedMember, module: nn.Module, names: Collection[str], change: Callable[[Any], Any]
) -> _Observed:
    """Calls a module with inputs that `change` makes from the example, and records what it wrote."""
    args, kwargs = pytree.tree_map(change, (member.call.args, member.call.kwargs))
    with calm(), weights_fixed(module), _DataFlow(pytree.tree_leaves((args, kwargs))) as flow:
        answer = callable_of(module, member.entry)(*args, **kwargs)
    tensors = state_tensors(module)
    return _Observed(
        {n: tensors[n].detach().clone() for n in names},
        pytree.tree_leaves(pytree.tree_map(clone, known_forms(answer))),
        {n for n in names if flow.reaches(tensors[n])},
    )


class _DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """A mode that follows the values of some tensors: into results of ops, and tensors that ops write."""

    def __init__(self, sources: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[torch.Tensor] = []  # a storage that is freed could come back with the same id
        self._storages: set[int] = set()
        self._add(sources)

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self._kept.append(value)
                self._storages.add(memory_id(value))

    def reaches(self, value: torch.Tensor) -> bool:
        """Whether a tensor was computed from the sources."""
        return memory_id(value) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = any(
            isinstance(v, torch.Tensor) and self.reaches(v) for v in pytree.tree_leaves((args, kwargs))
        )
        if reads and not op_base_name(func).startswith(_SHAPED):
            self._add(pytree.tree_leaves(result))
            self._add(
                v
                for a, v in zip(schema_of(func).arguments, args)
                if a.alias_info is not None and a.alias_info.is_write
            )
        return result


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal bit for bit."""
    tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return bit_equal(a, b) if tensors else bool(a == b)


def refuse_changes(member: ExportedMember, assigned: Collection[str]) -> None:
    """Refuses a member that changes anything but states. assigned: buffers that it replaces.

    Raises:
        CaptureError: It changes a buffer or an input that is no state, or has another side effect.
    """
    signature = member.program.graph_signature
    known = (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    other = next((s for s in signature.output_specs if s.kind not in known), None)
    when = f"when {member.entry} runs in {member.mode} mode"
    if other is not None:
        raise CaptureError(
            f"{member.name} has a side effect {when} "
            f"({other.kind.name.lower().replace('_', ' ')}); a member program has no side effects"
        )
    names = {n.name: leaf.name for n, leaf in zip(tensor_inputs(member.program), member.call.leaves)}
    buffers = {member.own(n) for n in signature.buffers_to_mutate.values()} | set(assigned)
    inputs = {names.get(str(n), str(n)) for n in signature.user_inputs_to_mutate.values()}
    changed = sorted(buffers | inputs)
    # torch.export takes a buffer that the call adds for one of the inputs
    if inputs and (added := registered_buffers(member.make, member.call, member.entry)):
        raise CaptureError(added)
    if observing := _observing(member.module, changed):
        raise CaptureError(
            f"{member.name} changes {some(changed)} {when}, since {observing} observes: switch the "
            "observers of every member off before it is saved, with "
            "model.apply(torch.ao.quantization.disable_observer)"
        )
    if changed:
        options = " ".join(f"--state {name}" for name in changed)
        raise CaptureError(
            f"{member.name} changes {', '.join(changed)} {when}; a member program has no side effects. To "
            f"carry {'it' if len(changed) == 1 else 'them'} from call to call, as an input and an output of "
            f"the program, build with {options} or make {member.entry} return the new value instead"
            f"{', or work on a copy of its input' if inputs else ''}"
        )


def _observing(module: nn.Module, changed: Iterable[str]) -> str:
    """Returns the first part that fake-quantizes and has a changed buffer; "" if there is none."""
    for name, part in module.named_modules():
        observes = hasattr(part, "observer_enabled") and hasattr(part, "fake_quant_enabled")
        if observes and any(c.startswith(f"{name}." if name else "") for c in changed):
            return name or type(module).__name__
    return ""


def drop_asserts(graph: fx.Graph, module: nn.Module) -> None:
    """Removes the nodes that only check a value, and numbers that are read from a tensor for such a check.

    If torch knows of a truth value only that it is 0 or 1, something else read it: a branch whose error the
    member's code caught. Such a member is refused. Raises: CaptureError.
    """
    for node in graph.nodes:
        if op_base_name(node.target) in _READS:
            _, *users = reached(node, lambda n: n.users)
            checks = [n for n in users if op_base_name(n.target) in ASSERTS]
            used = any(n.op == "output" or isinstance(n.meta.get("val"), torch.Tensor) for n in users)
            if checks and not used and all(_OWN_CHECK.search(str(n.args[-1])) for n in checks):
                raise CaptureError(no_form(ITEM, node.name, module, source_of(node, code=True)))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and op_base_name(node.target) in ASSERTS and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
