"""Wraps names of torch that have no public form.

Each function says what it does. All of them hold for torch 2.11 to 2.13; a function that also works without
the private name says so. Other modules of the library call these functions instead of the private names: a
new version of torch then needs changes in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch.autograd import forward_ad

# The guard behind torch.inference_mode, without its Python layer: 3 microseconds a call, not 7. Else
# inference_mode itself.
inference_guard: Callable[[bool], AbstractContextManager[Any]] = getattr(
    torch._C, "_InferenceMode", torch.inference_mode
)


def is_overload(op: Any) -> TypeGuard[torch._ops.OpOverload]:
    """Whether a callable is one overload of an op: `torch.ops.aten.linear.default`."""
    return isinstance(op, torch._ops.OpOverload)


def overload_behind(op: Any) -> Any:
    """The overload that `torch.library.custom_op` defined, or the argument itself."""
    return getattr(op, "_opoverload", op)


def schema_of(op: Any) -> Any:
    """The schema of an overload; None for a callable that is not an overload."""
    return getattr(op, "_schema", None)


def base_name(op: torch._ops.OpOverload) -> str:
    """The name of an overload without library and overload: `linear`."""
    return op._schema.name.split("::")[1]


def overload_name(op: torch._ops.OpOverload) -> str:
    """The name of the overload alone: `default`, `Tensor`."""
    return op._overloadname


def can_decompose(op: torch._ops.OpOverload) -> bool:
    """Whether torch implements an op by other ops."""
    return bool(op._can_decompose())


def packet_of(op: torch._ops.OpOverload) -> Any:
    """The packet of an overload, which holds all overloads of the op: `torch.ops.aten.linear`."""
    return op._overloadpacket


def memory_id(value: torch.Tensor) -> int:
    """A number for the memory of a tensor, which all its views share.

    It also exists for tensors without data.
    """
    return int(value.untyped_storage()._cdata)


def symbolic_expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The expression of a symbolic number as it was written, without what is known of its symbols since."""
    return value.node._expr


def known_expression(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The expression of a symbolic number with what is known of its symbols: equal symbols are one."""
    return value.node.expr


def forget_source(file: str) -> None:
    """Removes the source of a generated graph module that torch keeps for tracebacks.

    Does nothing where torch does not have that cache.
    """
    kept = getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", None)
    if isinstance(kept, dict):
        kept.pop(file, None)


def mark_dynamic(x: torch.Tensor, axis: int) -> None:
    """Tells `torch.compile` that a size of an input changes between calls."""
    torch._dynamo.mark_dynamic(x, axis)


def end_allocation_to_pool(device: torch.device, handle: Any) -> None:
    """Tells the allocator that a failed capture of a CUDA graph has ended.

    torch tells it only after a capture that succeeded. Does nothing if the allocator knows, and in a torch
    without the private name.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):  # the allocator's error for a pool to which nothing is allocated
            end(device.index, handle)


def clear_product_workspaces() -> None:
    """Frees the memory that matrix products on CUDA keep for each thread and stream.

    Does nothing in a torch without the private name.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def package_loader() -> Any:
    """The class that loads compiled packages without the compiler; None where torch does not have it."""
    return getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the parameters of a module itself, without its submodules. The dict is the module's own."""
    return module._parameters  # named_parameters leaves out None, and cannot be written to


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the buffers of a module itself, without its submodules. The dict is the module's own."""
    return module._buffers  # named_buffers leaves out None, and cannot be written to


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the direct submodules of a module. The dict is the module's own."""
    return module._modules  # named_children leaves out None and repeated modules


def op_base_name(target: Any) -> str:
    """The name of an op without library and overload, such as `linear`; empty for other callables."""
    return str(getattr(target, "_opname", ""))


def aten_packet(name: str) -> Any:
    """Returns `torch.ops.aten.<name>`, also where the name begins with an underscore."""
    return getattr(torch.ops.aten, name)


def export_below_autograd(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Exports a module as `torch.export.export`, but records ops below autograd: those of a backward pass
    inside forward too.

    Raises: NotImplementedError in a torch without this form of an export.
    """
    from torch.export import _trace  # 1,300 modules, which a process that only loads leaves out

    export = getattr(_trace, "_export", None)
    if export is None or "pre_dispatch" not in inspect.signature(export).parameters:
        raise NotImplementedError("this version of torch cannot export derivatives inside forward")
    exported: torch.export.ExportedProgram = export(
        module, args, kwargs, dynamic_shapes, strict=False, pre_dispatch=False
    )
    return exported


def guard_texts(exported: torch.export.ExportedProgram) -> list[str]:
    """Returns the guards of an exported program as Python expressions."""
    return exported._guards_code


def check_while_exporting(condition: Any, message: Callable[[], str]) -> None:
    """Raises an error if a condition on sizes is false. torch.export records the condition."""
    torch._check(condition, message)  # type: ignore[no-untyped-call]


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal at all calls. Assumes nothing about dynamic sizes."""
    # 600 modules, which a process that only loads leaves out
    from torch.fx.experimental import symbolic_shapes

    return bool(symbolic_shapes.statically_known_true(a == b))


def surely_larger(a: Any, b: Any) -> bool:
    """Whether a size is larger than another one at all calls. Assumes nothing about dynamic sizes."""
    from torch.fx.experimental import symbolic_shapes

    return bool(symbolic_shapes.statically_known_true(a > b))


def distributions_validate() -> bool:
    """Returns whether new `torch.distributions` objects check the values of their arguments."""
    return bool(torch.distributions.Distribution._validate_args)  # only the setter is public


def is_transformed(value: torch.Tensor) -> bool:
    """Returns whether a tensor is inside a transform of `torch.func`. False without the private name."""
    known = getattr(torch._C, "_functorch", None)
    return known is not None and bool(known.is_functorch_wrapped_tensor(value))


def in_transform() -> bool:
    """Returns whether this code runs inside a transform of `torch.func`. False without the private name."""
    known = getattr(torch._C, "_functorch", None)
    return known is not None and known.peek_interpreter_stack() is not None


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Switches off the fast path of torch's transformer layers inside a with block. Its nested tensors give
    other answers at padded positions.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Runs code inside a with block outside of all transforms of `torch.func` around it.

    Without the private name the block runs inside of them.
    """
    if not in_transform():
        yield
        return
    try:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as cleared
    except ImportError:
        yield
        return
    with cleared():
        yield


@contextmanager
def derivatives_taken(report: Callable[[bool], None]) -> Iterator[None]:
    """Calls `report` whenever code inside a with block takes a derivative, by autograd or forward mode.

    The argument says whether what autograd recorded is kept. torch.func reports also a derivative of a
    constant, for which autograd does not run. Reports nothing of autograd in a torch without the private
    names.
    """
    transforms = function_transforms()
    places = [(torch.autograd, "_engine_run_backward"), (transforms, "_autograd_grad")]
    engine, derivative = (getattr(*place, None) for place in places)
    dual: Any = forward_ad.make_dual

    def reported(function: Callable[..., Any], keeps: Callable[..., bool]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            report(keeps(*args))
            return function(*args, **kwargs)

        return run

    table = {(forward_ad, "make_dual"): reported(dual, lambda *_: True)}
    if engine is not None:
        table[places[0]] = reported(engine, lambda outputs, gradients, keep, *_: bool(keep))
    if derivative is not None:
        table[places[1]] = reported(derivative, lambda *_: True)
    with replaced(table):
        yield


@contextmanager
def replaced(table: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replaces attributes of modules and classes inside a with block. table: (owner, name) -> what is there
    meanwhile.
    """
    own = {place: vars(place[0])[place[1]] for place in table if place[1] in vars(place[0])}
    for (owner, name), value in table.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name in table:
            if (owner, name) in own:
                setattr(owner, name, own[owner, name])
            else:  # inherited, or made when it is read
                delattr(owner, name)


def quick_registrations() -> dict[tuple[Any, str], Any]:
    """Returns functions with which torch decomposes a program faster, for `replaced`.

    At each decomposition torch lists the composite ops anew for each library, and registers 700 ops under
    eight keys by a function whose annotations it evaluates each time: a sixth of a small build. A torch
    without these functions stays as it is.
    """
    found: dict[tuple[Any, str], Any] = {}
    utils, base = getattr(getattr(torch, "_export", None), "utils", None), torch._ops.OperatorBase
    if (listing := getattr(utils, "_materialize_cpp_cia_ops", None)) is not None:
        found[utils, "_materialize_cpp_cia_ops"] = cache(listing)
    if all(hasattr(torch.ops.aten.add.Tensor, name) for name in ("py_impl", "py_kernels", "_dispatch_cache")):
        found[base, "py_impl"] = _quick_py_impl
    return found


_py_impl: Any = getattr(torch._ops.OperatorBase, "py_impl", None)


def _quick_py_impl(op: Any, key: Any) -> Any:
    """Does what `OperatorBase.py_impl` of torch does."""
    keys = torch._C.DispatchKey
    if type(key) is not keys or key is keys.Python or key in op.py_kernels:
        return _py_impl(op, key)

    def register(fn: Any) -> Any:
        op.py_kernels[key] = fn
        op._dispatch_cache.clear()
        return fn

    return register


@contextmanager
def decompositions_wrapped(
    name: str, overload: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wraps what torch computes with for an op without numbers, inside a with block. name: as `gru` of aten.

    A torch without these tables computes as it does.
    """
    op = getattr(aten_packet(name), overload)
    table = getattr(getattr(torch, "_decomp", None), "decomposition_table", {})
    kernels, cached = getattr(op, "py_kernels", {}), getattr(op, "_dispatch_cache", {})
    own, before = table.get(op), dict(kernels)
    try:
        if own is not None:
            table[op] = wrap(own)
        kernels.update({key: wrap(kernel) for key, kernel in before.items()})
        cached.clear()
        yield
    finally:
        if own is not None:
            table[op] = own
        kernels.update(before)
        cached.clear()


def traced_tensor() -> Callable[..., torch.Tensor]:
    """`torch.tensor` in operations that an export records; itself in a torch without these."""
    traced: Callable[..., torch.Tensor] = getattr(getattr(torch, "_refs", None), "tensor", torch.tensor)
    return traced


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers, in which an export computes shapes."""
    return isinstance(value, torch._subclasses.FakeTensor)


def function_transforms() -> Any:
    """The module in which torch implements `torch.func`; None where it is elsewhere."""
    return getattr(getattr(torch, "_functorch", None), "eager_transforms", None)


def in_forward_mode() -> bool:
    """Returns whether this code runs in a level of `torch.autograd.forward_ad`. False without the private
    name.
    """
    return getattr(forward_ad, "_current_level", -1) >= 0


def has_tangent(value: torch.Tensor) -> bool:
    """Returns whether a tensor has a tangent of the current level of `torch.autograd.forward_ad`."""
    return forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]


def needs_numbers_alone(values: Iterable[Any]) -> bool:
    """Returns whether a call on these tensors needs its numbers alone: it takes no derivative, is inside no
    transform or mode of torch, and nothing records its ops.
    """
    if torch.compiler.is_compiling() or in_transform() or in_forward_mode():
        return False
    if torch._C._get_tracing_state() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._len_torch_function_stack():
        return False
    grad = torch.is_grad_enabled()
    return all(type(v) is torch.Tensor and not (grad and v.requires_grad) for v in values)


@contextmanager
def without_modes() -> Iterator[None]:
    """Switches off all modes of torch inside a with block, so that functions compute on real tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def as_if_exported() -> Iterator[None]:
    """Lets `torch.compiler.is_compiling` and `is_exporting` return True."""
    names = ("_is_compiling_flag", "_is_exporting_flag")
    before = {name: getattr(torch.compiler, name) for name in names}
    vars(torch.compiler).update(dict.fromkeys(names, True))
    try:
        yield
    finally:
        vars(torch.compiler).update(before)


def is_traced() -> bool:
    """Whether an export records what runs now."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None
