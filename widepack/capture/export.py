"""torch.export of a member, as a functional program of ATen ops.

requires: a fresh member and a call. ensures: linear layers, convolutions, norms and attention are whole; torch's settings are as they were.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from widepack_artifacts.opset import allowed

from ..ir import ops
from .patches import decompositions as taken_apart
from .call import Call
from ..spec.entries import FORWARD, method_of
from .patches.context import bound_embeddings, by_places, exportable
from .patches.tensor_index import look_up_places
from .patches.functions import whole_functions

_DROPOUT = {"dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"}


def clone(value: Any) -> Any:
    """A copy of a tensor; what is none, as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def run_once(module: nn.Module, call: Call, entry: str) -> tuple[Any, Exception | None]:
    """Run a member that nobody keeps. What its code remembers for good (`functools.cache`) is made of numbers then: an export leaves tensors without any, of
    which the user's own module would answer from there on. Returns: what it answers, or what it raises."""
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))  # the member may write into its inputs
    call_it = module if entry == FORWARD else method_of(module, entry)
    with calm(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return call_it(*args, **kwargs), None
        except Exception as e:  # noqa: BLE001  # whatever the user's code raises
            return None, e


def export(
    module: nn.Module, call: Call, dim: Any, grad: bool = True, *, gradients: bool = False, dropout: bool = False
) -> torch.export.ExportedProgram:
    """grad: whether as in training, where derivatives are kept; without, torch puts some ops otherwise than in a plain call. gradients: what a no_grad block gives
    is detached in the program, which has no such blocks. dropout: eval-mode dropout drops out, and is not replaced by its input."""
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))  # a failed export leaves marks on its example
    with calm(), nullcontext() if grad else torch.no_grad():
        exported = torch.export.export(module, args, kwargs, strict=False, dynamic_shapes=_dynamic(module, call, dim))
        if gradients:
            _detach_blocks(exported)
        _drop_dropout(exported, on=dropout)
        bound_embeddings(exported)
        functional = _functional(exported)
        look_up_places(functional)
        return functional


def _dynamic(module: nn.Module, call: Call, dim: Any) -> Any:
    it = iter(call.leaves)

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        leaf = next(it)
        return dict.fromkeys(leaf.axes, dim) or None

    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    return {n: pytree.tree_map(spec, v) for n, v in bound.arguments.items()}


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The functional form with linear, conv, norms and attention whole; an op that the format does not have is taken apart, where torch or taken_apart.py knows how."""
    apart: dict[Any, Any] = {torch.ops.aten.as_strided.default: by_places, **taken_apart.known_ways()}
    while True:
        functional: torch.export.ExportedProgram = exported.run_decompositions(apart)
        strange = {n.target for n in functional.graph.nodes if n.op == "call_function" and not allowed(ops.name_of(n.target))}
        known_ways = torch.export.default_decompositions() if strange - set(apart) else {}
        new = {op: known_ways[op] for op in strange - set(apart) if op in known_ways}
        if not new:
            return functional
        apart |= new


@contextmanager
def calm() -> Iterator[None]:
    """What an export needs of torch's settings, put back afterwards."""
    validation = torch.distributions.Distribution._validate_args  # argument validation branches on data
    fast = torch.backends.mha.get_fastpath_enabled()  # its nested tensors answer differently where positions are padded
    level = logging.root.manager.disable
    torch.distributions.Distribution.set_default_validate_args(False)
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.ERROR)
    try:
        # torch prints the whole graph of an export that fails, and warns of what it does with the module's internals; the error says it in one paragraph
        with exportable(), whole_functions(), warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.distributions.Distribution.set_default_validate_args(validation)


def _detach_blocks(exported: torch.export.ExportedProgram) -> None:
    """Detach what no_grad blocks give: functionalisation writes their ops among the others."""
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op != "call_function" or node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0] is not False:
                continue
            for given in [u for u in node.users if isinstance(u.meta.get("val"), torch.Tensor)]:
                with module.graph.inserting_after(given):
                    detached = module.graph.call_function(torch.ops.aten.detach.default, (given,))
                detached.meta = dict(given.meta)
                given.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
                if module is exported.graph_module:
                    exported.graph_signature.replace_all_uses(given.name, detached.name)
        module.recompile()


def _drop_dropout(exported: torch.export.ExportedProgram, on: bool = False) -> None:
    """Replace eval-mode dropout by its input: functionalisation would take the alias for a fresh tensor. on: have it drop out instead."""
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and getattr(node.target, "_opname", "") in _DROPOUT and len(node.args) > 2 and node.args[2] is False:
                if on:
                    node.args = (*node.args[:2], True)
                    continue
                source = node.args[0]
                node.replace_all_uses_with(source)
                if module is exported.graph_module:
                    exported.graph_signature.replace_all_uses(node.name, source.name)
                module.graph.erase_node(node)
        module.recompile()
