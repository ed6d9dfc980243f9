"""Names functions that compute what an op computes, in less time: of torch's public API, and `max_pool2d`.

A call of `torch.ops.aten.add.Tensor` takes about one microsecond more than one of `torch.add`: its arguments
are read by the op's schema. Only code that runs now uses these functions. Code that is traced uses the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from ..kernels.checks import CHECKS
from ..kernels.pooling import max_pool2d
from ..kernels.replacements import REPLACEMENTS
from . import ops

DIRECT: dict[str, Callable[..., Any]] = {
    "aten.abs.default": torch.abs,
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.amax.default": torch.amax,
    "aten.baddbmm.default": torch.baddbmm,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.clamp.default": torch.clamp,
    "aten.conv1d.default": torch.conv1d,
    "aten.conv2d.default": torch.conv2d,
    "aten.conv3d.default": torch.conv3d,
    "aten.cos.default": torch.cos,
    "aten.div.Tensor": torch.div,
    "aten.embedding.default": torch.embedding,
    "aten.exp.default": torch.exp,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": F.gelu,
    "aten.layer_norm.default": torch.layer_norm,
    "aten.linear.default": F.linear,
    "aten.log.default": torch.log,
    "aten.matmul.default": torch.matmul,
    "aten.max_pool2d.default": max_pool2d,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.relu.default": torch.relu,
    "aten.reshape.default": torch.reshape,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.select.int": torch.select,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.sin.default": torch.sin,
    "aten.split.Tensor": torch.split,
    "aten.sqrt.default": torch.sqrt,
    "aten.squeeze.dim": torch.squeeze,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.tanh.default": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.Tensor.view,
    "aten.where.self": torch.where,
}
"""The function of each op by its name in programs."""
_KEYWORDS = frozenset({"alpha", "beta", "approximate", "dtype"})
"""The keywords whose names are those of the ops' schemas."""


def direct(name: str, keywords: Collection[str]) -> Callable[..., Any]:
    """Returns the function that a graph calls for an op, as `ops.function`, with less time for each call.

    Args:
        name: The op.
        keywords: The names of its keyword arguments. The op itself takes other ones.

    Raises:
        ArtifactError: As `ops.resolve`.
    """
    if name not in DIRECT or name in REPLACEMENTS or not _KEYWORDS.issuperset(keywords):
        return ops.function(name)
    ops.resolve(name)
    return _checked(name) if name in CHECKS else DIRECT[name]


@cache
def _checked(name: str) -> Callable[..., Any]:
    """Returns the function of an op behind the check of its operands."""
    return ops.behind_check(name, DIRECT[name])
