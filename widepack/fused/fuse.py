"""`widepack.fuse`: N live modules -> one nn.Module that runs and trains them all. (A module of the function's own name would take its place in the package.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..spec.dropout import is_on
from ..errors import UsageError
from ..capture.export import clone
from .fresh_copies import members_of
from .module import Fused, Made
from .check import check, settle
from .programs import call_of
from .skeleton import Hollow
from ..registry.registry import Choice
from .same_members import refuse_others
from .stacked_parameters import rows_of, stack


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
    """Fuse N live modules of one architecture into one nn.Module.

    models: the members, which are copied and stay as they are; with n, one module, of which N copies draw their parameters anew, or a factory that is called N times. Copies
    are drawn by their parts' own `reset_parameters`: what other code did to the weights (`nn.init` in the model's `__init__`) cannot be repeated from a live module, which then
    begins with torch's defaults; `fuse(lambda: Net(...), sample, n=8)` runs that code for each. sample: one call's inputs, a tensor or a tuple of positional ones; sample_kwargs: those by name. dynamic: {input: {axis: "B"}}, the dims whose sizes may
    change; by default axis 0 of every input. share: names of parameters, or patterns such as `trunk.*`, that are equal in all members and stay one weight for all; equal ones
    are not tied without it. strategy: auto, wide, loop, or strategies of ops. validate: compare answers and gradients with the members alone, when a program is made.
    packed: calls take and give the channel-packed form `[B, N*C, ...]`. dropout: "on" keeps it on in eval mode, a draw a member; with n and one module its weights are kept
    once, for N stochastic passes of it.

    Returns: a module in the members' mode, with parameters `[N, *shape]` under the members' names. Call it as a member is called.
    Raises: UsageError; MemberMismatch for members of another architecture, constants, dtype, device or mode, with all differences; CaptureError, LoweringError;
    VerificationError.
    """
    drops = is_on(dropout)
    if isinstance(share, str):
        raise UsageError(f"share is a text; give a list of names, share=[{share!r}]")
    Choice.parse(strategy)
    with torch.inference_mode(False), torch.no_grad():
        same = drops and n is not None and isinstance(models, nn.Module)
        members = members_of(models, n, same)
        if not same:
            refuse_others(members)
        args = (sample,) if isinstance(sample, torch.Tensor) else tuple(sample or ())
        args, kwargs = pytree.tree_map(clone, (args, dict(sample_kwargs or {})))
        call = call_of(members[0], args, kwargs, dynamic)
        rows = rows_of(members[:1] if same else members, share, all_shared=same)
        hollows = [Hollow(m) for m in members[:1]] * len(members) if same else [Hollow(m) for m in members]
        fused = Fused(Made(hollows, rows, call, dynamic, strategy, drops, packed, check if validate else None, settle))
        stack(fused, members, rows)
    fused.training = members[0].training
    fused.prepare()
    if drops and not fused.draws:
        raise UsageError(
            f"dropout is on, and {type(members[0]).__name__} draws nothing in {'train' if fused.training else 'eval'} mode: it has no dropout, or one of probability 0"
        )
    return fused
