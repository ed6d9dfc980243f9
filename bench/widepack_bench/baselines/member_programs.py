"""Runs the artifact's member programs as modules, for baselines without the user's own modules."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from widepack.inference.entry import WideEntry
from widepack.inference.members.member import Member
from widepack.ir import ops
from widepack.spec.entries import FORWARD
from widepack_artifacts.entry import Entry
from widepack_artifacts.tree import paths

from ..errors import BenchError

_BATCH_NORM = ops.resolve("aten._native_batch_norm_legit_no_training.default")
# Ops of captured programs for which vmap has no rule, and what users write instead.
_PLAIN: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.reshape,
    ops.resolve("aten._unsafe_view.default"): torch.reshape,
    torch.ops.aten.sym_size.int: lambda x, axis: x.shape[axis],
    torch.ops.aten.sym_numel.default: lambda x: x.numel(),
}


class Flat(nn.Module):
    """Runs a member's program with its weights, without input checks. A user's own module has no input checks
    either.

    With state, every call begins with the same state, which the module stores. It returns the answer's
    leaves, then the new states.
    """

    def __init__(self, member: Member, entry: Entry, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        carried = {s.input for s in entry.state}
        free = [
            (name, "leaf" in tree) for name, _, tree, _ in entry.signature if not carried & set(paths(tree))
        ]
        self._inputs = [name for name, _ in free]
        self._numbers = {
            k for k, (_, tensor) in enumerate(free) if not tensor
        }  # Literals are part of the program.
        self._takes = [f"state_{i}" if i in carried else "" for i in range(len(entry.inputs))]
        for s in entry.state:
            self.register_buffer(
                f"state_{s.input}", state[entry.inputs[s.input].name].clone(), persistent=False
            )
        out = [s.output for s in entry.state]
        self._gives = [i for i in range(len(entry.outputs)) if i not in out] + out
        self._program = _as_written(member.graph)
        self._slots = member.slots
        for name, value in member.named_buffers():
            self.register_buffer(name, value, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights = [self._buffers[slot] for slot in self._slots]
        values = [*args, *(kwargs.get(name) for name in self._inputs[len(args) :])]
        tensors = iter(
            [v for k, v in enumerate(values) if k not in self._numbers] if self._numbers else values
        )
        outputs = self._program(
            *weights, *[self._buffers[name] if name else next(tensors) for name in self._takes]
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs[i] for i in self._gives)


def flat_members(ens: Any, state: Mapping[str, torch.Tensor] | None = None) -> list[nn.Module]:
    """Returns every member of a loaded model, or of one of its entries.

    A member is `ens.member(i)` where an input is more than one tensor. state: `{name: [N, ...]}`, with which
    every call of an entry with state begins. Raises: BenchError where an entry with state takes more than
    tensors.
    """
    members = [ens.member(i) for i in range(len(ens))]
    if not all(isinstance(m, Member) for m in members):
        return members
    entry = ens.entry if isinstance(ens, WideEntry) else ens.entry(FORWARD).entry
    carried = {s.input for s in entry.state}
    if not all(
        "leaf" in tree or "const" in tree or set(paths(tree)) & carried for _, _, tree, *_ in entry.signature
    ):
        if carried:
            raise BenchError(
                "the other inputs of an entry with state must be plain tensors to be timed; "
                "this entry takes more"
            )
        return [m.on_eager() for m in members]
    return [
        Flat(m, entry, {name: value[i] for name, value in (state or {}).items()})
        for i, m in enumerate(members)
    ]


def _as_written(program: fx.GraphModule) -> fx.GraphModule:
    """Returns the program with batch norms, reshapes and sizes as users write them.

    `vmap` would run a captured batch norm member by member.
    """
    program = copy.deepcopy(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.target = _PLAIN.get(node.target, node.target)
    for node in program.graph.find_nodes(op="call_function", target=_BATCH_NORM):
        if node.kwargs or not all(
            user.target is operator.getitem and user.args[1] == 0 for user in node.users
        ):
            continue
        x, weight, bias, mean, variance, momentum, eps = node.args
        with program.graph.inserting_before(node):
            plain = program.graph.call_function(
                nn.functional.batch_norm, (x, mean, variance, weight, bias, False, momentum, eps)
            )
        for user in list(node.users):
            user.replace_all_uses_with(plain)
            program.graph.erase_node(user)
        program.graph.erase_node(node)
    program.recompile()
    return program
