"""`widepack.fuse`: N live modules -> one nn.Module that runs and trains them all. (A module of the function's own name would take its place in the package.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import UsageError
from .fused import Fused, Made
from .fused_check import check
from .fused_programs import call_of
from .hollow import Hollow
from .registry import Choice
from .same_members import refuse_others
from .stacks import rows_of, stack


def fuse(
    models: Sequence[nn.Module],
    sample: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    share: Sequence[str] = (),
    strategy: str | Sequence[str] = "auto",
    validate: bool = True,
) -> Fused:
    """Fuse N live modules of one architecture into one nn.Module.

    models: the members; they are copied, and stay as they are. sample: one call's inputs, a tensor or a tuple of positional ones; sample_kwargs: those by name.
    dynamic: {input: {axis: "B"}}, the dims whose sizes may change; by default axis 0 of every input. share: names of parameters, or patterns such as `trunk.*`, that are equal in all members and stay one weight for all; equal ones
    are not tied without it. strategy: auto, wide, loop, or strategies of ops. validate: compare answers and gradients with the members alone, in each mode when its
    program is made.

    Returns: a module in the members' mode, with parameters `[N, *shape]` under the members' names. Call it as a member is called.
    Raises: UsageError; MemberMismatch for members of another architecture, constants, dtype, device or mode, with all differences; CaptureError, LoweringError;
    VerificationError.
    """
    members = list(models) if isinstance(models, (Sequence, nn.ModuleList)) else []
    if not members or not all(isinstance(m, nn.Module) for m in members):
        raise UsageError("models is no list of modules; fuse takes N live modules of one architecture, and widepack.build checkpoints")
    for name in [share] if isinstance(share, str) else []:
        raise UsageError(f"share is a text; give a list of names, share=[{name!r}]")
    Choice.parse(strategy)
    refuse_others(members)
    args = (sample,) if isinstance(sample, torch.Tensor) else tuple(sample or ())
    call = call_of(members[0], args, dict(sample_kwargs or {}), dynamic)
    with torch.inference_mode(False), torch.no_grad():
        rows = rows_of(members, share)
        made = Made([Hollow(m) for m in members], rows, call, dynamic is not None, strategy, False, check if validate else None)
        fused = Fused(made)
        stack(fused, members, rows)
    fused.training = members[0].training
    fused.prepare()
    return fused
