"""Checks that live modules can be members of one fused module.

They must have one architecture, dtype, device and mode, and one program up to their weights.
`refuse_mismatches` compares what is visible without running anything. Plain attributes that differ (an eps, a
stride, a flag) may or may not change the program, and only captures tell: `refuse_programs` compares those.
One error lists all differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..capture.attributes import Difference, attributes_of, differences, in_words
from ..capture.capture import Captured
from ..errors import CaptureError, MemberMismatch, UsageError
from ..verification.program_difference import difference
from .attribute_reads import AttributeReads
from .class_differences import class_differences
from .member_differences import (
    SAME_MODULES,
    attributes_of_matching_parts,
    grouped_by_text,
    module_differences,
    numbered,
)
from .skeleton import ModuleSkeleton, weights_of
from .torch_module import hooks_of_gradients


def refuse_mismatches(models: Sequence[nn.Module], who: str = "", options: bool = False) -> None:
    """Refuses modules that differ from the first in more than their weights.

    Args:
        models: The members.
        who: What the error message begins with.
        options: Whether plain attributes must be equal too.

    Raises:
        MemberMismatch: Members differ. The message lists all differences.
        UsageError: A weight is lazy, or not a plain dense tensor.
    """
    for i, model in enumerate(models):
        _refuse_special_weights(i, model)
    own = attributes_of(models[0])
    found: list[tuple[int, str]] = []
    for i, model in enumerate(models[1:], 1):
        words = list(module_differences(models[0], model))
        if options or words:  # where members differ anyway, the message names the attributes too
            other = differences(own, attributes_of(model))
            listed = other if options else attributes_of_matching_parts(other, models[0], model)
            words += [
                f"{d.path} is {d.other or 'not there'}, in member 0 {d.one or 'not there'}" for d in listed
            ]
        found += [(i, w) for w in words]
    if found:
        title = f"{who}{': ' if who else ''}the members differ from member 0"
        raise MemberMismatch(f"{numbered(title, grouped_by_text(found))}. {SAME_MODULES}")
    _refuse_one_object(models)


def _refuse_one_object(models: Sequence[nn.Module]) -> None:
    """Raises UsageError if two members are one object that has weights or buffers."""
    first: dict[int, int] = {}
    for i, model in enumerate(models):
        if next(itertools.chain(model.parameters(), model.buffers()), None) is None:
            continue  # a pool or an activation
        if (k := first.setdefault(id(model), i)) != i:
            raise UsageError(
                f"members {k} and {i} are one module object. Give each member its own module, for example "
                "copy.deepcopy(model), or fuse(model, sample, n=...) for fresh copies"
            )


def _refuse_special_weights(i: int, model: nn.Module) -> None:
    """Raises UsageError for a weight of member i that cannot be stacked."""
    for name, value in weights_of(model).items():
        if is_lazy(value):
            raise UsageError(
                f"member {i}: {name} has no size yet; run a lazy module once, on an example, "
                "before you fuse it"
            )
        if value.layout is not torch.strided or not _is_plain(type(value)):
            raise UsageError(
                f"member {i}: {name} is a {type(value).__name__} of layout {value.layout}; fuse stacks only "
                "dense tensors, and parameters whose class leaves torch's operations as they are"
            )
        if hooks_of_gradients(value):
            raise UsageError(
                f"member {i}: {name} has a hook of its gradient (register_hook, or "
                "register_post_accumulate_grad_hook), which would not run in a fused module. Remove it "
                f"before fuse, and register one on the fused module's {name}, whose gradient is [N, ...]"
            )


def _is_plain(cls: type[torch.Tensor]) -> bool:
    """Returns whether tensors of a class compute as torch's own do."""
    return cls in (nn.Buffer, torch.Tensor) or (
        issubclass(cls, nn.Parameter)
        and cls.__torch_function__ is nn.Parameter.__torch_function__
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


CapturedReads = tuple[Captured, AttributeReads]


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


def refuse_gradients(module: nn.Module, trained: Collection[str]) -> None:
    """Refuses to train embeddings whose gradients a fused module cannot give.

    `trained` has the names of the parameters that train. Raises UsageError.
    """
    for name, part in module.named_modules():
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if f"{name}.weight".lstrip(".") not in trained:
            continue
        label = f"{name or 'the module'} ({type(part).__name__})"
        if part.max_norm is not None:
            raise UsageError(
                f"{label} has max_norm={part.max_norm}: torch writes the bounded rows into its weight at "
                "every call, without the optimizer. A fused module bounds them only in eval mode without "
                "gradients. To train it, set max_norm=None and bound the rows after each step (torch.renorm)"
            )
        if part.sparse:
            raise UsageError(
                f"{label} has sparse gradients, with the rows of one member. The weight of a fused module "
                "has the gradient of all members, which is dense. Set sparse=False"
            )
