"""Defines the parts of a fused module: one for each submodule of the members.

A part is an instance of the batch norm or dropout class that the members have, because common code finds
these by their class and changes their mode. What such code could change without an effect is refused. A part
of another class is no instance of it: an initialisation of an `nn.Linear` would be wrong for stacked weights.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..errors import UsageError


class StackedModule(nn.Module):
    """One of the member's modules for all members: it has the stacked weights and the mode.

    `fused.layers[0]` is the StackedModule of the members' `layers[0]`. It has no forward of its own.
    """

    __module__ = "widepack"  # pickles name the public place

    def __init__(self, class_name: str, training: bool) -> None:
        nn.Module.__init__(self)  # classes of torch that follow would want sizes
        self._kind = class_name
        self.training = training

    def _get_name(self) -> str:
        return self._kind

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses a hook, which would never run."""
        raise UsageError(
            f"{self._kind} is a part of a fused module, which is not called by itself, so that a hook on it "
            "would never run; register the hook on the fused module, or on the members before fuse"
        )

    def apply(self, fn: Any) -> Any:
        """Refuses `apply`, whose function would ask for classes of torch, which no part has."""
        refuse_apply()

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def __getitem__(self, key: int | str) -> Any:
        """Returns an item of a container by index or key: `fused.layers[0]`, `fused.heads["a"]`."""
        children = {**self._modules, **self._parameters}
        return list(children.values())[key] if isinstance(key, int) else children[key]

    def extra_repr(self) -> str:
        tensors = {**self._parameters, **self._buffers}
        return ", ".join(f"{n}={list(v.shape)}" for n, v in tensors.items() if v is not None)


def refuse_apply() -> NoReturn:
    """Raises: UsageError. `apply` would do nothing, in silence, for a function that asks for classes."""
    raise UsageError(
        "apply would call its function with parts of a fused module, and none of them is an nn.Linear or "
        "another layer with weights. Call member.apply(...) before fuse, or after unfuse; to change modes "
        "or requires_grad, walk over fused.modules()"
    )


class _Captured:
    """A setting of a layer that is a part of the captured program: it can be neither read nor changed."""

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def __get__(self, part: nn.Module | None, owner: Any = None) -> Any:
        return self if part is None else self._refuse()

    def __set__(self, part: nn.Module, value: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"a part of a fused module has no {self.name} of its own: the program was captured with that of "
            f"the members. {self.instead}"
        )


class _BatchNormPart(StackedModule, _BatchNorm):
    """A batch norm of all members."""

    momentum = _Captured(
        "momentum",
        "For torch.optim.swa_utils.update_bn take the members with fused.unfuse(), call it for each of them, "
        "and fuse them again",
    )

    def reset_running_stats(self) -> None:
        """Refuses the first step of `update_bn`, which would then change the momentum."""
        self.momentum = None

    def _load_from_state_dict(self, *args: Any) -> None:
        """Reads the tensors, without torch's conversion of old versions."""
        super(_NormBase, self)._load_from_state_dict(*args)


class _DropoutPart(StackedModule, _DropoutNd):
    """A dropout of all members."""

    p = _Captured("p", "Set it in the members before fuse")


def _class_of_parts(base: type[StackedModule], of: type[nn.Module]) -> type[StackedModule]:
    """Returns the class of parts that are instances of a class of torch too. Pickles find it in this file."""
    name = f"Stacked{of.__name__}"
    made: type[StackedModule] = type(name, (base, of), {"__module__": __name__})
    globals()[name] = made
    return made


_CLASSES: dict[type[nn.Module], type[StackedModule]] = {
    **{c: _class_of_parts(_BatchNormPart, c) for c in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
    **{
        c: _class_of_parts(_DropoutPart, c)
        for c in (
            *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
            *(nn.AlphaDropout, nn.FeatureAlphaDropout),
        )
    },
    _BatchNorm: _BatchNormPart,
    nn.Module: StackedModule,
}
"""The class of the parts for each class of the members' submodules. The first that fits counts."""


def stacked_part(module: nn.Module) -> StackedModule:
    """Returns the part for a submodule of the members, without weights, in the submodule's mode."""
    made = next(made for of, made in _CLASSES.items() if isinstance(module, of))
    return made(type(module).__name__, module.training)
