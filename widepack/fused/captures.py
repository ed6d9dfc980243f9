"""Captures the programs of a fused module in the mode, dtype and device of its parts.

Member 0 is captured, and those members whose programs may differ. Plain attributes that differ (an eps, a
stride, a flag) may or may not change the program, and only captures tell. So the attributes that a captured
member reads are recorded: one that it does not read cannot change the program, whatever its value is.

| read by the code | recorded as |
|---|---|
| an attribute, by name, `getattr` or `hasattr`, if it exists or not | that attribute, with all of its value |
| the `__dict__` of a part, not by torch (`vars(self)`); its `__getstate__` | every attribute of that part |

If the attributes that a captured member read have the same values in another member, then both have the same
program, and the other member is not captured.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.attributes import Difference, attributes_of, differences, in_words, texts_of
from ..capture.call import MemberCall
from ..capture.capture import Captured, capture, check_literals
from ..capture.derivatives import weights_fixed
from ..capture.export import calm, clone
from ..checkpoints.differences import bit_equal
from ..errors import CaptureError, MemberMismatch, UsageError
from ..spec.dropout import switched_on
from ..spec.state import StateRequest
from ..verification.same_program import difference
from .programs import FusedEntry, constants_of, refuse_weights
from .recipe import FusedRecipe
from .same_members import SAME_MODULES, class_differences, grouped_by_text, numbered
from .skeleton import ModuleSkeleton
from .torch_module import write_count

_ALL_ATTRIBUTES = "__dict__"
_IGNORED_READERS = ("torch.", "widepack.")  # these read a part's __dict__ for its weights and hooks
_LOCK = threading.RLock()


CapturedReads = tuple[Captured, "AttributeReads"]


def capture_entry(
    recipe: FusedRecipe,
    call: MemberCall,
    member: Callable[[int], nn.Module],
    device: torch.device,
    mode: str,
) -> FusedEntry:
    """Captures member 0, and those members whose programs may differ from its program.

    Args:
        recipe: What the fused module was made of.
        call: The sample on the CPU, in the dtypes of the weights.
        member: Returns a fresh copy of a member on the CPU, by its number.
        device: The device of the fused module.
        mode: `train` or `eval`, for messages.

    Raises:
        CaptureError: Member 0 cannot be captured.
        MemberMismatch: Members have other programs than member 0.
        UsageError: A shared buffer would change.
    """
    count = len(recipe.skeletons)

    def capture(i: int) -> tuple[Captured, AttributeReads]:
        def fresh() -> nn.Module:
            module = member(i)
            return reads.watch(switched_on(module) if recipe.dropout else module)

        with recorded_reads() as reads:
            captured = capture_member(fresh, call, recipe.dynamic is not None, recipe.dropout)
        refuse_weights(captured, by_name, i, recipe.skeletons[i])
        return captured, reads

    by_name = {name: w for w in recipe.weights for name in (w.name, *w.aliases)}
    first, reads = capture(0)
    refuse_programs(recipe.skeletons, (first, reads), capture, mode)
    check_literals(first, member, range(count), [f"member {i}" for i in range(count)])
    shared = [s.name for s in first.states if by_name[s.name].kind == "shared"]
    if shared:
        whose, way = (
            ("passes of one checkpoint", "fuse N copies of the model")
            if recipe.one_model
            else ("members", "give each member its own copy of them (copy.deepcopy)")
        )
        raise UsageError(
            f"{', '.join(shared)} would change in this mode, and is one buffer for all {count} {whose}. Keep "
            f"these layers in eval mode, or {way}"
        )
    first_names = {name: w.name for name, w in by_name.items()}
    constants = constants_of(first, first_names, recipe.skeletons)
    kinds = {
        **{name: w.kind for name, w in by_name.items()},
        **{name: kind for name, (kind, _) in constants.items()},
    }
    values = {name: value.to(device) for name, (_, value) in constants.items()}
    return FusedEntry(first, kinds, first_names, values, count, device, recipe.strategies)


def changed_buffers(module: nn.Module, call: MemberCall) -> list[str]:
    """Runs a module once and returns the buffers that it changed. The module must not be used again."""
    before = {
        n: (b, b.clone(), write_count(b))
        for n, b in module.named_buffers(remove_duplicate=False)
        if b is not None
    }
    args, kwargs = pytree.tree_map(clone, (call.args, call.kwargs))
    with calm(), weights_fixed(module), torch.random.fork_rng(devices=[]):
        try:
            module(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the capture reports the error
            return []
    after = dict(module.named_buffers(remove_duplicate=False))
    return [
        n
        for n, (b, value, writes) in before.items()
        if after.get(n) is not b or write_count(b) != writes or not bit_equal(b, value)
    ]


def capture_member(
    make: Callable[[], nn.Module], call: MemberCall, named_dims: bool, dropout: bool
) -> Captured:
    """Captures a member's program in its mode.

    Args:
        make: Returns fresh copies of the member.
        call: The sample.
        named_dims: Whether the user named the dynamic dims.
        dropout: Whether dropout is on in every mode.
    """
    states = [StateRequest(n) for n in changed_buffers(make(), call)]
    return capture(make, call, named_dims=named_dims, states=states, gradients=True, dropout=dropout)


def refuse_programs(
    skeletons: Sequence[ModuleSkeleton],
    first: CapturedReads,
    capture_member: Callable[[int], CapturedReads],
    mode: str,
) -> None:
    """Refuses members whose program differs from the first member's.

    Only members whose plain attributes differ from the first's are looked at. A member is captured unless a
    captured member has read the same values, because then it has the same program.

    Args:
        skeletons: The members without their weights.
        first: The capture of member 0, and the attributes that it read.
        capture_member: Captures a member by its number.
        mode: `train` or `eval`, for the message.

    Raises:
        MemberMismatch: Members have other programs. The message lists all of them.
    """
    comparison = _ProgramComparison(skeletons[0], first, capture_member)
    found: list[tuple[int, str]] = []
    for i, skeleton in enumerate(skeletons[1:], 1):
        if words := comparison.difference_of(i, skeleton):
            found.append((i, words))
    if found:
        title = f"in {mode} mode members have other programs than member 0"
        raise MemberMismatch(f"{numbered(title, grouped_by_text(found))}. {SAME_MODULES}")


class _ProgramComparison:
    """Compares members' programs with member 0's, with as few captures as possible."""

    def __init__(
        self, skeleton: ModuleSkeleton, first: CapturedReads, capture_member: Callable[[int], CapturedReads]
    ) -> None:
        self.captured, reads = first
        self.capture_member = capture_member
        self.module = skeleton.module
        self.attributes = attributes_of(skeleton.module)
        # what each captured member read, which values it read, and how its program differs (empty: not at
        # all)
        self.known = [(reads, reads.texts(skeleton.module), "")]
        # by attributes: why there is no capture, or how the program of members of another class differs
        self.failed: dict[tuple[tuple[str, str], ...], str] = {}
        self.words: dict[tuple[str, tuple[tuple[str, str], ...]], str] = {}  # one text for all alike members

    def difference_of(self, i: int, skeleton: ModuleSkeleton) -> str:
        """Returns how the program of member i differs, in words, or an empty text."""
        module = skeleton.module
        attributes = differences(self.attributes, attributes_of(module))
        of_classes = class_differences(self.module, module)
        if not attributes and not of_classes:
            return ""
        attributes = (*of_classes, *(d for d in attributes if d.path not in {c.path for c in of_classes}))
        key = tuple((d.path, d.other) for d in attributes)
        how = None
        if not of_classes:  # no read of a class is recorded
            how = next((how for reads, texts, how in self.known if reads.texts(module) == texts), None)
        if how is None:
            how = self.failed.get(key)
        if how is None:
            how = self._capture(i, module, key)
        return self.words.setdefault((how, key), _words(how, attributes, i)) if how else ""

    def _capture(self, i: int, module: nn.Module, key: tuple[tuple[str, str], ...]) -> str:
        try:
            captured, reads = self.capture_member(i)
        except CaptureError as e:
            self.failed[key] = f"it cannot be captured: {e}"
            return self.failed[key]
        how = difference(self.captured, captured)
        if class_differences(self.module, module):
            self.failed[key] = how
        else:
            self.known.append((reads, reads.texts(module), how))
        return how


def _words(how: str, attributes: Sequence[Difference], i: int) -> str:
    listed = in_words(attributes, "member 0", f"member {i}", len(attributes))
    return f"{how}; its modules differ in {listed}"


class AttributeReads:
    """The attributes that the modules of one member read.

    Attributes:
        names: The path of a module and the name of an attribute, for each read.
    """

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self._paths: dict[int, list[str]] = {}
        self._modules: list[nn.Module] = []  # kept alive, because `_paths` goes by id

    def watch(self, module: nn.Module) -> nn.Module:
        """Watches all parts of a module from now on, and returns the module."""
        self._modules.append(module)
        for path, part in module.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(part), []).append(path)
        return module

    def add(self, part: nn.Module, name: str, reader: str) -> None:
        """Records a read. `reader` is the name of the Python module whose code reads."""
        paths = self._paths.get(id(part), ())
        if name == "__getstate__":  # it reads the __dict__ without a lookup
            name, reader = _ALL_ATTRIBUTES, ""
        if paths and not (name == _ALL_ATTRIBUTES and f"{reader}.".startswith(_IGNORED_READERS)):
            self.names.update([(path, name) for path in paths])

    def close(self) -> None:
        """Releases the modules."""
        self._modules.clear()
        self._paths.clear()

    def texts(self, module: nn.Module) -> dict[tuple[str, str], dict[str, str]]:
        """Returns the values, as texts, that a member has in the attributes that were read."""
        parts = dict(module.named_modules(remove_duplicate=False))
        return {
            (path, name): texts_of(parts[path], None if name == _ALL_ATTRIBUTES else name, parts.values())
            for path, name in sorted(self.names)
        }


@contextmanager
def recorded_reads() -> Iterator[AttributeReads]:
    """Records attribute reads while a member is captured. Give each module of the member to `watch`."""
    reads, original = AttributeReads(), nn.Module.__getattribute__
    was_overridden = "__getattribute__" in vars(nn.Module)

    def read(self: nn.Module, name: str) -> Any:
        caller = sys._getframe(1)  # inspect.stack is too slow here
        reads.add(self, name, caller.f_globals.get("__name__", ""))
        return original(self, name)

    with _LOCK:
        nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
        try:
            yield reads
        finally:
            if was_overridden:
                nn.Module.__getattribute__ = original  # type: ignore[method-assign]
            else:
                del nn.Module.__getattribute__
            reads.close()
