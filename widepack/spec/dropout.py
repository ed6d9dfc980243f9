"""Dropout that stays on in eval mode: N stochastic passes of one checkpoint (Monte Carlo dropout), or of each of N.

Every dropout that stands in the eval-mode graph drops out (exporting.py); layers that leave theirs out of it in eval mode, attention and recurrent ones, are put in
train mode, which means nothing else to them. Stochastic depth in a member's own code (`if not self.training: return x`) is not seen.
"""

from __future__ import annotations

from torch import nn

from ..errors import UsageError


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


def passes(n: int | None, on: bool, checkpoints: int, tuned: bool) -> int:
    """How many members a build has. n: what was asked for. Raises: UsageError."""
    if on and tuned:
        raise UsageError("tune compares the answers of strategies, and with dropout on each draws its own; build without tune")
    if n is None:
        return checkpoints
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UsageError(f"n is {n!r}; it is how many passes of one checkpoint there shall be")
    if checkpoints != 1:
        raise UsageError(f"n={n} is for one checkpoint, and {checkpoints} are given; each of several is one member")
    if not on:
        raise UsageError(f'n={n} passes of one checkpoint answer alike without dropout: give dropout="on" (--dropout on), or leave n out')
    return n
