"""Checks the cases of HFTA's test of Dropout2d: each member drops channels of its own.

The input has the number 1 in every place. A channel of a sample is 0 everywhere, or 1 / (1 - p). The share of
zeros is p, for each member and for each sample. Two members drop a channel together as often as chance has
it. The gradient is the mask, with its scale. One seed gives one answer, and the next call another. In eval
mode the answer is the input, bit for bit.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from database_check import Differs, Outcome
from hfta_grids import Options
from hfta_layers import shapes
from torch import Tensor, nn

import widepack
from widepack import primitives

SIGMAS = 6.0


def outcome_of_dropout(options: Options, way: str, strategy: str = "auto") -> Outcome:
    """Runs one case in a way (`hfta_layers.WAYS`).

    Args:
        options: The options of the case.
        way: The way. `fuse, no gradients` gives all members one input.
        strategy: A strategy of dropout. Default: `"auto"`.

    Returns:
        How the case ended.
    """
    layers: list[nn.Module] = [nn.Dropout2d(options["p"]) for _ in range(options["members"])]
    one = torch.ones(shapes("Dropout2d", options)[0], dtype=options["dtype"])
    inputs = one.expand(options["members"], *one.shape).clone()
    try:
        if way == "wide layer":
            layer = primitives.WideDropout2d.from_modules(layers, strategy)
            _check(layer, inputs, options["p"], inputs)
        else:
            fused = widepack.fuse(layers, one[:2], strategy=strategy)
            if way == "fuse":
                _check(fused, inputs, options["p"], inputs, fused.each)
            else:
                with torch.no_grad():
                    _check(fused, one, options["p"], inputs)
    except Differs as e:
        return Outcome("wrong", str(e))
    except widepack.WidepackError as e:
        return Outcome("refused", f"{type(e).__name__}: {' '.join(str(e).split())}")
    return Outcome("right")


def _check(model: nn.Module, x: Tensor, p: float, kept: Tensor, each: Any = None) -> None:
    """Raises Differs. kept: what the model answers in eval mode. each: what is called in place of it."""
    call = each or model
    x = x.requires_grad_(torch.is_grad_enabled())
    torch.manual_seed(11)
    y = call(x)
    _expect(y.shape == kept.shape and y.dtype == kept.dtype, f"the answer is {y.dtype}{list(y.shape)}")
    if torch.is_grad_enabled():
        (gradient,) = torch.autograd.grad(y.sum(), x)
        _expect(torch.equal(gradient, y.detach()), "the gradient is not the mask")
    with torch.no_grad():
        _masks(y.detach(), p)
        _expect(not torch.equal(call(x), y), "the next call has the same mask")
        torch.manual_seed(11)
        _expect(torch.equal(call(x), y), "one seed gives two answers")
        model.eval()
        _expect(torch.equal(call(x), kept), "the answer in eval mode is not the input")


def _masks(y: Tensor, p: float) -> None:
    """Checks the channels `[members, batch, channels, height, width]` of an answer."""
    first = y[..., :1, :1]
    _expect(bool((y == first).all()), "a channel has two values")
    values = first[..., 0, 0].double()
    dropped = values == 0
    scale = 1 / (1 - p)
    wrong = (values[~dropped] - scale).abs() > 8 * torch.finfo(y.dtype).eps * scale
    _expect(not bool(wrong.any()), f"a channel that is kept is not {scale}")
    for i, member in enumerate(dropped):
        _share(member, p, f"member {i} drops")
        for n, sample in enumerate(member):
            _share(sample, p, f"sample {n} of member {i} drops")
    for a, b in itertools.combinations(range(len(dropped)), 2):
        _share(dropped[a] & dropped[b], p * p, f"members {a} and {b} drop together")


def _share(mask: Tensor, p: float, what: str) -> None:
    share, spread = float(mask.double().mean()), math.sqrt(p * (1 - p) / mask.numel())
    _expect(abs(share - p) <= SIGMAS * spread, f"{what} {share:.3f} of the channels in place of {p:.3f}")


def _expect(right: bool, words: str) -> None:
    if not right:
        raise Differs(words)
