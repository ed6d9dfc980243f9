"""Keeps dropout on in eval mode: N stochastic passes of one checkpoint (Monte Carlo dropout), or of each of
N.

Every dropout in the eval-mode graph stays on (capture/export.py). Attention and recurrent layers leave their
dropout out of that graph, so they are put in train mode, which changes nothing else in them. Stochastic depth
in a member's own code (`if not self.training: return x`) is not found.
"""

from __future__ import annotations

from torch import nn

from ..errors import UsageError


def is_on(dropout: str) -> bool:
    """Returns whether `dropout` is "on". Raises: UsageError."""
    if dropout not in ("on", "off"):
        raise UsageError(f'dropout is {dropout!r}; it is "on" (in eval mode too) or "off"')
    return dropout == "on"


def switched_on(module: nn.Module) -> nn.Module:
    """Returns the module with the dropout of its attention and recurrent layers on."""
    for part in module.modules():
        if isinstance(part, (nn.MultiheadAttention, nn.RNNBase)):
            part.training = True
    return module


def passes(n: int | None, on: bool, checkpoints: int, tuned: bool) -> int:
    """Returns the number of members of a build. n: the requested number, or None. Raises: UsageError."""
    if on and tuned:
        raise UsageError(
            "tune compares the answers of strategies, but with dropout on, each strategy draws other "
            "numbers; build without tune"
        )
    if n is None:
        return checkpoints
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UsageError(f"n is {n!r}; it is how many passes of one checkpoint to build, a number from 1")
    if checkpoints != 1:
        raise UsageError(
            f"n={n} is for one checkpoint, but {checkpoints} are given; with several, each is one member"
        )
    if not on:
        raise UsageError(
            f"n={n} passes of one checkpoint give equal answers without dropout;"
            ' give dropout="on" (--dropout on), or leave n out'
        )
    return n
