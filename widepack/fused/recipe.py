"""Keeps what a fused module was made of, apart from weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..capture.call import MemberCall, arrange
from ..capture.example import dynamic_axes
from .parts import settings_of
from .skeleton import ModuleSkeleton
from .stacked_parameters import StackedWeight


def call_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Mapping[str, Any] | None
) -> MemberCall:
    """Returns the sample as a call of the member.

    Args:
        module: The member, or its skeleton. It does not run.
        args: The sample's positional inputs.
        kwargs: The sample's inputs by name.
        dynamic: {input: {axis: letter}}. Default: axis 0 of every input is "B".

    Raises:
        UsageError: `dynamic` has another form, or names an input that forward does not take.
        CaptureError: Forward does not take the sample.
    """
    axes = dynamic_axes(dynamic, module, args, kwargs)
    return arrange(module, args, kwargs, axes, {}, by_name=True)


@dataclass
class FusedRecipe:
    """What a fused module was made of, apart from weights.

    Attributes:
        skeletons: The members' modules without their weights.
        weights: The weights of all members.
        call: The sample, as a call of the member.
        dynamic: The dims that the user named as dynamic, or None for the default.
        strategies: The strategies of the lowering.
        dropout: Whether dropout is on in eval mode.
        packed: Whether calls take and return the channel-packed form.
        validate: Whether a new program is compared with the members before it runs.
    """

    __module__ = "widepack"  # pickles name the public place

    skeletons: Sequence[ModuleSkeleton]
    weights: Sequence[StackedWeight]
    call: MemberCall
    dynamic: Mapping[str, Any] | None
    strategies: str | Sequence[str]
    dropout: bool
    packed: bool
    validate: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedRecipe:
        """Returns the same recipe: nothing in it changes, so copies of a module share it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Replaces the call by the sample's values, from which it is made again."""
        state = dict(self.__dict__)
        call = state.pop("call")
        return {**state, "args": call.args, "kwargs": call.kwargs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        args, kwargs = state.pop("args"), state.pop("kwargs")
        self.__dict__.update(state)
        self.call = call_of(self.skeletons[0].module, args, kwargs, self.dynamic)

    @cached_property
    def settings(self) -> frozenset[str]:
        """The names of the attributes and submodules of the members themselves, which their program read."""
        return settings_of(self.skeletons[0].module)

    @property
    def member_class(self) -> str:
        """The name of the members' class."""
        return type(self.skeletons[0].module).__name__

    @property
    def one_model(self) -> bool:
        """Whether all members are passes of one model."""
        return len(self.skeletons) > 1 and all(s is self.skeletons[0] for s in self.skeletons)
