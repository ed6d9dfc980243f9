"""Defines the parts of a fused module: one for each submodule of the members.

A part is an instance of the batch norm or dropout class that the members have, because common code finds
these by their class and changes their mode. What such code could change without an effect is refused. A part
of another class is no instance of it: an initialisation of an `nn.Linear` would be wrong for stacked weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..errors import UsageError
from .torch_module import submodule_dict

if TYPE_CHECKING:
    from typing_extensions import Self


class StackedModule(nn.Module):
    """One of the member's modules for all members: it has the stacked weights and the mode.

    `fused.layers[0]` is the StackedModule of the members' `layers[0]`. It has no forward of its own.
    """

    __module__ = "widepack"  # pickles name the public place

    _settings: frozenset[str] = frozenset()
    _own_modes: Mapping[bool, Mapping[str, bool] | str] | None = None

    def __init__(self, class_name: str, training: bool, settings: frozenset[str] = frozenset()) -> None:
        nn.Module.__init__(self)  # classes of torch that follow would want sizes
        self._kind, self._settings = class_name, settings
        self.training = training

    def follow(self, own_modes: Mapping[bool, Mapping[str, bool] | str]) -> None:
        """Lets `train()` and `eval()` set the modes that the members' own methods set.

        own_modes: for train and for eval the mode of each part that is set, or in words what else is done.
        """
        self._own_modes = own_modes

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of this part and of those in it, as the members' own `train()` or `eval()` does.

        Args:
            mode: Whether it is train mode. Default: True.

        Returns:
            The part.

        Raises:
            UsageError: The members' own method does more than set modes.
        """
        if self._own_modes is None:
            return super().train(mode)
        if isinstance(modes := self._own_modes[mode], str):
            method = "train" if mode else "eval"
            raise UsageError(
                f"{method}() of {self._kind}, a part of a fused module: that of the members {modes}, not "
                f"only modes. To set modes alone: for p in part.modules(): p.training = {mode}. To do as the "
                "members do, call it in each of fused.unfuse(), and fuse them again"
            )
        parts = dict(self.named_modules())
        for path, training in modes.items():
            parts[path].training = training
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_setting(self._settings | ({name} if isinstance(value, nn.Module) else frozenset()), name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuses to remove a weight, as a parametrization does."""
        refuse_setting(frozenset(self._parameters) | frozenset(self._buffers), name)
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuses another submodule, which would never run."""
        refuse_setting(frozenset({name}), name)

    register_module = add_module

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Takes other numbers for a parameter. Refuses another one, which the program would not read."""
        refuse_setting(frozenset({name}) - self._parameters.keys(), name)
        super().register_parameter(name, param)

    def _get_name(self) -> str:
        return self._kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses a call: the program of the fused module runs all parts."""
        raise UsageError(
            f"{self._kind} is a part of a fused module, which is not called by itself; call the fused "
            "module, or the part of a member: fused.member(i)"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses a hook, which would never run."""
        raise UsageError(
            f"{self._kind} is a part of a fused module, which is not called by itself, so that a hook on it "
            "would never run; register the hook on the fused module, or on the members before fuse"
        )

    def apply(self, fn: Any) -> Any:
        """Refuses `apply`, whose function would ask for classes of torch, which few parts have."""
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


def settings_of(module: nn.Module) -> frozenset[str]:
    """Returns the names of the attributes and submodules of a member's module, which its program reads."""
    names = {n for n in vars(module) if not n.startswith("_")} | submodule_dict(module).keys()
    return frozenset(names - {"training"})


def refuse_setting(settings: frozenset[str], name: str) -> None:
    """Raises: UsageError for a name that the program read when it was captured."""
    if name in settings:
        raise UsageError(
            f"{name} is a part of the program of a fused module, which was captured with the value that the "
            "members had, so that a change would have no effect. Change it in the members, with "
            "fused.unfuse() if they have trained, and fuse them again"
        )


def refuse_apply() -> NoReturn:
    """Raises: UsageError. `apply` would do nothing, in silence, for a function that asks for classes."""
    raise UsageError(
        "apply would call its function with parts of a fused module, and few of them are instances of the "
        "members' classes. Call member.apply(...) before fuse, or after unfuse; to change modes "
        "or requires_grad, walk over fused.modules()"
    )


class _BatchNormPart(StackedModule, _BatchNorm):
    """A batch norm of all members."""

    def reset_running_stats(self) -> None:
        """Refuses the first step of `update_bn`, which would then change the momentum."""
        raise UsageError(
            "update_bn changes the momentum of batch norms, and the program of a fused module was captured "
            "with that of the members. Take the members with fused.unfuse(), call update_bn for each of "
            "them, and fuse them again"
        )

    def reset_parameters(self) -> None:
        """Refuses an initialisation."""
        raise UsageError(
            f"{self._kind} is a part of a fused module and has the weights of all members. Initialise the "
            "members before fuse, or after unfuse"
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        """Reads the tensors, without torch's conversion of old versions."""
        super(_NormBase, self)._load_from_state_dict(*args)


def _class_of_parts(base: type[StackedModule], of: type[nn.Module]) -> type[StackedModule]:
    """Returns the class of parts that are instances of a class of torch too. Pickles find it in this file."""
    name = f"Stacked{of.__name__}"
    made: type[StackedModule] = type(name, (base, of), {"__module__": __name__})
    globals()[name] = made
    return made


_CLASSES: dict[type[nn.Module], type[StackedModule]] = {
    **{c: _class_of_parts(_BatchNormPart, c) for c in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
    **{
        c: _class_of_parts(StackedModule, c)
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
    return made(type(module).__name__, module.training, settings_of(module))
