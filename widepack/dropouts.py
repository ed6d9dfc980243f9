"""Dropout that stays on in eval mode: N stochastic passes of one checkpoint (Monte Carlo dropout), or of each of N.

Every dropout that stands in the eval-mode graph drops out (exporting.py); layers that leave theirs out of it in eval mode, attention and recurrent ones, are put in
train mode, which means nothing else to them. Stochastic depth in a member's own code (`if not self.training: return x`) is not seen.
"""

from __future__ import annotations

from torch import nn

from .errors import UsageError


def is_on(dropout: str) -> bool:
    """Whether `dropout=` asks for it. Raises: UsageError."""
    if dropout not in ("on", "off"):
        raise UsageError(f'dropout is {dropout!r}; it is "on" (in eval mode too) or "off"')
    return dropout == "on"


def switched_on(module: nn.Module) -> nn.Module:
    """The module, whose attention and recurrent layers drop out."""
    for part in module.modules():
        if isinstance(part, (nn.MultiheadAttention, nn.RNNBase)):
            part.training = True
    return module
