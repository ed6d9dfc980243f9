"""Refuses modules that a wide layer cannot run: other classes, hooks, or a forward on the instance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..errors import UsageError
from .arguments import class_name

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def checked_modules(modules: Any, member: type[nn.Module], layer: str) -> list[nn.Module]:
    """Returns the modules as a list. `layer` is the name of the wide layer, for messages.

    Raises:
        UsageError: There are no modules, the first is not of the class `member`, or a module would run code
            that a wide layer does not run.
    """
    if not isinstance(modules, Iterable):
        raise UsageError(f"{layer} takes a list of modules, not a {class_name(modules)}")
    members: list[nn.Module] = list(modules)
    if not members:
        raise UsageError(f"{layer}: there are no modules; give at least one {member.__name__}")
    if type(members[0]) is not member:
        raise UsageError(
            f"{layer} takes modules of class torch.nn.{member.__name__}, and member 0 is of class "
            f"{class_name(members[0])}. For a class of your own, or a module with parametrized weights, use "
            "widepack.fuse, which takes whole modules"
        )
    _refuse_instance_code(members, layer)
    return members


def _refuse_instance_code(modules: Sequence[Any], layer: str) -> None:
    """Raises UsageError for hooks and for a forward on an instance: a wide layer calls neither."""
    for i, module in enumerate(modules):
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            where = f"{name} of member {i}" if name else f"member {i}"
            if any(getattr(part, hooks) for hooks in _HOOKS):
                raise UsageError(
                    f"{layer}: {where} has hooks, which a wide layer does not call. "
                    "Remove them (weight_norm of torch.nn.utils is a hook)"
                )
            if "forward" in vars(part):
                raise UsageError(
                    f"{layer}: {where} has a forward of its own, which a wide layer does not call. "
                    "Use widepack.fuse, which takes such modules whole"
                )
