"""Loads checkpoints into members of a factory, as `nn.Module.load_state_dict` does.

What a build compares and stores is the state of a member after its checkpoint was loaded: modules may convert
older weights (hooks, versions), set the sizes of buffers, or keep extra state.

| the module | what happens |
|---|---|
| its load only copies (`copies`); equal names and shapes | nothing is loaded; the weights stay mapped |
| the same, with other floating dtypes | the weights stay mapped and are converted when they are read |
| any other | one member at a time is loaded, and what differs from the file is kept (`kept`) |
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, MemberMismatch, UsageError
from ..ir.torch_internals import memory_id
from ..spec.dtypes import dense_instead, dtype_of
from .checkpoint import Checkpoint, is_floating, unwrapped
from .differences import Compared, bit_equal, differences, key_hints, mismatch, tied_names
from .eval_mode import eval_results, has_own_mode, in_eval_mode
from .factory import Factory
from .model_names import known_names, prefix_of, under_model_names
from .state_dict import TensorInfo, info_of, is_extra_state

COUNTER = "num_batches_tracked"
"""The counter that norms of torch have since their version 2, which is torch 1.0."""
_SMALL_BYTES = 1 << 20
_LOAD = "_load_from_state_dict"
_COPIES: tuple[object, ...] = (
    getattr(nn.Module, _LOAD),
    getattr(_NormBase, _LOAD),  # adds a counter that an older file lacks
    getattr(_InstanceNorm, _LOAD),  # refuses statistics of older files
)
_OF_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_HOOKS = (*_LOAD_HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks")


@dataclass(frozen=True)
class Verbatim:
    """Whether a module takes its own state dict as it is: versions, with the versions of its submodules;
    bare, without them.
    """

    versions: bool = True
    bare: bool = True


class MemberLoader:
    """Loads the checkpoints of members of one factory.

    ignore: patterns of names that are not the model's and are left out. state: the state of the first member
    after it was loaded, or of a fresh member. versions: of its submodules. copies: whether every load has
    only copied. plain: whether no member has code of its own that may change tensors in a load, or sets
    values in `eval()`. set_by_eval: what `eval()` sets beside the weights. own_mode: whether a member has a
    `train()` or `eval()` of its own.
    """

    def __init__(self, factory: Factory, ignore: Sequence[str] = ()) -> None:
        self.factory, self.ignore = factory, tuple(ignore)
        self.state: dict[str, Tensor] = {}
        self.versions: dict[str, Any] = {}
        self.copies = self.plain = True
        self.set_by_eval: list[str] = []
        self.own_mode = False
        self._fresh: dict[object, nn.Module] = {}
        self._first: Checkpoint | None = None
        self._changed: set[bool] = set()  # with versions, or without: the forms that a load has changed

    def load(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns a member's state, with the versions and the extra state of its submodules.

        Raises: MemberMismatch, without the name of the checkpoint, if the module does not take it;
        UsageError.
        """
        module, given = self._module(checkpoint)
        self.plain = self.plain and (given.program is not None or copies_tensors(module))
        if self.factory.brings_weights:
            names = set(given.names) == set(state_of(module)) or given.program is not None
            loaded = given if names else _after(module, given)
        elif not copies(module) or (copied := _copied(given, state_of(module))) is None:
            self._fresh.clear()  # this module is used up, also if it refuses the file
            loaded = self._loaded(module, given)
        else:
            loaded = copied
        if not self.state:
            self.state = state_of(module)
            self.versions = dict(getattr(module_state(module), "_metadata", None) or {})
        self._first = self._first or loaded
        if has_own_mode(module):
            self.own_mode = True
            self._check_eval(loaded)
        return loaded

    def _check_eval(self, loaded: Checkpoint) -> None:
        """Refuses a member whose `eval()` changes its weights. Raises: UsageError."""
        module = self.factory.fresh(loaded)
        if not self.factory.brings_weights:
            load(module, loaded.given or loaded)
        found = eval_results(module, f"checkpoint {loaded.label}")
        self.set_by_eval = self.set_by_eval or found
        self.plain = self.plain and not self.set_by_eval

    def base(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the weights of a base, which may be some of the model's, under the model's names.

        Raises: MemberMismatch; UsageError.
        """
        named = under_model_names(checkpoint, self.state)
        if not self.factory.converts:
            return named
        return self.factory.converted(named, self.factory.fresh(named))

    def verbatim(self) -> Verbatim:
        """Returns whether the module takes the state of the first member as it is."""
        if self.copies or self._first is None or self.factory.brings_weights:
            return Verbatim()
        of_form = [f not in self._changed and self._round_trip(self._first, f) for f in (True, False)]
        return Verbatim(*of_form)

    def _round_trip(self, member: Checkpoint, versions: bool) -> bool:
        state = member.state_dict()
        if not versions:
            vars(state).pop("_metadata", None)
        try:
            module = self.factory.of(member, state)
            load(module, member, state)
        except (MemberMismatch, UsageError):
            return False
        after = state_of(module)
        return list(after) == list(member.tensors()) and all(
            bit_equal(after[name], member.get(name)) for name in after
        )

    def _loaded(self, module: nn.Module, given: Checkpoint) -> Checkpoint:
        """Loads a member for real, and returns its state."""
        plain = copies(module)
        try:
            load(module, given)
        except MemberMismatch as e:
            fresh = state_of(module)
            if any(map(is_lazy, fresh.values())):
                raise
            if not plain:
                raise MemberMismatch(f"{e} {key_hints(given, fresh)}".strip()) from None
            if why := mismatch(_comparable(given, fresh), fresh, self.factory.takes_state_dict):
                raise MemberMismatch(why) from None
            raise
        self.copies = False
        self._note_change(module, given)
        return _after(module, given)

    def _note_change(self, module: nn.Module, given: Checkpoint) -> None:
        """Notes that the load has changed a weight of a file in the model's own form."""
        versions = given.versions()
        own = getattr(module_state(module), "_metadata", None) or {}
        if any(row.get("version") != own.get(path, {}).get("version") for path, row in versions.items()):
            return  # an older version explains it
        infos = given.tensors()
        for name, tensor in state_of(module).items():
            if name in infos and infos[name].shape == tensor.shape:
                stored = given.get(name)
                if not bit_equal(stored if stored.dtype == tensor.dtype else stored.to(tensor.dtype), tensor):
                    self._changed.add(bool(versions))
                    return

    @property
    def ragged(self) -> bool:
        """Whether members may have other shapes."""
        return self.factory.takes_state_dict or not self.copies

    def mismatch(self, checkpoints: Sequence[Checkpoint], reasons: Sequence[str]) -> MemberMismatch:
        """Returns one error for all checkpoints that the model does not take.

        reasons: for each checkpoint why it is not taken; "" if it is.
        """
        labels = [f"checkpoint {i} ({c.label})" for i, c in enumerate(checkpoints)]
        modules = [] if self.factory.brings_weights else [self._module(c) for c in checkpoints]
        if modules and all(copies(module) for module, _ in modules):
            states = [state_of(module) for module, _ in modules]
            given = [_comparable(c, state) for (_, c), state in zip(modules, states)]
            different = differences(Compared.of(given, labels, states[0], self.factory.takes_state_dict))
            if different.lines:
                return MemberMismatch(different.describe())
        texts = [f"{label}: {why}" for label, why in zip(labels, reasons) if why]
        head = "" if len(texts) == 1 else f"{len(texts)} of {len(checkpoints)} checkpoints do not fit:\n- "
        return MemberMismatch(head + "\n- ".join(texts))

    def _module(self, checkpoint: Checkpoint) -> tuple[nn.Module, Checkpoint]:
        """Returns a fresh member for a checkpoint, and the checkpoint under its names."""
        if self.factory.brings_weights:
            module = self.factory.of(checkpoint, checkpoint.mapped_state_dict())
            return module, under_model_names(checkpoint, module_state(module))
        if not self.factory.takes_state_dict:
            module = self._fresh.get(()) or self.factory.of(checkpoint, {})
            self._fresh = {(): module}
            return module, self._converted(self._named(checkpoint, module), module)
        module = self._sized(checkpoint)
        named = self._named(checkpoint, module)
        if named.names != checkpoint.names:  # the factory reads sizes by the model's names
            module = self._made(named)
        return module, self._converted(named, module)

    def _named(self, checkpoint: Checkpoint, module: nn.Module) -> Checkpoint:
        return without_ignored(checkpoint, module_state(module), self.ignore)

    def _converted(self, named: Checkpoint, module: nn.Module) -> Checkpoint:
        return self.factory.converted(named, module) if self.factory.converts else named

    def _made(self, checkpoint: Checkpoint) -> nn.Module:
        """Returns a fresh member of a factory that reads sizes; one that only copies serves several times."""
        key = tuple(sorted(checkpoint.tensors().items()))
        module = self._fresh.get(key)
        if module is None:
            module = self.factory.of(checkpoint, checkpoint.mapped_state_dict())
            self._fresh = {key: module}
        return module

    def _sized(self, checkpoint: Checkpoint) -> nn.Module:
        """Returns a fresh member of a factory that reads sizes from a checkpoint under its own names, or
        under those without a prefix if the factory fails with these.
        """
        try:
            return self._made(checkpoint)
        except UsageError:
            prefixes: dict[str, None] = {}
            for name in checkpoint.names:
                parts = name.split(".")
                prefixes.update((".".join(parts[:i]) + ".", None) for i in range(1, len(parts)))
            for prefix in list(prefixes)[:50]:
                inner = checkpoint.under(prefix)
                try:
                    module = self._made(inner)
                except UsageError:
                    continue
                if all(name in inner.names for name in module_state(module)):
                    return module
            raise


def without_ignored(checkpoint: Checkpoint, model: Mapping[str, object], ignore: Sequence[str]) -> Checkpoint:
    """Returns a checkpoint under the model's names, without what is ignored. Raises: UsageError."""
    named = _under(checkpoint, model)
    beside = {}
    for name, stored in named.names.items():
        pattern = next((p for p in ignore if fnmatchcase(name, p) or fnmatchcase(stored, p)), None)
        if pattern is None or (name in model and is_extra_state(name)):
            continue  # extra state is loaded, and only not stored
        if name in model:
            raise UsageError(
                f"ignore: the pattern {pattern!r} matches {name}, a weight of the model, which would keep "
                "the values of its constructor; give a pattern that matches only what the model does not have"
            )
        beside[stored] = name
    if not beside:
        return named
    whole = checkpoint.names
    return _under(unwrapped(checkpoint.renamed({n: s for n, s in whole.items() if s not in beside})), model)


def patterns_of(ignore: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of names to ignore, each once. Raises: UsageError for other values."""
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern or not pattern.isprintable() or len(pattern) > 1000:
            raise UsageError(f"ignore: {pattern!r:.60} is no pattern of names, such as 'criterion.*'")
    return tuple(dict.fromkeys(patterns))


def ignored(name: str, ignore: Sequence[str]) -> bool:
    """Returns whether a name is one that a user ignores."""
    return any(fnmatchcase(name, pattern) for pattern in ignore)


def load(module: nn.Module, given: Checkpoint, state: dict[str, Any] | None = None) -> None:
    """Loads a checkpoint, under the model's names, into a fresh module.

    state: the checkpoint's state dict, if it is known. Names of a tied weight that the file lacks are added:
    safetensors stores one of them. Raises: MemberMismatch with torch's reason.
    """
    if state is None and copies(module) and (copied := _copied(given, state_of(module))) is not None:
        with torch.no_grad():
            for name, tensor in state_of(module).items():
                if name in copied.names:
                    copied.copy_into(tensor, name)
        return
    state = given.state_dict() if state is None else state
    sized = {name: t for name, t in state_of(module).items() if not is_lazy(t)}
    canonical, _ = tied_names(sized, [given.tensors()])
    for name, first in canonical.items():
        if name not in state:
            state[name] = state[first]
    try:
        module.load_state_dict(state)
    except Exception as e:
        lines = str(e).split("\n\t", 1)
        reason = " ".join((lines[1] if isinstance(e, RuntimeError) and lines[1:] else f"{e}").split())[:600]
        kind = "" if isinstance(e, RuntimeError) else f"{type(e).__name__}: "
        reason, way_out = reason.rstrip(". "), ""
        if "Unexpected key(s)" in reason:
            way_out = (
                "; leave out names that are not the model's by a pattern, such as --ignore 'criterion.*'"
            )
        raise MemberMismatch(f"the model's load_state_dict does not take it: {kind}{reason}{way_out}") from e


def filled(factory: Factory, checkpoint: Checkpoint, member: str) -> nn.Module:
    """Returns the member of a checkpoint that `MemberLoader` has read, in eval mode.

    The checkpoint is loaded as it was given: a hook must not see its own result. Then values that the build
    has replaced (approximate factors) are written. member: its name, for messages.
    Raises: UsageError; MemberMismatch if the module does not take the weights.
    """
    given = checkpoint.given or checkpoint
    module = factory.fresh(checkpoint)
    try:
        if not factory.brings_weights:
            load(module, given)
    except MemberMismatch as e:
        raise MemberMismatch(f"member {member}: {e}") from e
    if replaced := checkpoint.replaced:
        with torch.no_grad():
            for name, tensor in state_of(module).items():
                if name in replaced:
                    tensor.copy_(replaced[name])
    return in_eval_mode(module)


def copies(module: nn.Module) -> bool:
    """Returns whether `load_state_dict` of the module's own names and shapes copies each tensor, and does
    nothing else.

    No part has hooks, extra state, or its own way to load and save; no tensor is of a subclass, and no two
    tensors overlap.
    """
    for part in module.modules():
        kind, own = type(part), vars(part)
        if any(getattr(kind, name) is not getattr(nn.Module, name) or name in own for name in _OF_STATE):
            return False
        if any(own.get(name) for name in _HOOKS):
            return False
    return copies_tensors(module)


def copies_tensors(module: nn.Module) -> bool:
    """Returns whether no code of the user's can change tensors when the module loads its own names.

    Extra state is allowed: where it is equal, it is loaded equally. So are hooks of torch, which convert
    other names.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return False
    for part in module.modules():
        kind, own = type(part), vars(part)
        if getattr(kind, _LOAD) not in _COPIES or _LOAD in own:
            return False
        if not all(_of_torch(hook) for name in _LOAD_HOOKS for hook in (own.get(name) or {}).values()):
            return False
    places: dict[int, Tensor] = {}
    for tensor in state_of(module).values():
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return False
        first = places.setdefault(memory_id(tensor), tensor)
        if first is not tensor and not _same_place(first, tensor):
            return False
    return True


def _of_torch(hook: Any) -> bool:
    """Returns whether a hook is one that torch registers for its own parametrizations."""
    inner = getattr(hook, "hook", hook)  # torch wraps the hooks that take the module
    inner = getattr(inner, "__func__", inner)
    where = getattr(inner, "__module__", None) or type(inner).__module__
    return str(where).startswith("torch.")


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (a.storage_offset(), a.shape, a.stride()) == (b.storage_offset(), b.shape, b.stride())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and the saved buffers of a module, under the names that programs use.

    Raises: UsageError for a sparse one.
    """
    state: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        own = vars(part)
        unsaved = own["_non_persistent_buffers_set"]
        for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            if tensor is not None and name not in unsaved:
                if not is_lazy(tensor) and tensor.layout is not torch.strided:
                    kind = type(module).__name__
                    raise UsageError(f"model {kind}: {dense_instead(prefix + name, tensor.layout)}")
                state[prefix + name] = tensor if is_lazy(tensor) else tensor.detach()
    return state


def module_state(module: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a module. Raises: UsageError for an error of the module's own code."""
    try:
        return module.state_dict()
    except Exception as e:
        words = " ".join(str(e).split())[:300]
        raise UsageError(f"state_dict() of {type(module).__name__} raised {type(e).__name__}: {words}") from e


def _under(checkpoint: Checkpoint, model: Mapping[str, object]) -> Checkpoint:
    named = under_model_names(checkpoint, model)
    inner = named.under(prefix) if (prefix := prefix_of(named, model)) else named
    return inner if known_names(inner, model) > known_names(named, model) else named


def _copied(given: Checkpoint, model: Mapping[str, Tensor]) -> Checkpoint | None:
    """Returns the state of a module whose load only copies; None if the names or shapes are not its own."""
    infos = given.tensors()
    canonical, _ = tied_names(model, [infos])
    if any(n not in model for n in infos) or any(canonical.get(n, n) not in infos for n in model):
        return None
    if given.extra_state() or any(infos[name].shape != model[name].shape for name in infos):
        return None
    copied = in_dtypes_of(given, model)
    same = all(info.dtype == info_of(model[n]).dtype for n, info in copied.tensors().items())
    return copied if same else None


def _comparable(given: Checkpoint, model: Mapping[str, Tensor]) -> Checkpoint:
    """Returns a checkpoint with what a load that only copies would add or convert."""
    return in_dtypes_of(with_counters(given, model), model)


def with_counters(checkpoint: Checkpoint, expected: Iterable[str]) -> Checkpoint:
    """Returns a checkpoint with the counters of batch norms that files of torch before 1.0 do not have.

    torch's norms add a counter of 0 when they load an older file.
    """
    infos = checkpoint.tensors()
    versions = checkpoint.versions()
    added = {}
    for name in expected:
        path, _, last = name.rpartition(".")
        version = versions.get(path, {}).get("version") or 1
        old = type(version) is int and version < 2  # a file may have anything there
        if name not in infos and last == COUNTER and old and name[: -len(COUNTER)] + "running_mean" in infos:
            added[name] = TensorInfo("int64", ())
    if not added:
        return checkpoint

    def read(name: str) -> Tensor:
        return torch.tensor(0) if name in added else checkpoint.get(name)

    return checkpoint.as_loaded({**infos, **added}, read, checkpoint.extra_state(), versions)


def in_dtypes_of(given: Checkpoint, model: Mapping[str, Tensor]) -> Checkpoint:
    """Returns a checkpoint in the floating dtypes of a model, into which `load_state_dict` converts."""
    infos = given.tensors()
    other: dict[str, TensorInfo] = {}
    for name in infos:
        dtype = "" if name not in model else info_of(model[name]).dtype
        if infos[name].dtype != dtype and is_floating(infos[name].dtype) and is_floating(dtype):
            other[name] = infos[name]._replace(dtype=dtype)
    if not other:
        return given

    def read(name: str) -> Tensor:
        return given.get(name).to(dtype_of(other[name].dtype)) if name in other else given.get(name)

    return given.as_loaded({**infos, **other}, read, given.extra_state(), given.versions())


def _after(module: nn.Module, given: Checkpoint) -> Checkpoint:
    """Returns the state of a module that has loaded a checkpoint."""
    after = state_of(module)
    infos = {name: info_of(tensor) for name, tensor in after.items()}
    values = {name: _value(given, name, tensor) for name, tensor in after.items()}
    stored = module_state(module)
    extra = {name: value for name, value in stored.items() if is_extra_state(name)}
    return given.as_loaded(
        infos, lambda name: values[name](), extra, getattr(stored, "_metadata", None) or {}
    )


def _value(given: Checkpoint, name: str, tensor: Tensor) -> Callable[[], Tensor]:
    """Returns what gives a tensor of a loaded module: the file, if it has the same bits, or a copy."""
    if name in given.tensors():
        stored = given.get(name)
        if bit_equal(stored, tensor):
            return partial(given.get, name)
        if stored.dtype != tensor.dtype and bit_equal(stored.to(tensor.dtype), tensor):
            dtype = tensor.dtype
            return lambda: given.get(name).to(dtype)
    own = kept(tensor)
    return lambda: own


def kept(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of a tensor. A large one is mapped from a file that has no name.

    The file takes space until the copy is released, and the system may write its pages out of memory.
    Raises: CheckpointError if there is no space.
    """
    tensor = tensor.detach()
    size = tensor.numel() * tensor.element_size()
    if size < _SMALL_BYTES or tensor.device.type != "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    with tempfile.NamedTemporaryFile(prefix="widepack-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a page without space ends the process
        except OSError as e:
            raise CheckpointError(
                f"{tempfile.gettempdir()}: {size:,} bytes for a loaded weight: {e.strerror}; set TMPDIR to a"
                " folder with more space"
            ) from e
        mapped = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    copy = mapped.view(tensor.dtype).reshape(tensor.shape)
    return copy.copy_(tensor)
