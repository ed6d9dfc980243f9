"""Exports one member with torch.export, as a functional program of ATen ops.

Linear layers, convolutions, norms and attention stay whole ops. Torch's settings are restored afterwards. The
member must be fresh: an export leaves marks on a module.
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
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel

from widepack_artifacts.opset import allowed

from ..ir import ops
from ..ir.torch_internals import (
    aten_packet,
    can_decompose,
    distributions_validate,
    export_below_autograd,
    is_overload,
    op_base_name,
)
from ..spec.entries import FORWARD, method_of
from .call import MemberCall
from .derivatives import keep_marked_stops, stops_marked, weights_fixed
from .named_fields import named_fields
from .patches import decompositions, dropout_copies
from .patches.checked_factorizations import check_in_factorizations
from .patches.context import bound_embeddings, by_places, exportable, scattered_by_places
from .patches.fake_quantize import plain_fake_quantize
from .patches.functions import replaced_functions
from .patches.packed_sequences import padded_sequences
from .patches.tensor_index import look_up_places
from .patches.transforms import transforms_by_autograd


def clone(value: Any) -> Any:
    """Returns a copy of a tensor; any other value is returned as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def run_once(module: nn.Module, call: MemberCall, entry: str) -> tuple[Any, Exception | None]:
    """Runs a member once, before it is exported, and returns its answer or its error.

    The member's code may keep values for good (`functools.cache`). After this run they are real tensors.
    Otherwise the export would leave fake tensors there, and the user's own module would return them from then
    on.
    """
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))  # the member may write into its inputs
    method = module if entry == FORWARD else method_of(module, entry)
    with calm(), weights_fixed(module), torch.random.fork_rng(devices=[]):
        try:
            return method(*args, **kwargs), None
        except Exception as e:  # noqa: BLE001  # whatever the user's code raises
            return None, e


def export(
    module: nn.Module,
    call: MemberCall,
    dim: Any,
    grad: bool = True,
    *,
    gradients: bool = False,
    dropout: bool = False,
    derivatives: bool = False,
) -> torch.export.ExportedProgram:
    """Exports a member with torch.export and makes the program functional.

    Args:
        module: The member, or the wrapper around it.
        call: The example call.
        dim: What torch.export takes for a dynamic axis: `Dim.DYNAMIC` or `Dim.AUTO`.
        grad: Export with derivatives, as in training. Without them torch writes some ops differently.
        gradients: The program must give gradients: results of no_grad blocks are detached in it.
        dropout: Keep dropout active, also in eval mode. Otherwise it is replaced by its input.
        derivatives: Forward takes derivatives, so the export is below autograd (`derivatives.py`).
    """
    # copies, because an export that fails leaves marks on its example
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    dynamic = _dynamic(module, call, dim)
    with calm(), nullcontext() if grad else torch.no_grad():
        with dropout_copies.DropoutCopies() if dropout else nullcontext():
            if derivatives:
                with (
                    weights_fixed(module),
                    sdpa_kernel(SDPBackend.MATH),
                    transforms_by_autograd(),
                    stops_marked(gradients),
                ):
                    exported = export_below_autograd(module, args, kwargs, dynamic)
                check_in_factorizations(exported)
                if gradients:
                    keep_marked_stops(exported)
                _decompose_kernels(exported)
            else:
                exported = torch.export.export(module, args, kwargs, strict=False, dynamic_shapes=dynamic)
        if gradients:
            _detach_blocks(exported)
        _drop_dropout(exported, active=dropout)
        bound_embeddings(exported)
        _read_numbers(exported)
        functional = _functional(exported, twice=derivatives and gradients)
        look_up_places(functional)
        return functional


def _dynamic(module: nn.Module, call: MemberCall, dim: Any) -> Any:
    """Returns `dynamic_shapes` for torch.export: each named axis of the call is dynamic."""
    it = iter(call.leaves)

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        leaf = next(it)
        return dict.fromkeys(leaf.axes, dim) or None

    def of_object(value: Any) -> bool:
        return not isinstance(value, tuple) and named_fields(value) is not None

    def specs(value: Any) -> Any:
        if of_object(value):  # torch.export takes a list for an object of a registered class
            rows, _ = named_fields(value) or ([], None)
            return [specs(v) for _, v in rows]
        return pytree.tree_map(lambda v: specs(v) if of_object(v) else spec(v), value, is_leaf=of_object)

    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    return {n: specs(v) for n, v in bound.arguments.items()}


def _functional(exported: torch.export.ExportedProgram, twice: bool = False) -> torch.export.ExportedProgram:
    """Returns the functional form, with linear, conv, norms and attention as whole ops.

    An op that the format does not have is decomposed, if torch or `patches/decompositions.py` has a
    decomposition. twice: the program has derivatives and must give gradients. Norms are decomposed then,
    because no gradient flows through the mean and the deviation that they give to their own derivative.
    """
    table: dict[Any, Any] = {
        torch.ops.aten.as_strided.default: by_places,
        torch.ops.aten.as_strided_copy.default: by_places,
        torch.ops.aten.as_strided_scatter.default: scattered_by_places,
        **decompositions.decomposition_table(),
        **(get_decompositions(_NORMS) if twice else {}),
    }
    while True:
        functional: torch.export.ExportedProgram = exported.run_decompositions(table)
        unknown = {
            n.target
            for n in functional.graph.nodes
            if n.op == "call_function" and not allowed(ops.name_of(n.target))
        }
        defaults = torch.export.default_decompositions() if unknown - set(table) else {}
        new = {op: defaults[op] for op in unknown - set(table) if op in defaults}
        new |= get_decompositions(list(unknown - set(table) - set(new)))  # of backward passes
        if not new:
            return functional
        table |= new


_NORMS = [
    aten_packet(name)
    for name in (
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
    )
]


def _decompose_kernels(exported: torch.export.ExportedProgram) -> None:
    """Lets ops that the format does not have call their decompositions, if they are composite ops that have
    kernels of their own (`silu_backward`). `run_decompositions` leaves these as they are.
    """
    for node in exported.graph.nodes:
        op = node.target
        if is_overload(op) and not allowed(ops.name_of(op)) and can_decompose(op):
            node.target = get_decompositions([op]).get(op, op)


def _read_numbers(exported: torch.export.ExportedProgram) -> None:
    """Reads `x.item()` by the op below it. For a part of a dynamic dim (`x[-1].item()`), torch's own
    decomposition of `item` fails.
    """
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is torch.ops.aten.item.default:
                    node.target = aten_packet("_local_scalar_dense").default
            module.recompile()


@contextmanager
def calm() -> Iterator[None]:
    """Sets torch up for an export inside a with block, and restores its settings afterwards."""
    validation = distributions_validate()  # validation of arguments branches on data
    # the fast path's nested tensors give other answers at padded positions
    fast = torch.backends.mha.get_fastpath_enabled()
    level = logging.root.manager.disable
    torch.distributions.Distribution.set_default_validate_args(False)
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.ERROR)
    try:
        # Torch prints the whole graph of an export that fails, and warns about its own use of the module's
        # internals. widepack's error says the same in one paragraph.
        with (
            exportable(),
            replaced_functions(),
            plain_fake_quantize(),
            padded_sequences(),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.distributions.Distribution.set_default_validate_args(validation)


_OF_BOUNDS = (
    "aten.linspace.Tensor",
    "aten.linspace.Scalar_T",
    "aten.logspace.Tensor",
    "aten.logspace.Scalar_T",
)


def _detach_blocks(exported: torch.export.ExportedProgram) -> None:
    """Detaches the results of no_grad blocks, because a functional program has no such blocks, and of ops
    that torch calls without derivatives of their bounds (`linspace`).
    """
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            bounded = str(node.target).startswith(_OF_BOUNDS)
            if bounded or _is_no_grad_block(node):
                results = [node] if bounded else list(node.users)
                for result in [u for u in results if isinstance(u.meta.get("val"), torch.Tensor)]:
                    detached = _detached(module.graph, result)
                    if module is exported.graph_module:
                        exported.graph_signature.replace_all_uses(result.name, detached.name)
        module.recompile()


def _is_no_grad_block(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is torch.ops.higher_order.wrap_with_set_grad_enabled
        and node.args[0] is False
    )


def _detached(graph: fx.Graph, result: fx.Node) -> fx.Node:
    """Adds a detach node behind a node, and lets all its users read that one."""
    with graph.inserting_after(result):
        detached = graph.call_function(torch.ops.aten.detach.default, (result,))
    detached.meta = dict(result.meta)
    result.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    return detached


def _drop_dropout(exported: torch.export.ExportedProgram, active: bool = False) -> None:
    """Replaces dropout in eval mode by its input, because functionalisation would take the alias for a new
    tensor.

    active: turn the dropout on instead.
    """
    for module in exported.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if not _is_eval_dropout(node):
                continue
            if active:
                node.args = (*node.args[:2], True)
                continue
            source = node.args[0]
            node.replace_all_uses_with(source)
            if module is exported.graph_module:
                exported.graph_signature.replace_all_uses(node.name, source.name)
            module.graph.erase_node(node)
        module.recompile()


def _is_eval_dropout(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and op_base_name(node.target) in dropout_copies.NAMES
        and len(node.args) > 2
        and node.args[2] is False
    )
