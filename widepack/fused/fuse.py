"""Makes one nn.Module of N live modules: `widepack.fuse`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.example import without_ones
from ..capture.explain import scripted
from ..capture.export import clone
from ..capture.named_fields import sample_arguments
from ..errors import CaptureError, UsageError
from ..planning.request import StrategyRequest
from ..spec.dropout import is_on
from ..system.memory import keep_freed
from .fresh_copies import members_of
from .module import Fused
from .own_modes import follow_parts
from .own_modules import refuse_other_copies
from .recipe import FusedRecipe, call_of
from .same_members import refuse_mismatches
from .skeleton import ModuleSkeleton, Owners, weights_of
from .stacked_parameters import plan_weights, stack
from .unchanged import unchanged


def fuse(
    models: Sequence[nn.Module] | nn.Module | Callable[[], nn.Module],
    sample: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    n: int | None = None,
    share: Sequence[str] = (),
    strategy: str | Sequence[str] = "auto",
    validate: bool = True,
    packed: bool = False,
    dropout: str = "off",
) -> Fused:
    """Fuses N live modules of one architecture into one nn.Module that trains.

    With `n` and one module, the copies draw their parameters again with the `reset_parameters` of their
    parts. Code outside of it that initializes weights (`nn.init` in the model's `__init__`) cannot be
    repeated from a live module; such weights begin with torch's defaults. A factory repeats everything:
    `fuse(lambda: Net(...), sample, n=8)`.

    Args:
        models: The N members, which are copied and do not change. Parts that all of them hold stay one. With
            `n`: one module, of which N fresh copies are made, or a factory that is called N times.
        sample: The inputs of one call: a tensor, or a tuple of positional inputs, without a member axis.
        sample_kwargs: The inputs of the call that have names.
        dynamic: The dims whose sizes may change: {input: {axis: "B"}}. Default: axis 0 of every input. A
            size of 1 in the sample is replaced by a larger one, if the member takes that.
        n: The number of members, if `models` is one module or a factory.
        share: Names of parameters, or patterns such as `trunk.*`, with one value for all members. Their
            values must be equal. Without it, equal parameters stay separate, unless they are one object.
        strategy: `"auto"`, `"wide"`, `"loop"`, or strategies of ops. Default: `"auto"`.
        validate: Whether each new program is compared with the members, in outputs and gradients. Default:
            True.
        packed: Whether calls take and return the channel-packed form `[B, N*C, ...]`. Default: False.
        dropout: `"on"` keeps dropout on in eval mode, with a draw for each member. With `n` and one module,
            the module's weights are kept once, for N stochastic passes of it. Default: `"off"`.

    Returns:
        A `Fused` in the members' mode. Its parameters are `[N, *shape]` under the members' names. Call it as
        you call a member: each output leaf is `[N, *the member's shape]`.

    Raises:
        UsageError: An argument is invalid, or a member cannot be copied or fused.
        MemberMismatch: The members differ in architecture, constants, dtype, device or mode. The message
            lists all differences.
        CaptureError: The member cannot be captured.
        LoweringError: No wide program can be made.
        VerificationError: The wide program does not answer as the members do.

    Example:
        >>> models = [Net() for _ in range(8)]
        >>> fused = widepack.fuse(models, torch.randn(32, 16))
        >>> y = fused(torch.randn(64, 16))  # [8, 64, ...]
        >>> models = fused.unfuse()
    """
    dropout_on = is_on(dropout)
    if isinstance(share, str):
        raise UsageError(f"share is a text; give a list of names, share=[{share!r}]")
    StrategyRequest.parse(strategy)
    with torch.inference_mode(False), torch.no_grad():
        passes = dropout_on and n is not None and isinstance(models, nn.Module)  # N passes of one module
        members = members_of(models, n, passes)
    with unchanged([m for m in (*members, models) if isinstance(m, nn.Module)]):
        with torch.inference_mode(False), torch.no_grad():
            own = members[:1] if passes else members
            if words := scripted(own[0]):  # it has no copy without weights
                raise CaptureError(words)
            if not passes:
                refuse_mismatches(members)
            args, kwargs = pytree.tree_map(clone, (sample_arguments(sample), dict(sample_kwargs or {})))
            call = call_of(members[0], args, kwargs, dynamic)
            weights = plan_weights(own, share, all_shared=passes)
            owners = None if passes else Owners.of(members)
            skeletons = [ModuleSkeleton(m, owners) for m in own] * (len(members) // len(own))
            call = without_ones(call, lambda: skeletons[0].fill(weights_of(members[0])), dynamic is not None)
            if validate:
                refuse_other_copies(own, skeletons, call)
            fused = Fused(
                FusedRecipe(skeletons, weights, call, dynamic, strategy, dropout_on, packed, validate)
            )
            stack(fused, members, weights)
            follow_parts(fused)
        if all(p.device.type == "cpu" for p in fused.parameters()):
            keep_freed()
        fused.training = members[0].training
        fused.prepare()
    if dropout_on and not fused.draws:
        mode = "train" if fused.training else "eval"
        raise UsageError(
            f"dropout is on, but {type(members[0]).__name__} draws nothing in {mode} mode: "
            "it has no dropout, or one of probability 0"
        )
    return fused
