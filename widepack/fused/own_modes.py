"""Follows members whose own `train()` or `eval()` does more than set the mode of all parts.

A fused module keeps the members as they were when they were fused, with the weights that they have now. In
another mode it sets the modes that the members' own method sets, such as norms that stay in eval mode. A
method that changes weights or other values cannot be followed: it is refused, unless the members answer alike
without these changes, as with a low-rank update that eval mode merges.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts.errors import some

from ..capture.export import run_once
from ..checkpoints.eval_mode import changed_by_mode, has_own_mode
from ..errors import UsageError
from ..spec.entries import FORWARD
from .parts import StackedModule

if TYPE_CHECKING:
    from .members import FusedMembers

_ROUNDING = 256  # ulp of the largest number of an answer: a difference of less is rounding


def follow_own_mode(fused: FusedMembers, mode: bool) -> None:
    """Sets the modes that the members' own `train()` or `eval()` sets for their parts.

    Args:
        fused: The fused module, whose parts are all in the new mode.
        mode: Whether it is train mode.

    Raises:
        UsageError: The method changes other values of the members.
    """
    switched, changed = _switched(fused, 0, mode)
    own = dict(switched.named_modules())
    for path, part in fused.named_modules():
        if path in own:
            part.training = own[path].training
    # a method that eval() replaces is not among the names
    differs = bool(changed) if mode else any(_differs(fused, i, mode) for i in range(len(fused)))
    if differs:
        name, method = type(switched).__name__, "train" if mode else "eval"
        what = some(changed) or "its answers"
        raise UsageError(
            f"{method}() of {name} changes {what}, and a fused module keeps its members as they were fused:"
            " it would not answer or train alike. Fuse them in this mode: models = fused.unfuse(), call"
            f" {method}() of each, then widepack.fuse(models, sample)"
        )


def follow_parts(fused: FusedMembers) -> None:
    """Gives each part of a fused module the modes that the same part's own `train()` and `eval()` sets."""
    recipe = fused._recipe  # noqa: SLF001
    if not has_own_mode(recipe.skeletons[0].module):
        return
    member = fused.member(0, "cpu")
    for path, part in fused.named_modules():
        if isinstance(part, StackedModule) and has_own_mode(own := member.get_submodule(path), parts=False):
            part.follow({mode: _modes_set(own, mode) for mode in (True, False)})


def _modes_set(own: nn.Module, mode: bool) -> dict[str, bool] | str:
    """Returns the mode of each part that a module's own `train()` or `eval()` sets, or what else it does."""
    copied = copy.deepcopy(own)
    modes = {}
    for before in (mode, not mode):
        for part in copied.modules():
            part.training = before
        try:
            changed = changed_by_mode(copied, mode)
        except UsageError as e:
            return str(e)
        if changed:
            return f"changes {some(changed)}"
        modes.update({path: not before for path, p in copied.named_modules() if p.training != before})
    return modes


def _switched(fused: FusedMembers, i: int, mode: bool) -> tuple[nn.Module, list[str]]:
    """Returns member i after its own `train()` or `eval()`, and the names of what that has changed."""
    member = fused.member(i, "cpu")
    fused_modes = {n: p.training for n, p in fused._recipe.skeletons[i].module.named_modules()}  # noqa: SLF001
    for path, part in member.named_modules():
        part.training = fused_modes[path]
    return member, changed_by_mode(member, mode)


def _differs(fused: FusedMembers, i: int, mode: bool) -> bool:
    """Returns whether member i answers otherwise after its own `train()` or `eval()`."""
    call = fused.sample()
    answers = [run_once(m, call, FORWARD) for m in (_switched(fused, i, mode)[0], fused.member(i, "cpu"))]
    if any(error is not None for _, error in answers):
        return True
    own, kept = (pytree.tree_leaves(answer) for answer, _ in answers)
    return len(own) != len(kept) or not all(map(_alike, own, kept))


def _alike(own: object, kept: object) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(kept, torch.Tensor):
        return type(own) is type(kept) and (isinstance(own, torch.Tensor) or bool(own == kept))
    if own.shape != kept.shape or own.dtype != kept.dtype:
        return False
    if not own.is_floating_point() and not own.is_complex():
        return torch.equal(own, kept)
    size = float(own.detach().abs().nan_to_num().max()) if own.numel() else 0.0
    bound = _ROUNDING * torch.finfo(own.dtype).eps * size
    return torch.allclose(own, kept, rtol=0, atol=bound, equal_nan=True)
