"""Exports one member with torch.export, as a functional program of ATen ops.

Linear layers, convolutions, norms and attention stay whole ops. Torch's settings are restored afterwards. The
member must be fresh: an export leaves marks on a module.

An export that fails is repeated in another way, if the error shows which (`MemberExporter`): below autograd,
without derivatives, with `int(x)` of a tensor as a number, or with branches on numbers of selected rows.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._decomp import get_decompositions
from torch.distributions import Distribution
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence

from widepack_artifacts.literals import Literal
from widepack_artifacts.opset import allowed

from ..ir import ops
from ..ir.torch_internals import (
    aten_packet,
    buffers_of,
    can_decompose,
    distributions_validate,
    export_below_autograd,
    is_fake,
    is_overload,
    is_transformed,
    op_base_name,
    parameters_of,
    quick_registrations,
    replaced,
    submodules_of,
    without_fast_path,
)
from ..spec.entries import FORWARD, callable_of
from .attributes import attributes_of
from .call import MemberCall, keywords_beyond
from .derivatives import (
    DerivativesTaken,
    UnseenResult,
    derivatives_watched,
    keep_marked_stops,
    stops_marked,
    takes_derivatives,
    weights_fixed,
)
from .explain import has_no_derivative, is_of_data, source_of
from .exported import check_in_factorizations, graph_modules, put_in_place
from .guards import ExportEvents, watched
from .named_fields import named_fields
from .patches import decompositions, dropout_copies, fake_quantize, functions, packed_sequences
from .patches.functions import bound_embeddings, by_places, scattered_by_places
from .patches.member_values import MemberValues
from .patches.numbers import Names, conversions, numbers_kept
from .patches.recurrent_shapes import recurrent_shapes
from .patches.row_branches import rows_assumed
from .patches.tensor_index import look_up_places
from .patches.transforms import transforms_by_autograd
from .state import MEMBER, StatefulWrapper, StateRequests, assignments, known_answer
from .trial import same_without_rows


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
    method = callable_of(module, entry)
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
    # a program of forward's own derivatives needs a layer's steps
    shapes = nullcontext() if derivatives else recurrent_shapes()
    with calm(), shapes, nullcontext() if grad else torch.no_grad():
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
    *map(aten_packet, ("native_layer_norm", "native_group_norm", "native_batch_norm")),
    *map(aten_packet, ("_native_batch_norm_legit", "_native_batch_norm_legit_functional")),
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
    for module in graph_modules(exported):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.item.default:
                node.target = aten_packet("_local_scalar_dense").default


@contextmanager
def calm() -> Iterator[None]:
    """Sets torch up for an export inside a with block, and restores its settings afterwards."""
    validation = distributions_validate()  # validation of arguments branches on data
    level = logging.root.manager.disable
    torch.distributions.Distribution.set_default_validate_args(False)
    logging.disable(logging.ERROR)
    try:
        # Torch prints the whole graph of an export that fails, and warns about its own use of the module's
        # internals. widepack's error says the same in one paragraph.
        with (
            replaced(_REPLACEMENTS | quick_registrations()),
            without_fast_path(),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.distributions.Distribution.set_default_validate_args(validation)


_REPLACEMENTS = functions.REPLACEMENTS | fake_quantize.REPLACEMENTS | packed_sequences.REPLACEMENTS
"""What torch has meanwhile in place of its own functions."""
_OF_BOUNDS = tuple(f"aten.{op}.{of}" for op in ("linspace", "logspace") for of in ("Tensor", "Scalar_T"))


def _detach_blocks(exported: torch.export.ExportedProgram) -> None:
    """Detaches the results of no_grad blocks, because a functional program has no such blocks, and of ops
    that torch calls without derivatives of their bounds (`linspace`).
    """
    for module in graph_modules(exported):
        for node in list(module.graph.nodes):
            bounded = str(node.target).startswith(_OF_BOUNDS)
            if bounded or _is_no_grad_block(node):
                results = [node] if bounded else list(node.users)
                for result in [u for u in results if isinstance(u.meta.get("val"), torch.Tensor)]:
                    detached = _detached(module.graph, result)
                    if module is exported.graph_module:
                        exported.graph_signature.replace_all_uses(result.name, detached.name)


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
    for module in graph_modules(exported):
        for node in filter(_is_eval_dropout, list(module.graph.nodes)):
            if active:
                node.args = (*node.args[:2], True)
            else:
                put_in_place(exported, node, node.args[0])


def _is_eval_dropout(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and op_base_name(node.target) in dropout_copies.NAMES
        and len(node.args) > 2
        and node.args[2] is False
    )


@dataclass(frozen=True, kw_only=True)
class ExportAttempt:
    """An export by torch.export, or the error that it raised.

    attributes: the module's plain attributes before the export. grad: whether derivatives are kept.
    derivatives: whether the export is below autograd. differentiated: the derivatives that forward took.
    prefix: what stands before the names of weights in the export of a `StatefulWrapper`. assigned: buffers
    that the module replaced by other tensors. literals: what its code read from the member's own tensors.
    """

    module: nn.Module
    attributes: Mapping[str, str] | None
    grad: bool
    derivatives: bool
    differentiated: DerivativesTaken
    prefix: str
    assigned: set[str]
    seen: ExportEvents
    exported: torch.export.ExportedProgram | None
    error: Exception | None
    literals: tuple[Literal, ...] = ()


@dataclass(frozen=True)
class MemberExporter:
    """Exports fresh members of one kind with torch.export. wrap: the result needs a `StatefulWrapper`."""

    make: Callable[[], nn.Module]
    call: MemberCall
    entry: str
    requests: StateRequests
    wrap: bool
    gradients: bool
    dropout: bool

    def first(self, module: nn.Module) -> ExportAttempt:
        """Exports with all named dims dynamic.

        If forward takes derivatives, the export is repeated below autograd, also if it did not fail: it may
        have taken a derivative for a constant. If torch lacks a derivative, the export is repeated without
        derivatives. That is the second choice, because torch may then write several ops as one op that no
        program can have.
        """
        attempt = self.attempt(module, Dim.DYNAMIC, grad=True)
        if attempt.differentiated.taken or (attempt.error is not None and takes_derivatives(attempt.error)):
            return self.attempt(self.make(), Dim.DYNAMIC, grad=True, derivatives=True)
        if attempt.error is not None and has_no_derivative(attempt.error):
            # another module, because a failed export leaves marks on it
            return self.attempt(self.make(), Dim.DYNAMIC, grad=False)
        return attempt

    def attempt(self, module: nn.Module, dim: Any, *, grad: bool, derivatives: bool = False) -> ExportAttempt:
        """Exports a module; an error is returned, not raised.

        The export is repeated where `int(x)` of a tensor can be a number of the program, and where a branch
        asks whether there are rows.
        """
        kept: list[Names] = []
        first = attempt = self._once(module, dim, grad, derivatives, kept)
        lines: set[str] | None = None
        reads: bool | None = None  # whether the code reads values of the member's own tensors
        while attempt.error is not None and is_of_data(attempt.error):
            names = conversions(attempt.error)
            if names is not None and all(names is not n for n in kept):
                kept.append(names)
            elif reads is None and not any(map(is_fake, module.parameters())):
                reads = True
            elif lines is None and not self.requests.buffers and not self.requests.leaves:
                lines = set()
            else:
                break
            # another module, because a failed export leaves marks on it
            attempt = self._once(self.make(), dim, grad, derivatives, kept, lines, bool(reads))
            reads = bool(attempt.literals) if reads else reads
        if isinstance(attempt.error, TypeError):
            return first
        final = derivatives or not attempt.differentiated.taken  # else `first` exports once more
        if lines and attempt.exported is not None and final and not self._holds(attempt.exported, lines):
            return first
        return attempt

    def _holds(self, exported: torch.export.ExportedProgram, lines: set[str]) -> bool:
        """Whether a program that assumes rows at some lines holds without rows too."""
        member = self.make()
        with calm(), weights_fixed(member), torch.random.fork_rng(devices=[]):
            inputs = self.call.args, self.call.kwargs
            answer = known_answer(callable_of(member, self.entry))
            return same_without_rows(answer, exported.module(), lines, inputs)

    def _once(
        self,
        module: nn.Module,
        dim: Any,
        grad: bool,
        derivatives: bool,
        kept: Sequence[Names],
        lines: set[str] | None = None,
        reads: bool = False,
    ) -> ExportAttempt:
        """Exports a module once.

        kept: the modules where `int` and `float` of a tensor are replaced. lines: receives the lines that
        select rows, if branches on their number are followed. reads: whether values of the member's own
        tensors may be read.
        """
        buffers, leaves = self.requests.buffers, self.requests.leaves
        keywords = keywords_beyond(module, self.call, self.entry)
        of_call = self.entry != FORWARD or buffers or leaves or keywords
        wrapped = bool(of_call or derivatives or self.wrap or _shadows_graph(module))
        attributes = attributes_of(module)
        values = MemberValues(module, buffers) if reads else None
        options = {"gradients": self.gradients, "dropout": self.dropout, "derivatives": derivatives}
        exported, error, root = None, None, module
        with (
            assignments(module) as assigned,
            watched() as seen,
            numbers_kept(kept),
            rows_assumed(lines) if lines is not None else nullcontext(),
            derivatives_watched() as taken,
        ):
            if wrapped:
                root = StatefulWrapper(module, self.entry, buffers, leaves, keywords, derivatives)
            try:
                with values or nullcontext():
                    exported = export(root, self.call, dim, grad, **options)
                refuse_unseen(exported, module)
            except Exception as e:  # noqa: BLE001  # whatever torch raises is explained
                exported, error = None, e
        return ExportAttempt(
            module=module,
            attributes=attributes,
            grad=grad,
            derivatives=derivatives,
            differentiated=taken,
            prefix=MEMBER if wrapped else "",
            assigned=assigned,
            seen=seen,
            exported=exported,
            error=error,
            literals=tuple(values.literals.values()) if values is not None else (),
        )


def has_dataclass(answer: Any) -> bool:
    """Whether a result has a dataclass, a distribution or a packed sequence, which torch.export does not know
    or make again, and `StatefulWrapper` converts.
    """
    leaves = pytree.tree_leaves(answer, is_leaf=lambda v: isinstance(v, PackedSequence))
    return any(is_dataclass(leaf) or isinstance(leaf, (Distribution, PackedSequence)) for leaf in leaves)


def _shadows_graph(module: nn.Module) -> bool:
    """Whether a submodule or weight has a name that `fx.GraphModule` uses itself, for example `code`."""
    names = (*parameters_of(module), *buffers_of(module), *submodules_of(module))
    return any(hasattr(fx.GraphModule, name) for name in names)


def refuse_unseen(exported: torch.export.ExportedProgram, module: nn.Module) -> None:
    """Refuses a program that reads a constant without values, unless the member's own tensors have none.

    Inside a transform, torch may compute a result where the export cannot record it. The export then takes
    the result for a constant, which has a shape, but no values. Raises: UnseenResult, with the line that
    computed the constant, or reads it.
    """
    empty = {
        name
        for name, value in exported.constants.items()
        if is_fake(value) or (isinstance(value, torch.Tensor) and is_transformed(value))
    }
    if not empty or any(map(is_fake, (*module.parameters(), *module.buffers()))):
        return
    names = {s.arg.name for s in exported.graph_signature.input_specs if s.target in empty}
    constants = [node for node in exported.graph.nodes if node.name in names and node.users]
    if constants:
        line = next(filter(None, (source_of(node, code=True) for node in constants)), "")
        raise UnseenResult("the result of a transform was taken for a constant", line)
