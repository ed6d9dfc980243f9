"""Patterns of everyday code, each right in both presets: built, loaded, and held to every member alone in float64, at several sizes of every dynamic dim.

A case is a small module, its input specs and other sizes of its dims. Members have their own weights, norms and running statistics. No node runs once a
member but those that `ONCE_A_MEMBER` names with their reason.
"""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_map

from support import Bound, double, leaves, run, stack
from widepack import BuildReport, build, load
from widepack.ir.float64 import double_by_default
from widepack.spec.input_spec import parse_inputs
from widepack.inference.model import WideModel
from widepack_artifacts.writer import Reader

N = 3
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",), "strategy": "wide"}
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """make: a fresh module. inputs: specs. sizes: letter -> other sizes than the example's. sample: instead of specs, (sizes, seed) -> args of a call.

    dynamic, example: with sample, as `build` takes them.
    """

    make: Make
    inputs: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sample: Callable[[Mapping[str, int], int], dict[str, Any]] | None = None
    dynamic: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, int] = field(default_factory=dict)

    def draw(self, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
        """One call's inputs, by name."""
        if self.sample is not None:
            return self.sample(sizes, seed)
        return {s.name: drawn(str(s), sizes, 100 * seed + i) for i, s in enumerate(parse_inputs(self.inputs)[0])}

    def calls(self) -> list[dict[str, int]]:
        """Sizes to call at: each dim's own list in turn, all dims moving together."""
        letters = list(self.sizes)
        longest = max((len(v) for v in self.sizes.values()), default=1)
        return [{d: self.sizes[d][k % len(self.sizes[d])] for d in letters} for k in range(longest)]


def drawn(spec: str, sizes: Mapping[str, int], seed: int) -> Tensor:
    """Floats are normal, whole numbers within the spec's bounds, truth values mostly false and never all true along the last dim."""
    (given,), _ = parse_inputs([spec])
    shape = [d if isinstance(d, int) else sizes[d.letter] * d.factor for d in given.dims]
    g = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, given.dtype)
    if given.low is not None and given.high is not None:
        return torch.randint(given.low, given.high + 1, shape, generator=g).to(dtype)
    if dtype == torch.bool:
        mask = torch.rand(shape, generator=g) < 0.4
        if shape:
            mask[..., 0] = False
        return mask
    return torch.randn(shape, generator=g, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)


def case(make: Make, *inputs: str, **sizes: tuple[int, ...]) -> Case:
    """A case from specs: the batch B is called at 5, 1 and 2, other letters at 7, 12 and 4 unless said otherwise."""
    letters = dict.fromkeys(letter for s in parse_inputs(inputs)[0] for letter in s.letters)
    return Case(make, inputs, {d: sizes.get(d, (5, 1, 2) if d == "B" else (7, 12, 4)) for d in letters})


def of(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """What makes a part anew."""
    return partial(kind, *args, **kwargs)


def net(forward: Callable[..., Any], **parts: Callable[[], Any]) -> Make:
    """What makes a module of these parts (modules, parameters; plain tensors become buffers) with this forward of (self, inputs)."""
    kind = type("Net", (nn.Module,), {"forward": forward})

    def make() -> nn.Module:
        module: nn.Module = kind()
        for name, part in parts.items():
            value = part()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                module.register_buffer(name, value)
            else:
                setattr(module, name, value)
        return module

    return make


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape, dtype=dtype) * 0.5)


def linear(i: int, o: int, **more: Any) -> Callable[[], nn.Linear]:
    return of(nn.Linear, i, o, **more)


def chain(*parts: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(*(p() for p in parts))


CASES: dict[str, Case] = {}


# Shapes

FLAT = "x=float32[B,4,6]"
ROWS = "x=float32[B,6]"
IMAGE = "x=float32[B,4,8,6]"
TEXT = "x=float32[B,T,8]"

CASES |= {
    "view_batch": case(net(lambda self, x: self.fc(x.view(x.size(0), -1)), fc=linear(24, 5)), FLAT),
    "view_heads": case(net(lambda self, x: self.fc(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2), fc=linear(8, 8)), TEXT),
    "flatten": case(net(lambda self, x: self.fc(x.flatten(1)), fc=linear(24, 5)), FLAT),
    "flatten_module": case(chain(of(nn.Conv1d, 4, 6, 3), of(nn.Flatten), linear(24, 5)), "input=float32[B,4,6]"),
    "unflatten": case(chain(linear(6, 12), of(nn.Unflatten, 1, (4, 3)), linear(3, 5)), "input=float32[B,6]"),
    "mean": case(net(lambda self, x: self.fc(x).mean(1), fc=linear(8, 5)), TEXT),
    "softmax": case(net(lambda self, x: self.fc(x).softmax(1), fc=linear(6, 5)), ROWS),
    "log_softmax_middle": case(net(lambda self, x: F.log_softmax(self.fc(x), dim=1), fc=linear(8, 5)), TEXT),
    "cat": case(net(lambda self, x: torch.cat([x, self.a(x), self.b(x).relu()], 1), a=linear(6, 4), b=linear(6, 5)), ROWS),
    "cat_last_with_shared": case(net(lambda self, x: self.fc(torch.cat([x, self.a(x)], dim=-1)), a=linear(8, 4), fc=linear(12, 5)), TEXT),
    "stack_heads": case(
        net(lambda self, x: torch.stack([h(x) for h in self.heads], dim=1), heads=lambda: nn.ModuleList(nn.Linear(6, 4) for _ in range(2))), ROWS
    ),
    "first_token": case(net(lambda self, x: self.fc(self.mix(x)[:, 0]), mix=linear(8, 8), fc=linear(8, 5)), TEXT),
    "last_token": case(net(lambda self, x: self.fc(torch.tanh(self.mix(x))[:, -1, :]), mix=linear(8, 8), fc=linear(8, 5)), TEXT),
    "strided_slice": case(net(lambda self, x: self.fc(x)[..., ::2] - self.fc(x)[..., 1::2], fc=linear(6, 8)), ROWS),
    "slices": case(net(lambda self, x: self.fc(x)[:, 1:] - self.fc(x)[:, :-1], fc=linear(8, 5)), TEXT),
    "none_index": case(net(lambda self, x: self.fc(x)[:, None] * self.w[None, :, None], fc=linear(6, 5), w=param(4)), ROWS),
    "list_index": case(net(lambda self, x: self.fc(x)[:, [3, 0, 2]], fc=linear(6, 5)), ROWS),
    "two_lists_index": case(net(lambda self, x: self.fc(x)[:, [1, 0, 2], [3, 0, 1]], fc=linear(6, 5)), FLAT),
    "parted_index": case(net(lambda self, x: self.conv(x)[:, [0, 2, 1], :, [3, 0, 1]], conv=of(nn.Conv2d, 4, 5, 3)), IMAGE),
    "index_by_input": case(net(lambda self, x, rows: self.fc(x)[torch.arange(x.shape[0]), rows], fc=linear(6, 5)), FLAT, "rows=int64[B]:0..3"),
    "table_by_input": case(net(lambda self, ids: self.table[ids] @ self.table.t(), table=param(7, 4)), "ids=int64[B,T]:0..6"),
    "chunk": case(net(lambda self, x: (lambda a, b: a * b.sigmoid())(*self.fc(x).chunk(2, dim=-1)), fc=linear(6, 8)), ROWS),
    "split": case(net(lambda self, x: [p.exp() for p in self.fc(x).split([2, 3, 4], dim=1)], fc=linear(6, 9)), ROWS),
    "unbind": case(net(lambda self, x: sum(self.fc(x).unbind(1)), fc=linear(6, 5)), FLAT),
    "narrow": case(net(lambda self, x: self.fc(x).narrow(1, 1, 2), fc=linear(6, 5)), FLAT),
    "permute_reshape": case(
        net(lambda self, x: self.fc(self.conv(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 5)), conv=of(nn.Conv2d, 4, 5, 3), fc=linear(5, 2)), IMAGE
    ),
    "reshape_minus_one": case(net(lambda self, x: self.fc(x.reshape(-1, 8)).reshape(x.shape[0], -1, 5), fc=linear(8, 5)), TEXT),
    "squeeze_unsqueeze": case(net(lambda self, x: self.conv(x.unsqueeze(1)).squeeze(1), conv=of(nn.Conv1d, 1, 1, 3)), ROWS),
    "squeeze_everything": case(net(lambda self, x: self.fc(x).squeeze(), fc=linear(6, 1)), ROWS, B=(5, 4, 2)),
    "expand_token": case(
        net(lambda self, x: self.fc(torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)), cls=param(1, 1, 8), fc=linear(8, 5)), TEXT
    ),
    "expand_as": case(net(lambda self, x: self.fc(x).mean(1, keepdim=True).expand_as(x) * x, fc=linear(8, 1)), TEXT),
    "repeat": case(net(lambda self, x: self.fc(x).repeat(1, 2, 1) + self.w.repeat(x.shape[0], 8, 1), fc=linear(6, 5), w=param(1, 5)), FLAT),
    "repeat_interleave": case(net(lambda self, x: self.fc(x).repeat_interleave(2, dim=1), fc=linear(6, 5)), FLAT),
    "tile": case(net(lambda self, x: torch.tile(self.fc(x), (2, 1)) + self.w.tile(8, 1), fc=linear(6, 5), w=param(5)), FLAT),
    "roll_flip": case(net(lambda self, x: self.conv(x).roll((1, -2), (2, 3)).flip(-1, 1), conv=of(nn.Conv2d, 4, 5, 3)), IMAGE),
    "rot90": case(net(lambda self, x: torch.rot90(self.conv(x), 1, [2, 3]), conv=of(nn.Conv2d, 4, 5, 3)), IMAGE),
    "swapaxes": case(net(lambda self, x: self.fc(x).swapaxes(1, 2).swapdims(-1, -2).mT, fc=linear(6, 5)), FLAT),
    "unfold_windows": case(net(lambda self, x: self.fc(x).unfold(1, 2, 1).mean(-1), fc=linear(8, 5)), TEXT),
    "diagonal": case(net(lambda self, x: torch.diagonal(self.fc(x), dim1=1, dim2=2) + self.fc(x).diagonal(0, -2, -1), fc=linear(6, 4)), FLAT),
    "diag_embed": case(net(lambda self, x: torch.diag_embed(self.fc(x)) @ self.w, fc=linear(6, 5), w=param(5, 4)), ROWS),
    "tril": case(net(lambda self, x: torch.tril(self.fc(x) @ x.transpose(1, 2)).triu(-1), fc=linear(8, 8)), TEXT),
    "stacks": case(
        net(lambda self, x: torch.hstack([torch.vstack([self.fc(x), x]), torch.dstack([x, self.fc(x)]).sum(-1).repeat(2, 1)]), fc=linear(6, 6)), ROWS
    ),
    "column_stack": case(net(lambda self, x: torch.column_stack([self.fc(x).sum(1), self.fc(x)]), fc=linear(6, 5)), ROWS),
    "meshgrid": case(
        net(
            lambda self, x: self.conv(x) + self.w * torch.stack(torch.meshgrid(torch.arange(8.0), torch.arange(6.0), indexing="ij")).sum(0),
            conv=of(nn.Conv2d, 4, 1, 1),
            w=param(),
        ),
        IMAGE,
    ),
    "meshgrid_of_weights": case(
        net(lambda self, x: x + torch.stack(torch.meshgrid(self.a, self.b, indexing="xy")).sum(0), a=param(6), b=param(4)), FLAT
    ),
}

# Arithmetic, reductions, products

CASES |= {
    "einsum": case(net(lambda self, x: torch.einsum("bti,oi->bto", x, self.w), w=param(5, 8)), TEXT),
    "einsum_attention": case(
        net(lambda self, x: torch.einsum("b i d, b j d -> b i j", self.q(x), self.k(x)).softmax(-1), q=linear(8, 4), k=linear(8, 4)), TEXT
    ),
    "einsum_ellipsis": case(net(lambda self, x: torch.einsum("...i,ij,j->...", x, self.w, self.v), w=param(8, 4), v=param(4)), TEXT),
    "bmm": case(net(lambda self, x: torch.bmm(self.fc(x), x.transpose(1, 2)), fc=linear(8, 8)), TEXT),
    "matmul_parameter": case(net(lambda self, x: (x @ self.w + self.b) @ self.v, w=param(6, 5), b=param(5), v=param(5)), ROWS),
    "matmul_batched_parameter": case(net(lambda self, x: x[:, None] @ self.w, w=param(2, 6, 5)), FLAT),
    "baddbmm": case(
        net(lambda self, x: torch.baddbmm(self.b, self.fc(x), x.transpose(1, 2), beta=0.5, alpha=2.0), fc=linear(6, 6), b=param(1, 4, 4)), FLAT
    ),
    "addmm": case(net(lambda self, x: torch.addmm(self.b, x, self.w), b=param(5), w=param(6, 5)), ROWS),
    "outer": case(net(lambda self, x: x @ torch.outer(self.a, self.b) + torch.ger(self.a, self.b).sum(), a=param(6), b=param(5)), ROWS),
    "kron": case(net(lambda self, x: x @ torch.kron(self.a, self.b), a=param(3, 2), b=param(2, 4)), ROWS),
    "tensordot": case(net(lambda self, x: torch.tensordot(self.fc(x), self.w, dims=([1, 2], [0, 1])), fc=linear(6, 5), w=param(4, 5, 2)), FLAT),
    "bilinear": case(net(lambda self, x, y: self.mix(self.fc(x), y), mix=of(nn.Bilinear, 5, 4, 7), fc=linear(6, 5)), ROWS, "y=float32[B,4]"),
    "cdist": case(net(lambda self, x: torch.cdist(self.fc(x), self.centres), fc=linear(8, 5), centres=param(4, 5)), TEXT),
    "cdist_p1": case(net(lambda self, x: -torch.cdist(x, self.centres, p=1.0), centres=param(4, 8)), TEXT),
    "cosine_similarity": case(
        net(lambda self, x: F.cosine_similarity(self.fc(x)[:, None], self.w[None], dim=2), fc=linear(6, 5), w=param(4, 5)), ROWS
    ),
    "cosine_module": case(
        net(lambda self, x, y: self.cos(self.fc(x), self.fc(y)), cos=of(nn.CosineSimilarity), fc=linear(6, 5)), ROWS, "y=float32[B,6]"
    ),
    "pairwise_distance": case(
        net(lambda self, x, y: F.pairwise_distance(self.fc(x), self.fc(y), keepdim=True), fc=linear(6, 5)), ROWS, "y=float32[B,6]"
    ),
    "normalize": case(net(lambda self, x: F.linear(F.normalize(x), F.normalize(self.w)) * self.s.exp(), w=param(5, 6), s=param()), ROWS),
    "sums": case(net(lambda self, x: (self.fc(x).sum(), self.fc(x).mean(), self.fc(x).max(), self.fc(x).prod(1)), fc=linear(6, 5)), ROWS),
    "statistics": case(
        net(
            lambda self, x: torch.stack(
                [self.fc(x).std(1), self.fc(x).var(1, unbiased=False), self.fc(x).norm(dim=1), torch.logsumexp(self.fc(x), 1)]
            ),
            fc=linear(8, 5),
        ),
        TEXT,
    ),
    "std_of_all": case(net(lambda self, x: (self.fc(x) - self.fc(x).mean()) / (self.fc(x).std() + 1e-3), fc=linear(6, 5)), ROWS),
    "norms_of_matrices": case(
        net(lambda self, x: (torch.linalg.norm(self.fc(x), dim=(1, 2)), torch.linalg.matrix_norm(self.fc(x)), self.fc(x).norm()), fc=linear(6, 5)),
        FLAT,
    ),
    "cumulative": case(net(lambda self, x: self.fc(x).cumsum(1) + self.fc(x).sigmoid().cumprod(-1), fc=linear(8, 5)), TEXT),
    "topk": case(net(lambda self, x: self.fc(x).topk(2, dim=1), fc=linear(6, 5)), ROWS),
    "sort": case(net(lambda self, x: torch.sort(self.fc(x), dim=1, descending=True)[0] + self.fc(x).argsort(1), fc=linear(8, 5)), TEXT),
    "max_argmax": case(
        net(lambda self, x: (self.fc(x).max(1).values, self.fc(x).argmax(-1), self.fc(x).amin((1, 2)), self.fc(x).max(dim=-1)[1]), fc=linear(8, 5)),
        TEXT,
    ),
    "median_mode": case(
        net(lambda self, x: self.fc(x).median(1)[0] + self.fc(x).round().mode(1)[0] + self.fc(x).kthvalue(2, 1)[0], fc=linear(6, 5)), ROWS
    ),
    "truth_values": case(
        net(
            lambda self, x: ((self.fc(x) > 0).any(1), (self.fc(x) > 0).all(), self.fc(x) > self.t, torch.isfinite(self.fc(x))),
            fc=linear(6, 5),
            t=param(5),
        ),
        ROWS,
    ),
    "gather": case(net(lambda self, x, ids: self.fc(x).gather(1, ids), fc=linear(6, 5)), ROWS, "ids=int64[B,2]:0..4"),
    "take_along_dim": case(net(lambda self, x, ids: torch.take_along_dim(self.fc(x), ids, dim=1), fc=linear(6, 5)), ROWS, "ids=int64[B,2]:0..4"),
    "take_sorted": case(net(lambda self, x: torch.take_along_dim(x, self.fc(x).argsort(1), 1), fc=linear(6, 6)), ROWS),
    "index_select": case(net(lambda self, x, ids: torch.index_select(self.fc(x), 1, ids), fc=linear(6, 5)), ROWS, "ids=int64[2]:0..4"),
    "scatter": case(net(lambda self, x, ids: torch.zeros(x.shape[0], 5).scatter(1, ids, self.fc(x)), fc=linear(6, 1)), ROWS, "ids=int64[B,1]:0..4"),
    "scatter_add": case(net(lambda self, x, ids: torch.zeros_like(x).scatter_add_(1, ids, self.fc(x)), fc=linear(6, 4)), ROWS, "ids=int64[B,4]:0..5"),
    "graph_layer": case(
        net(lambda self, x, edges: torch.zeros(x.shape[0], 5).index_add_(0, edges[1], self.fc(x)[edges[0]]).relu(), fc=linear(6, 5)),
        "x=float32[9,6]",
        "edges=int64[2,E]:0..8",
        E=(5, 20, 1),
    ),
    "one_hot": case(net(lambda self, ids: F.one_hot(ids, 7).float() @ self.w, w=param(7, 4)), "ids=int64[B,T]:0..6"),
    "bucketize": case(
        net(lambda self, x: self.table(torch.bucketize(x, self.edges)), edges=lambda: torch.linspace(-1, 1, 6), table=of(nn.Embedding, 7, 4)), ROWS
    ),
    "searchsorted": case(
        net(lambda self, x: torch.searchsorted(self.edges.cumsum(0), self.fc(x).sigmoid()), edges=lambda: torch.rand(6) / 4, fc=linear(6, 4)), ROWS
    ),
    "where": case(net(lambda self, x: torch.where(self.fc(x) > 0, self.fc(x), self.slope * x), fc=linear(6, 6), slope=param()), ROWS),
    "clamp": case(
        net(lambda self, x: self.fc(x).clamp(-0.5, 0.5).clamp_min(self.low).minimum(self.high), fc=linear(6, 5), low=param(5), high=param()), ROWS
    ),
    "casts": case(
        net(
            lambda self, x: self.fc(x).double().add(self.w).to(x.dtype).type_as(self.w) + self.fc(x).int() + self.fc(x).bool().float(),
            fc=linear(6, 5),
            w=param(5),
        ),
        ROWS,
    ),
    "bytes_to_floats": case(
        net(lambda self, x: self.fc(x.float().div(255).sub(self.mean)), fc=linear(6, 5), mean=lambda: torch.rand(6)), "x=uint8[B,6]:0..255"
    ),
    "powers": case(
        net(
            lambda self, x: self.fc(x).abs().pow(self.p.abs()) + self.fc(x) ** 2 + 2 ** self.fc(x),
            fc=linear(6, 5),
            p=param(),
        ),
        ROWS,
    ),
    "remainders": case(
        net(lambda self, x: torch.remainder(self.fc(x), 0.7) + torch.fmod(self.fc(x), self.w) + self.fc(x) // 0.5, fc=linear(6, 5), w=param(5)), ROWS
    ),
    "lerp_addcmul": case(
        net(
            lambda self, x: torch.lerp(self.fc(x), x, self.t).addcmul(self.a, x, value=0.5).addcdiv(x, self.b.exp()),
            fc=linear(6, 6),
            t=param(),
            a=param(6),
            b=param(6),
        ),
        ROWS,
    ),
    "solve": case(
        net(
            lambda self, x: torch.linalg.solve(self.w @ self.w.mT + 2 * torch.eye(6), x.mT).mT + x @ torch.linalg.inv(self.w + 4 * torch.eye(6)),
            w=param(6, 6),
        ),
        ROWS,
    ),
    "cholesky": case(
        net(lambda self, x: x @ torch.linalg.cholesky(self.w @ self.w.t() + torch.eye(6)) + torch.linalg.det(self.w), w=param(6, 6)), ROWS
    ),
    "trace": case(net(lambda self, x: self.fc(x) * torch.trace(self.w), fc=linear(6, 5), w=param(6, 6)), ROWS),
    "gaussian_log_prob": case(
        net(lambda self, x: torch.distributions.Normal(self.fc(x), self.s.exp()).log_prob(x).sum(-1), fc=linear(6, 6), s=param(6)), ROWS
    ),
    "gumbel_free_sample": case(net(lambda self, x: torch.distributions.Categorical(logits=self.fc(x)).entropy(), fc=linear(6, 5)), ROWS),
}


# Masks


def masked_mean(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    keep = (~mask).unsqueeze(-1).float()
    return (self.fc(x) * keep).sum(1) / keep.sum(1).clamp(min=1)


def assigned(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    y = self.fc(x)
    y[mask] = self.fill
    y[:, 0] = 0.5
    return y


def assigned_by_value(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    y[y < 0] = 0.0
    y[x > 1] *= 2
    return y


CASES |= {
    "bool_mask": case(
        net(lambda self, x, mask: self.fc(x).masked_fill(mask.unsqueeze(-1), -1e9).softmax(1), fc=linear(8, 5)), TEXT, "mask=bool[B,T]"
    ),
    "float_mask": case(net(lambda self, x, mask: (self.fc(x) + mask[..., None] * -1e4).softmax(1), fc=linear(8, 5)), TEXT, "mask=float32[B,T]"),
    "inf_mask": case(
        net(lambda self, x, mask: self.fc(x).masked_fill(mask[..., None], float("-inf")).amax(1), fc=linear(8, 5)), TEXT, "mask=bool[B,T]"
    ),
    "masked_mean": case(net(masked_mean, fc=linear(8, 5)), TEXT, "mask=bool[B,T]"),
    "mask_from_ids": case(
        net(lambda self, ids: (self.table(ids) * (ids != 0).unsqueeze(-1)).sum(1), table=of(nn.Embedding, 9, 4)), "ids=int64[B,T]:0..8"
    ),
    "mask_from_lengths": case(
        net(
            lambda self, x, lengths: self.fc(x).masked_fill((torch.arange(x.shape[1])[None] >= lengths[:, None])[..., None], 0).sum(1),
            fc=linear(8, 5),
        ),
        TEXT,
        "lengths=int64[B]:1..4",
    ),
    "mask_assigned": case(net(assigned, fc=linear(8, 5), fill=param(5)), TEXT, "mask=bool[B,T]"),
    "mask_from_values_assigned": case(net(assigned_by_value, fc=linear(6, 6)), ROWS),
    "masked_scatter": case(
        net(lambda self, x, mask: self.fc(x).masked_scatter(mask[..., None], self.fc(x).exp()), fc=linear(8, 5)), TEXT, "mask=bool[B,T]"
    ),
    "mask_token": case(
        net(lambda self, x, mask: self.fc(torch.where(mask[..., None], self.token, x)), fc=linear(8, 5), token=param(8)), TEXT, "mask=bool[B,T]"
    ),
    "causal_buffer": case(
        net(
            lambda self, x: (self.q(x) @ self.q(x).mT).masked_fill(self.causal[: x.shape[1], : x.shape[1]], float("-inf")).softmax(-1) @ x,
            q=linear(8, 8),
            causal=lambda: torch.ones(16, 16, dtype=torch.bool).triu(1),
        ),
        TEXT,
        "T=1..16",
        T=(7, 12, 2),
    ),
}


# Inputs and outputs

Pair = namedtuple("Pair", ["mean", "scale"])


@dataclass
class Answer:
    """An output class as transformers has them."""

    logits: Tensor
    hidden: Tensor | None = None


torch.export.register_dataclass(Answer, serialized_type_name="test_patterns.Answer")


class Many(nn.Module):
    """Positional, optional and keyword-only arguments, numbers and None among them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor, shift: Tensor | None = None, *, scale: float = 2.0, mask: Tensor | None = None, flag: bool = True) -> Tensor:
        y = self.fc(x) * scale
        y = y if shift is None else y + shift
        return y if mask is None or not flag else y.masked_fill(mask, 0)


def nested_inputs(sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(sizes["B"], 6, generator=g) for _ in range(3))
    return {"batch": {"image": a, "pair": (b, c)}, "scale": 3}


def pyramid(sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"levels": [torch.randn(sizes["B"], 4, s, s, generator=g) for s in (8, 4)]}


def either(sizes: Mapping[str, int], seed: int, name: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {"x": torch.randn(sizes["B"], 6, generator=g)}
    shift = {"shift": torch.randn(sizes["B"], 1, generator=g)}
    mask = {"mask": torch.randn(sizes["B"], 5, generator=g) > 0, "scale": 0.5}
    return given | (shift if name == "shift" else mask)


def batch_sample(sample: Callable[[Mapping[str, int], int], dict[str, Any]], make: Make, dynamic: Mapping[str, Any]) -> Case:
    return Case(make, (), {"B": (5, 1, 2)}, sample, dynamic, {"B": 4})


CASES |= {
    "several_inputs": case(
        net(lambda self, a, b, c: self.fc(a) * b + c.sum(1, keepdim=True), fc=linear(6, 5)), "a=float32[B,6]", "b=float32[B,5]", "c=float32[B,T]"
    ),
    "keyword_inputs": case(
        net(lambda self, *, ids, types: self.a(ids) + self.b(types), a=of(nn.Embedding, 9, 4), b=of(nn.Embedding, 2, 4)),
        "ids=int64[B,T]:0..8",
        "types=int64[B,T]:0..1",
    ),
    "dict_output": case(net(lambda self, x: {"logits": self.fc(x), "probs": self.fc(x).softmax(-1), "input": x}, fc=linear(6, 5)), ROWS),
    "tuple_output": case(net(lambda self, x: (self.fc(x), (x.mean(1), [self.fc(x).sum(1)])), fc=linear(6, 5)), ROWS),
    "named_tuple_output": case(net(lambda self, x: Pair(*self.fc(x).chunk(2, 1)), fc=linear(6, 4)), ROWS),
    "dataclass_output": case(net(lambda self, x: Answer(self.fc(x)), fc=linear(6, 5)), ROWS),
    "none_output": case(net(lambda self, x: (self.fc(x), None, {"aux": None, "n": 3}), fc=linear(6, 5)), ROWS),
    "parameter_output": case(net(lambda self, x: (self.fc(x), self.w, self.w * 2), fc=linear(6, 5), w=param(4)), ROWS),
    "nested_inputs": batch_sample(
        nested_inputs,
        net(lambda self, batch, scale: self.fc(batch["image"]) * scale + batch["pair"][0][:, :5] - batch["pair"][1][:, :5], fc=linear(6, 5)),
        {"batch": {"image": {0: "B"}, "pair": ({0: "B"}, {0: "B"})}},
    ),
    "list_input": batch_sample(
        pyramid,
        net(lambda self, levels: [c(x) for c, x in zip(self.convs, levels)], convs=lambda: nn.ModuleList(nn.Conv2d(4, 5, 3) for _ in range(2))),
        {"levels": [{0: "B"}, {0: "B"}]},
    ),
    "optional_given": batch_sample(partial(either, name="shift"), Many, {"x": {0: "B"}, "shift": {0: "B"}}),
    "optional_keyword": batch_sample(partial(either, name="mask"), Many, {"x": {0: "B"}, "mask": {0: "B"}}),
    "whole_number_inputs": case(
        net(lambda self, x, step: self.fc(x) * self.table(step)[None], fc=linear(6, 4), table=of(nn.Embedding, 9, 4)), ROWS, "step=int64[]:0..8"
    ),
    "double_inputs": case(net(lambda self, x: self.fc(x.float()).double() + x[:, :5], fc=linear(6, 5)), "x=float64[B,6]"),
}


# Weights and buffers


class Buffers(nn.Module):
    """A saved buffer, one that is not saved, one of whole numbers, a plain tensor attribute, a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.register_buffer("table", torch.sin(torch.arange(16.0)[:, None] * torch.arange(1, 9)), persistent=False)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 5, 6, 4]))
        self.shift = torch.linspace(0, 1, 8)
        self.extra = [torch.ones(8), torch.full((1, 8), 0.25)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.scale + self.table[: x.shape[1]]
        return y[..., self.order] + self.shift + self.extra[0] * self.extra[1]


class Tied(nn.Module):
    """The output projection is the embedding; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(self.embed(ids)).relu()))


def tied_encoder_decoder(self: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, self.fc.weight, self.fc.bias).relu(), self.fc.weight.t(), self.back)


CASES |= {
    "buffers": case(Buffers, TEXT, "T=1..16"),
    "tied": case(Tied, "ids=int64[B,T]:0..10"),
    "tied_transposed": case(net(tied_encoder_decoder, fc=linear(6, 5), back=param(6)), ROWS),
    "parameters": case(net(lambda self, x: x * self.gain + self.bias - self.zero.sigmoid(), gain=param(6), bias=param(1, 6), zero=param()), ROWS),
    "parameter_list": case(
        net(
            lambda self, x: sum(x @ w for w in self.ws) * self.named["scale"],
            ws=lambda: nn.ParameterList(nn.Parameter(torch.randn(6, 5)) for _ in range(2)),
            named=lambda: nn.ParameterDict({"scale": nn.Parameter(torch.randn(5))}),
        ),
        ROWS,
    ),
    "module_dict": case(
        net(lambda self, x: self.by["a"](x) + self.by["b"](x), by=lambda: nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(6, 5)})), ROWS
    ),
    "logit_scale": case(
        net(
            lambda self, x, y: F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).t() * self.scale.exp(),
            a=linear(6, 4),
            b=linear(5, 4),
            scale=param(),
        ),
        ROWS,
        "y=float32[K,5]",
    ),
    "layer_scale": case(
        net(lambda self, x: x + self.gamma[:, None, None] * self.conv(x), conv=of(nn.Conv2d, 4, 4, 3, padding=1), gamma=param(4)), IMAGE
    ),
    "only_parameters": case(net(lambda self, x: x + (self.w @ self.w.t()).softmax(-1).sum(0), w=param(6, 4)), ROWS),
    "weights_from_weights": case(
        net(
            lambda self, x: F.linear(x, self.a * torch.sigmoid(self.gate), self.low @ self.high),
            a=param(5, 6),
            gate=param(5, 1),
            low=param(5, 2),
            high=param(2),
        ),
        ROWS,
    ),
    "lora": case(net(lambda self, x: self.fc(x) + x @ self.down.t() @ self.up.t() * 0.5, fc=linear(6, 5), down=param(2, 6), up=param(5, 2)), ROWS),
    "mixture_of_experts": case(
        net(
            lambda self, x: torch.einsum("be,beo->bo", self.gate(x).softmax(-1), torch.einsum("bi,eio->beo", x, self.experts)),
            gate=linear(6, 4),
            experts=param(4, 6, 5),
        ),
        ROWS,
    ),
    "hyper_network": case(
        net(lambda self, x, z: torch.bmm(self.make(z).view(-1, 5, 6), x.unsqueeze(-1)).squeeze(-1), make=linear(4, 30)), ROWS, "z=float32[B,4]"
    ),
    "film": case(
        net(
            lambda self, x, z: self.conv(x) * (1 + self.fc(z).chunk(2, 1)[0][..., None, None]) + self.fc(z).chunk(2, 1)[1][..., None, None],
            conv=of(nn.Conv2d, 4, 5, 3),
            fc=linear(6, 10),
        ),
        IMAGE,
        "z=float32[B,6]",
    ),
    "squeeze_excite": case(
        net(lambda self, x: x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None], down=linear(4, 2), up=linear(2, 4)), IMAGE
    ),
    "residual": case(net(lambda self, x: x + self.b(self.a(x).relu()), a=linear(6, 6), b=linear(6, 6)), ROWS),
}


# In place


def in_place_slices(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    y[:, 0] = x[:, 0, :5]
    y[:, 1:] *= 2
    y[..., -1] += self.w
    y[:, ::2].clamp_(max=1.0)
    return y


def in_place_views(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    y.view(x.shape[0], -1)[:, :4].relu_()
    y.add_(1).mul_(self.w).masked_fill_(y > 2, -1.0)
    y.select(1, 1).zero_()
    y.transpose(1, 2)[:, 0].fill_(0.5)
    return y


def in_place_rows(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 4, 5)
    for i in range(4):
        out[:, i] = self.fc(x[:, i])
    out.index_add_(1, torch.tensor([0, 2]), out[:, 1:3].clone())
    out.index_fill_(1, torch.tensor([3]), 0.25)
    return out.index_copy_(1, torch.tensor([1, 0]), out[:, 2:4] * self.w)


def in_place_dropout(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    z = self.drop(y)
    z.mul_(2)
    return y + z


def in_place_put(self: Any, x: Tensor, rows: Tensor) -> Tensor:
    y = self.fc(x).clone()
    y[torch.arange(x.shape[0]), rows] = self.w
    y[:, [0, 2], [1, 3]] = 0.0
    y[:, :, [0, 1]] = y[:, :, [3, 4]] * 2
    return y.index_put((rows,), self.w, accumulate=True) if x.shape[0] > 4 else y


CASES |= {
    "in_place_relu": case(
        chain(linear(6, 5), of(nn.ReLU, inplace=True), linear(5, 4), of(nn.SiLU, inplace=True), of(nn.Hardtanh, inplace=True)), "input=float32[B,6]"
    ),
    "in_place_add": case(net(lambda self, x: self.fc(x).add_(self.w).sigmoid_().mul_(x[:, :5]).neg_(), fc=linear(6, 5), w=param(5)), ROWS),
    "in_place_slices": case(net(in_place_slices, fc=linear(6, 5), w=param(4)), FLAT),
    "in_place_views": case(net(in_place_views, fc=linear(6, 5), w=param(5)), FLAT),
    "in_place_rows": case(net(in_place_rows, fc=linear(6, 5), w=param(5)), FLAT),
    "in_place_dropout": case(net(in_place_dropout, fc=linear(6, 5), drop=of(nn.Dropout, 0.5)), ROWS),
    "in_place_put": case(net(in_place_put, fc=linear(6, 5), w=param(5)), FLAT, "rows=int64[B]:0..3", B=(4, 1, 2)),
    "copy_into": case(
        net(lambda self, x: torch.empty(x.shape[0], 5).copy_(self.fc(x)) + torch.full_like(x[:, :5], 2).fill_(self.w), fc=linear(6, 5), w=param()),
        ROWS,
    ),
}


# Convolutions


def standardized(self: Any, x: Tensor) -> Tensor:
    w = self.conv.weight
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.conv2d(x, w, self.conv.bias, padding=1)


def conv(d: int, *args: Any, **kwargs: Any) -> Make:
    return chain(of([nn.Conv1d, nn.Conv2d, nn.Conv3d][d - 1], *args, **kwargs))


def transposed(d: int, *args: Any, **kwargs: Any) -> Make:
    return chain(of([nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][d - 1], *args, **kwargs))


I1, I2, I3 = "input=float32[B,4,T]", "input=float32[B,4,H,W]", "input=float32[B,4,5,6,5]"

CASES |= {
    "conv1d": case(conv(1, 4, 6, 3, padding=1), I1),
    "conv2d": case(conv(2, 4, 6, 3, stride=2), I2),
    "conv3d": case(conv(3, 4, 6, 3), I3),
    "conv_grouped": case(chain(of(nn.Conv2d, 4, 8, 3, groups=2), of(nn.Conv2d, 8, 8, 1, groups=4, bias=False)), I2),
    "conv_depthwise": case(chain(of(nn.Conv2d, 4, 8, 3, groups=4, padding=1), of(nn.Conv2d, 8, 6, 1)), I2),
    "conv1d_depthwise_causal": case(net(lambda self, x: self.conv(F.pad(x, (2, 0))), conv=of(nn.Conv1d, 4, 4, 3, groups=4)), "x=float32[B,4,T]"),
    "conv_dilated": case(conv(2, 4, 6, 3, dilation=2, padding=2), I2),
    "conv_same": case(chain(of(nn.Conv2d, 4, 6, 3, padding="same"), of(nn.Conv2d, 6, 6, (2, 4), padding="same", groups=2)), I2),
    "conv_reflect": case(conv(2, 4, 6, 3, padding=1, padding_mode="reflect"), I2),
    "conv_replicate": case(
        chain(of(nn.Conv1d, 4, 6, 3, padding=1, padding_mode="replicate"), of(nn.Conv1d, 6, 4, 3, padding=1, padding_mode="zeros")), I1
    ),
    "conv_circular": case(
        chain(of(nn.Conv2d, 4, 6, 3, padding=2, padding_mode="circular"), of(nn.Conv2d, 6, 6, 3, padding=1, padding_mode="circular", groups=6)), I2
    ),
    "conv_circular_3d": case(conv(3, 4, 6, 3, padding=1, padding_mode="circular"), I3),
    "conv_transposed1d": case(transposed(1, 4, 6, 3, stride=2), I1),
    "conv_transposed2d": case(
        chain(of(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1, output_padding=1), of(nn.ConvTranspose2d, 6, 4, 2, groups=2)), I2
    ),
    "conv_transposed3d": case(transposed(3, 4, 6, 2, stride=2, dilation=2), I3),
    "conv_transposed_size": case(
        net(lambda self, x: self.up(x, output_size=[16, 12]), up=of(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1)), IMAGE
    ),
    "conv_unbatched": case(conv(2, 4, 6, 3), "input=float32[4,H,W]"),
    "conv_standardized": case(net(standardized, conv=of(nn.Conv2d, 4, 6, 3)), IMAGE),
    "conv_fixed_kernel": case(
        net(
            lambda self, x: self.conv(F.conv2d(x, self.blur.expand(4, 1, 3, 3), groups=4, padding=1)),
            conv=of(nn.Conv2d, 4, 5, 1),
            blur=lambda: torch.ones(1, 1, 3, 3) / 9,
        ),
        IMAGE,
    ),
    "conv_frozen_stem": case(net(lambda self, x: self.conv(F.conv2d(x, torch.ones(4, 4, 3, 3))), conv=of(nn.Conv2d, 4, 5, 1)), IMAGE),
    "conv_of_own_kernels": case(
        net(
            lambda self, x, z: F.conv2d(x.flatten(0, 1)[None], self.make(z).view(-1, 1, 3, 3), groups=x.shape[0] * 4)[0].unflatten(0, (-1, 4)),
            make=linear(6, 36),
        ),
        IMAGE,
        "z=float32[B,6]",
    ),
    "conv_bn_relu_pool": case(chain(of(nn.Conv2d, 4, 6, 3, bias=False), of(nn.BatchNorm2d, 6), of(nn.ReLU), of(nn.MaxPool2d, 2)), I2),
    "separable_block": case(
        chain(
            of(nn.Conv2d, 4, 4, 3, padding=1, groups=4),
            of(nn.BatchNorm2d, 4),
            of(nn.ReLU6),
            of(nn.Conv2d, 4, 6, 1),
            of(nn.BatchNorm2d, 6),
            of(nn.Hardswish),
        ),
        I2,
    ),
    "text_cnn": case(
        net(
            lambda self, ids: torch.cat([F.relu(c(self.e(ids).transpose(1, 2))).amax(2) for c in self.convs], 1),
            e=of(nn.Embedding, 9, 4),
            convs=lambda: nn.ModuleList(nn.Conv1d(4, 5, k) for k in (2, 3)),
        ),
        "ids=int64[B,T]:0..8",
    ),
    "convnext_block": case(
        net(
            lambda self, x: x + self.b(F.gelu(self.a(self.norm(self.dw(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2),
            dw=of(nn.Conv2d, 4, 4, 7, padding=3, groups=4),
            norm=of(nn.LayerNorm, 4),
            a=linear(4, 8),
            b=linear(8, 4),
        ),
        IMAGE,
    ),
}


# Norms


class Functional(nn.Module):
    """Norms by their functions, over buffers and parameters that are named otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        self.g = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.get_buffer("running_mean"), self.get_buffer("running_var"), self.g, training=False)
        return F.group_norm(F.layer_norm(y, y.shape[2:]), 2, self.g, -self.g) + F.instance_norm(x, weight=self.g) + F.local_response_norm(y, 2)


def norm(kind: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Make:
    """Behind a layer of the member's own."""
    return chain(of(nn.Conv2d, 4, 4, 1), of(kind, *args, **kwargs))


CASES |= {
    "batch_norm1d": case(chain(linear(6, 5), of(nn.BatchNorm1d, 5), linear(5, 4)), "input=float32[B,6]"),
    "batch_norm1d_3d": case(chain(of(nn.Conv1d, 4, 6, 1), of(nn.BatchNorm1d, 6), of(nn.ReLU)), I1),
    "batch_norm_first": case(chain(of(nn.BatchNorm2d, 4), of(nn.Conv2d, 4, 5, 3)), I2),
    "batch_norm_plain": case(norm(nn.BatchNorm2d, 4, affine=False, eps=1e-3), I2),
    "batch_norm_no_statistics": case(norm(nn.BatchNorm2d, 4, track_running_stats=False), I2),
    "batch_norm_bare": case(norm(nn.BatchNorm2d, 4, affine=False, track_running_stats=False), I2),
    "batch_norm3d": case(chain(of(nn.Conv3d, 4, 5, 2), of(nn.BatchNorm3d, 5)), I3),
    "sync_batch_norm": case(norm(nn.SyncBatchNorm, 4), I2),
    "layer_norm": case(chain(of(nn.LayerNorm, 8), linear(8, 5)), "input=float32[B,T,8]"),
    "layer_norm_plain": case(chain(linear(8, 8), of(nn.LayerNorm, 8, elementwise_affine=False), linear(8, 5)), "input=float32[B,T,8]"),
    "layer_norm_no_bias": case(chain(linear(8, 8), of(nn.LayerNorm, 8, bias=False, eps=1e-3)), "input=float32[B,T,8]"),
    "layer_norm_image": case(chain(of(nn.Conv2d, 4, 5, 3), of(nn.LayerNorm, [5, 6, 4])), "input=float32[B,4,8,6]"),
    "group_norm": case(norm(nn.GroupNorm, 2, 4), I2),
    "group_norm_plain": case(norm(nn.GroupNorm, 4, 4, affine=False), I2),
    "group_norm_in_chain": case(chain(of(nn.Conv2d, 4, 8, 3, groups=4), of(nn.GroupNorm, 4, 8), of(nn.SiLU), of(nn.Conv2d, 8, 4, 1)), I2),
    "instance_norm": case(norm(nn.InstanceNorm2d, 4), I2),
    "instance_norm_affine": case(norm(nn.InstanceNorm2d, 4, affine=True), I2),
    "instance_norm_tracked": case(norm(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), I2),
    "instance_norm1d": case(chain(of(nn.Conv1d, 4, 5, 1), of(nn.InstanceNorm1d, 5, affine=True)), I1),
    "rms_norm": case(chain(linear(8, 8), of(nn.RMSNorm, 8), linear(8, 5)), "input=float32[B,T,8]"),
    "rms_norm_by_hand": case(
        net(lambda self, x: self.fc(x) * torch.rsqrt(self.fc(x).pow(2).mean(-1, keepdim=True) + 1e-6) * self.g, fc=linear(8, 8), g=param(8)), TEXT
    ),
    "local_response_norm": case(norm(nn.LocalResponseNorm, 2), I2),
    "functional_norms": case(Functional, "x=float32[B,4,5,6]"),
    "weight_norm": case(
        chain(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), lambda: parametrizations.weight_norm(nn.Linear(5, 4), dim=1)),
        "input=float32[B,6]",
    ),
    "weight_norm_conv": case(
        chain(lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3)), lambda: parametrizations.weight_norm(nn.ConvTranspose1d(6, 4, 3), dim=1)), I1
    ),
    "weight_norm_whole": case(chain(lambda: parametrizations.weight_norm(nn.Linear(6, 5), dim=-1)), "input=float32[B,6]"),
    "spectral_norm": case(
        chain(lambda: parametrizations.spectral_norm(nn.Linear(6, 5)), lambda: parametrizations.spectral_norm(nn.Linear(5, 4))), "input=float32[B,6]"
    ),
    "spectral_norm_conv": case(
        chain(lambda: parametrizations.spectral_norm(nn.Conv2d(4, 6, 3)), lambda: nn.utils.spectral_norm(nn.Conv2d(6, 4, 1))), I2
    ),
    "orthogonal": case(chain(lambda: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley")), "input=float32[B,6]"),
}


# Attention


def attention(forward: Callable[..., Any], **options: Any) -> Make:
    return net(forward, m=of(nn.MultiheadAttention, 8, 2, **options))


def plain(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.m(x, x, x)


def rotary(self: Any, x: Tensor) -> Tensor:
    q, k = self.qk(x).view(x.shape[0], x.shape[1], 2, 2, 4).permute(2, 0, 3, 1, 4)
    angle = torch.arange(x.shape[1])[:, None] * self.freq
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    turn = lambda t: t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin  # noqa: E731
    return F.scaled_dot_product_attention(turn(q), turn(k), x.unflatten(-1, (2, 4)).transpose(1, 2), is_causal=True)


def relative_bias(self: Any, x: Tensor) -> Tensor:
    t = torch.arange(x.shape[1])
    bias = self.bias((t[:, None] - t[None]).clamp(-4, 4) + 4).permute(2, 0, 1)
    q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
    return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).flatten(2))


def window_attention(self: Any, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    y = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
    q, k, v = self.qkv(y).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
    y = ((q @ k.transpose(-2, -1)) * 0.5 + self.bias[self.index]).softmax(-1) @ v
    return y.transpose(1, 2).reshape(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


def linear_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return torch.einsum("btd,bde->bte", q, torch.einsum("btd,bte->bde", k, v)) / (q @ k.sum(1).unsqueeze(-1))


def grouped_query(self: Any, x: Tensor) -> Tensor:
    q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.kv(x).chunk(2, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3).transpose(1, 2).flatten(2)


BATCH, TIME = "x=float32[B,T,8]", "x=float32[T,B,8]"
CAUSAL = "mask=float32[T,T]"
ENCODER: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 12}


def causal(x: Tensor, t: int) -> Tensor:
    return torch.full((t, t), float("-inf")).triu(1)


CASES |= {
    "mha": case(attention(plain, batch_first=True), BATCH),
    "mha_time_first": case(attention(plain), TIME),
    "mha_no_weights": case(attention(lambda self, x: self.m(x, x, x, need_weights=False)[0], batch_first=True, bias=False), BATCH),
    "mha_weights_by_head": case(attention(lambda self, x: self.m(x, x, x, average_attn_weights=False), batch_first=True), BATCH),
    "mha_key_padding": case(attention(lambda self, x, mask: self.m(x, x, x, key_padding_mask=mask), batch_first=True), BATCH, "mask=bool[B,T]"),
    "mha_key_padding_no_weights": case(
        attention(lambda self, x, mask: self.m(x, x, x, key_padding_mask=mask, need_weights=False)[0]), TIME, "mask=bool[B,T]"
    ),
    "mha_float_padding": case(
        attention(lambda self, x, mask: self.m(x, x, x, key_padding_mask=mask, need_weights=False)[0], batch_first=True), BATCH, "mask=float32[B,T]"
    ),
    "mha_bool_mask": case(
        attention(lambda self, x, mask: self.m(x, x, x, attn_mask=mask, need_weights=False)[0], batch_first=True), BATCH, "mask=bool[T,T]"
    ),
    "mha_float_mask": case(attention(lambda self, x, mask: self.m(x, x, x, attn_mask=mask), batch_first=True), BATCH, CAUSAL),
    "mha_mask_by_head": case(
        attention(lambda self, x, mask: self.m(x, x, x, attn_mask=mask.flatten(0, 1), need_weights=False)[0], batch_first=True),
        BATCH,
        "mask=float32[B,2,T,T]",
    ),
    "mha_both_masks": case(
        attention(lambda self, x, mask, pad: self.m(x, x, x, attn_mask=mask, key_padding_mask=pad)[0], batch_first=True),
        BATCH,
        "mask=bool[T,T]",
        "pad=bool[B,T]",
    ),
    "mha_causal": case(
        attention(lambda self, x: self.m(x, x, x, attn_mask=causal(x, x.shape[1]), is_causal=True, need_weights=False)[0], batch_first=True), BATCH
    ),
    "mha_cross": case(attention(lambda self, x, y: self.m(x, y, y), batch_first=True), BATCH, "y=float32[B,S,8]", S=(6, 9, 2)),
    "mha_other_sizes": case(
        attention(lambda self, x, y, z: self.m(x, y, z, need_weights=False)[0], batch_first=True, kdim=6, vdim=4),
        BATCH,
        "y=float32[B,S,6]",
        "z=float32[B,S,4]",
        S=(6, 9, 2),
    ),
    "mha_bias_kv": case(attention(plain, batch_first=True, add_bias_kv=True), BATCH),
    "mha_zero_attn": case(attention(plain, batch_first=True, add_zero_attn=True), BATCH),
    "mha_unbatched": case(attention(plain), "x=float32[T,8]"),
    "sdpa_mask": case(
        net(lambda self, x, mask: F.scaled_dot_product_attention(self.q(x), x, x, attn_mask=~mask), q=linear(8, 8)), BATCH, "mask=bool[T,T]"
    ),
    "grouped_query": case(net(grouped_query, q=linear(8, 16), kv=linear(8, 16)), BATCH),
    "rotary": case(net(rotary, qk=linear(8, 16), freq=lambda: torch.tensor([1.0, 0.1])), BATCH),
    "relative_bias": case(net(relative_bias, qkv=linear(8, 24), out=linear(8, 8), bias=of(nn.Embedding, 9, 2)), BATCH),
    "patch_softmax": case(
        net(lambda self, x: self.fc(x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)).softmax(-1), fc=linear(4, 5)),
        "x=float32[B,4,2*H,2*W]",
        H=(4, 1, 3),
        W=(2, 5, 4),
    ),
    "swin_window": case(
        net(window_attention, qkv=linear(4, 12), bias=param(2, 4, 4), index=lambda: torch.tensor([1, 0])),
        "x=float32[B,4,2*H,2*W]",
        B=(5, 2, 1),
        H=(4, 1, 3),
        W=(2, 5, 4),
    ),
    "linear_attention": case(net(linear_attention, qkv=linear(8, 24)), BATCH),
    "encoder_layer": case(of(nn.TransformerEncoderLayer, **ENCODER, batch_first=True), "src=float32[B,T,8]"),
    "encoder_layer_norm_first": case(of(nn.TransformerEncoderLayer, **ENCODER, norm_first=True, activation="gelu"), "src=float32[T,B,8]"),
    "encoder": case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER, batch_first=True), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False),
        "src=float32[B,T,8]",
        "src_key_padding_mask=bool[B,T]",
    ),
    "encoder_masks": case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER, batch_first=True, bias=False), 1, enable_nested_tensor=False),
        "src=float32[B,T,8]",
        "mask=bool[T,T]",
        "src_key_padding_mask=bool[B,T]",
    ),
    "encoder_causal": case(
        net(
            lambda self, x: self.e(x, mask=causal(x, x.shape[1]), is_causal=True),
            e=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER, batch_first=True), 1, enable_nested_tensor=False),
        ),
        BATCH,
    ),
    "decoder": case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER, batch_first=True), 2),
        "tgt=float32[B,T,8]",
        "memory=float32[B,S,8]",
        "tgt_mask=float32[T,T]",
        "memory_key_padding_mask=bool[B,S]",
        S=(6, 9, 2),
    ),
    "decoder_layer": case(
        of(nn.TransformerDecoderLayer, **ENCODER, norm_first=True),
        "tgt=float32[T,B,8]",
        "memory=float32[S,B,8]",
        "memory_mask=bool[T,S]",
        "tgt_key_padding_mask=bool[B,T]",
        S=(6, 9, 2),
    ),
    "transformer": case(
        net(
            lambda self, x, y: self.t(x, y, tgt_mask=causal(y, y.shape[1]), tgt_is_causal=True),
            t=of(nn.Transformer, 8, 2, 1, 1, 12, batch_first=True),
        ),
        BATCH,
        "y=float32[B,S,8]",
        S=(6, 9, 2),
    ),
}


# Recurrent


def cells(self: Any, x: Tensor) -> Tensor:
    h, c = x.new_zeros(x.shape[0], 6), torch.zeros(x.shape[0], 6)
    g, r = self.start.expand(x.shape[0], -1), x.new_zeros(x.shape[0], 6)
    for t in range(4):
        h, c = self.lstm(x[:, t], (h, c))
        g = self.gru(h, g)
        r = self.rnn(g, r)
    return r


def relu_cell(self: Any, x: Tensor) -> Tensor:
    h, c = self.lstm(x)
    return self.rnn(self.gru(h)) + c


SEQUENCE, TIMED = "input=float32[B,6,8]", "input=float32[6,B,8]"

CASES |= {
    "lstm": case(of(nn.LSTM, 8, 5, batch_first=True), SEQUENCE),
    "lstm_layers": case(of(nn.LSTM, 8, 5, num_layers=2, bidirectional=True, batch_first=True, dropout=0.5), SEQUENCE),
    "lstm_time_first": case(of(nn.LSTM, 8, 5, num_layers=2), TIMED),
    "lstm_projected": case(of(nn.LSTM, 8, 5, proj_size=4, batch_first=True), SEQUENCE),
    "lstm_state": case(
        net(lambda self, x, h, c: self.r(x, (h, c)), r=of(nn.LSTM, 8, 5, bias=False, batch_first=True)),
        "x=float32[B,6,8]",
        "h=float32[1,B,5]",
        "c=float32[1,B,5]",
    ),
    "lstm_last_step": case(
        net(
            lambda self, ids: self.fc(self.r(self.e(ids))[0][:, -1]), e=of(nn.Embedding, 9, 8), r=of(nn.LSTM, 8, 5, batch_first=True), fc=linear(5, 4)
        ),
        "ids=int64[B,6]:0..8",
    ),
    "lstm_unbatched": case(of(nn.LSTM, 8, 5), "input=float32[6,8]"),
    "gru": case(of(nn.GRU, 8, 5, batch_first=True), SEQUENCE),
    "gru_layers": case(of(nn.GRU, 8, 5, num_layers=2, bidirectional=True), TIMED),
    "gru_state": case(net(lambda self, x, h: self.r(x, h), r=of(nn.GRU, 8, 5, bias=False)), "x=float32[6,B,8]", "h=float32[1,B,5]"),
    "rnn_tanh": case(of(nn.RNN, 8, 5, batch_first=True), SEQUENCE),
    "rnn_relu": case(of(nn.RNN, 8, 5, num_layers=2, nonlinearity="relu", bidirectional=True), TIMED),
    "cells": case(
        net(cells, lstm=of(nn.LSTMCell, 8, 6), gru=of(nn.GRUCell, 6, 6, bias=False), rnn=of(nn.RNNCell, 6, 6), start=param(1, 6)), "x=float32[B,4,8]"
    ),
    "relu_cell": case(
        net(relu_cell, lstm=of(nn.LSTMCell, 8, 6, bias=False), gru=of(nn.GRUCell, 6, 6), rnn=of(nn.RNNCell, 6, 6, nonlinearity="relu")),
        "x=float32[B,8]",
    ),
}


# Embeddings

IDS = "ids=int64[B,T]:0..8"
BAG = "input=int64[B,T]:0..8"

CASES |= {
    "embedding": case(chain(of(nn.Embedding, 9, 4), linear(4, 5)), "input=int64[B,T]:0..8"),
    "embedding_padding": case(of(nn.Embedding, 9, 4, padding_idx=0), "input=int64[B,T]:0..8"),
    "embedding_short_ids": case(net(lambda self, ids: self.e(ids).sum(1), e=of(nn.Embedding, 9, 4, scale_grad_by_freq=True)), "ids=int32[B,T]:0..8"),
    "embedding_max_norm": case(net(lambda self, ids: self.fc(self.e(ids)), e=of(nn.Embedding, 9, 4, max_norm=1.0), fc=linear(4, 5)), IDS),
    "embedding_positions": case(
        net(
            lambda self, ids: self.e(ids) + self.p(torch.arange(ids.shape[1], device=ids.device)), e=of(nn.Embedding, 9, 4), p=of(nn.Embedding, 16, 4)
        ),
        IDS,
        "T=1..16",
    ),
    "embedding_of_features": case(
        net(
            lambda self, x: self.fc(torch.cat([e(x[:, i]) for i, e in enumerate(self.tables)], 1)),
            tables=lambda: nn.ModuleList(nn.Embedding(7, 4) for _ in range(2)),
            fc=linear(8, 5),
        ),
        "x=int64[B,2]:0..6",
    ),
    "embedding_by_predicted_ids": case(net(lambda self, x: self.e(self.fc(x).argmax(-1)), fc=linear(8, 9), e=of(nn.Embedding, 9, 4)), TEXT),
    "embedding_frozen": case(
        net(lambda self, ids: self.fc(self.e(ids)), e=lambda: nn.Embedding.from_pretrained(torch.arange(36.0).view(9, 4)), fc=linear(4, 5)), IDS
    ),
    "bag_mean": case(of(nn.EmbeddingBag, 9, 4), BAG),
    "bag_sum": case(of(nn.EmbeddingBag, 9, 4, mode="sum"), BAG),
    "bag_max": case(of(nn.EmbeddingBag, 9, 4, mode="max"), BAG),
    "bag_padding_mean": case(of(nn.EmbeddingBag, 9, 4, padding_idx=0), BAG),
    "bag_padding_sum": case(of(nn.EmbeddingBag, 9, 4, padding_idx=0, mode="sum"), BAG),
    "bag_padding_max": case(of(nn.EmbeddingBag, 9, 4, padding_idx=0, mode="max"), BAG),
    "bag_weights": case(of(nn.EmbeddingBag, 9, 4, mode="sum"), BAG, "per_sample_weights=float32[B,T]"),
    "bag_offsets": case(net(lambda self, ids: self.b(ids, torch.tensor([0, 2, 2, 4])), b=of(nn.EmbeddingBag, 9, 4)), "ids=int64[T]:0..8", "T=4..64"),
    "bag_last_offset": case(
        net(lambda self, ids: self.b(ids, torch.tensor([0, 1, 4])), b=of(nn.EmbeddingBag, 9, 4, mode="sum", include_last_offset=True)),
        "ids=int64[4]:0..8",
    ),
    "bag_own_offsets": Case(
        net(lambda self, ids, offsets: self.b(ids, offsets), b=of(nn.EmbeddingBag, 9, 4)),
        (),
        {},
        lambda sizes, seed: {"ids": drawn("ids=int64[6]:0..8", sizes, seed), "offsets": torch.tensor([0, 1 + seed % 2, 3])},
    ),
}


# Resampling, pooling, padding


def unpooled(self: Any, x: Tensor) -> Tensor:
    y, at = F.max_pool2d(self.conv(x), 2, return_indices=True)
    return F.max_unpool2d(y * 2, at, [2, 2])


def upsampled(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.interpolate(y, scale_factor=2),
        F.interpolate(y, size=(5, 7), mode="bilinear", align_corners=True),
        F.interpolate(y, scale_factor=1.5, mode="bilinear", align_corners=False),
        F.interpolate(y, size=(5, 7), mode="bicubic"),
        F.interpolate(y, size=(3, 2), mode="area"),
        F.interpolate(y, size=(3, 2), mode="bilinear", antialias=True),
        F.interpolate(y, scale_factor=(2, 3), mode="nearest-exact"),
        F.interpolate(y, size=y.shape[2:], mode="nearest"),
    ]


def upsampled_others(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.interpolate(y.flatten(2), size=9, mode="linear"),
        F.interpolate(y.flatten(2), scale_factor=2.0, mode="nearest"),
        F.interpolate(y.unsqueeze(2), scale_factor=2.0, mode="trilinear"),
        F.interpolate(y.unsqueeze(2), size=(2, 5, 7), mode="nearest"),
        F.interpolate(y.flatten(2), size=9, mode="nearest-exact"),
    ]


def pooled(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.max_pool2d(y, 2),
        F.max_pool2d(y, 3, stride=2, padding=1, ceil_mode=True),
        F.avg_pool2d(y, 3, stride=2, padding=1, count_include_pad=False),
        F.adaptive_avg_pool2d(y, 1).flatten(1),
        F.adaptive_avg_pool2d(y, (3, 2)),
        F.adaptive_max_pool2d(y, 2),
        F.lp_pool2d(y, 2, 2),
        F.max_pool1d(y.flatten(2), 3, stride=2),
        F.avg_pool1d(y.flatten(2), 2),
        F.adaptive_avg_pool1d(y.flatten(2), 4),
        F.adaptive_max_pool1d(y.flatten(2), 4),
        F.max_pool3d(y.unsqueeze(2), (1, 2, 2)),
        F.adaptive_avg_pool3d(y.unsqueeze(2), 1),
    ]


def padded(self: Any, x: Tensor) -> list[Tensor]:
    y = self.conv(x)
    return [
        F.pad(y, (1, 2)),
        F.pad(y, (1, 0, 2, 1), value=0.5),
        F.pad(y, (1, 1, 1, 1), mode="reflect"),
        F.pad(y, (2, 1, 0, 1), mode="replicate"),
        F.pad(y, (1, 1, 1, 1), mode="circular"),
        F.pad(y, (0, 0, 0, 0, 1, 0)),
        F.pad(y, (-1, -1)),
        F.pad(y.flatten(2), (1, 1), mode="reflect"),
    ]


def warped(mode: str, padding: str, corners: bool) -> Case:
    def forward(self: Any, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(self.conv(x), grid, mode=mode, padding_mode=padding, align_corners=corners)

    return case(net(forward, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), IMAGE, "grid=float32[B,H,W,2]")


def spatial_transformer(self: Any, x: Tensor) -> Tensor:
    theta = self.locate(x.mean((2, 3))).view(-1, 2, 3)
    return F.grid_sample(self.conv(x), F.affine_grid(theta, [x.shape[0], 5, 7, 6], align_corners=False), align_corners=False)


CASES |= {
    "interpolate": case(net(upsampled, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), IMAGE),
    "interpolate_others": case(net(upsampled_others, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), IMAGE),
    "interpolate_like": case(
        net(
            lambda self, x, y: self.a(y) + F.interpolate(self.b(x), size=y.shape[-2:], mode="bilinear"),
            a=of(nn.Conv2d, 4, 5, 1),
            b=of(nn.Conv2d, 4, 5, 1),
        ),
        "x=float32[B,4,H,W]",
        "y=float32[B,4,2*H,2*W]",
    ),
    "upsample": case(chain(of(nn.Conv2d, 4, 5, 1), of(nn.Upsample, scale_factor=2, mode="bilinear", align_corners=True), of(nn.Conv2d, 5, 4, 3)), I2),
    "pixel_shuffle": case(chain(of(nn.Conv2d, 4, 8, 3, padding=1), of(nn.PixelShuffle, 2), of(nn.Conv2d, 2, 5, 1)), I2),
    "pixel_unshuffle": case(chain(of(nn.Conv2d, 4, 5, 1), of(nn.PixelUnshuffle, 2)), "input=float32[B,4,2*H,2*W]"),
    "channel_shuffle": case(chain(of(nn.Conv2d, 4, 6, 1, groups=2), of(nn.ChannelShuffle, 2), of(nn.Conv2d, 6, 4, 1, groups=2)), I2),
    "grid_sample": warped("bilinear", "zeros", False),
    "grid_sample_nearest": warped("nearest", "border", True),
    "grid_sample_bicubic": warped("bicubic", "reflection", False),
    "spatial_transformer": case(net(spatial_transformer, conv=of(nn.Conv2d, 4, 5, 3, padding=1), locate=linear(4, 6)), IMAGE),
    "pools": case(net(pooled, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), "x=float32[B,4,8,8]"),
    "max_unpool": case(net(unpooled, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), "x=float32[B,4,8,8]"),
    "pads": case(net(padded, conv=of(nn.Conv2d, 4, 5, 3, padding=1)), "x=float32[B,4,6,8]"),
    "unfold_fold": case(
        net(
            lambda self, x: F.fold(self.fc(F.unfold(self.conv(x), 2, stride=2).mT).mT, (8, 6), 2, stride=2),
            conv=of(nn.Conv2d, 4, 5, 1),
            fc=linear(20, 8),
        ),
        IMAGE,
    ),
    "patches": case(
        net(lambda self, x: self.fc(x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)), fc=linear(16, 5)),
        "x=float32[B,4,2*H,2*W]",
    ),
}


# Activations


class Activations(nn.Module):
    """Every activation of torch.nn, each behind the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.all = nn.ModuleList([
            nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(),
            nn.Hardsigmoid(), nn.Hardtanh(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Softplus(), nn.Softsign(), nn.Tanhshrink(), nn.Softshrink(),
            nn.Hardshrink(), nn.PReLU(), nn.PReLU(4), nn.RReLU(), nn.GLU(), nn.Threshold(0.1, 0.2), nn.Softmin(1), nn.Softmax(-1), nn.LogSoftmax(1),
            nn.Dropout(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Identity(),
        ])  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([a(self.fc(x)) for a in self.all], -1)


CASES |= {
    "activations": case(Activations, ROWS),
    "prelu_image": case(chain(of(nn.Conv2d, 4, 6, 3), of(nn.PReLU, 6), of(nn.Dropout2d), of(nn.Conv2d, 6, 4, 1), of(nn.PReLU), of(nn.Softmax2d)), I2),
}


# Blocks


def no_grad_block(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = self.teacher(x).detach()
    return self.student(x) - target


def autocast_block(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = self.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = self.b(y.relu())
        with torch.autocast("cpu", enabled=False):
            y = y + self.a(x)
    return y, z


def checked(self: Any, x: Tensor) -> Tensor:
    torch._check(x.shape[1] > 1)
    assert x.shape[-1] == 8, x.shape
    if x.dim() != 3:
        raise ValueError(x.shape)
    return torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)


def float_island(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x)
    return (y.float() * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(y.dtype) * self.g


CASES |= {
    "no_grad_block": case(net(no_grad_block, teacher=linear(6, 5), student=linear(6, 5)), ROWS),
    "autocast_block": case(net(autocast_block, a=linear(6, 5), b=linear(5, 4)), ROWS),
    "decorated": case(net(torch.no_grad()(lambda self, x: self.fc(x).detach()), fc=linear(6, 5)), ROWS),
    "checked": case(net(checked, fc=linear(8, 5)), TEXT),
    "float_island": case(net(float_island, fc=linear(8, 8), g=param(8)), TEXT),
}


# Complex numbers and FFT


def fourier_layer(self: Any, x: Tensor) -> Tensor:
    f = torch.fft.rfft2(x)
    out = torch.zeros(x.shape[0], 5, 8, 4, dtype=torch.cfloat)
    out[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", f[:, :, :2, :2], self.w)
    return torch.fft.irfft2(out, s=(8, 6)) + self.skip(x)


def spectrum(self: Any, x: Tensor) -> Tensor:
    s = torch.stft(self.fc(x), 8, hop_length=4, window=self.window, return_complex=True)
    return torch.istft(s * torch.polar(s.abs().clamp(max=3), s.angle() * 0), 8, hop_length=4, window=self.window, length=16)


def complex_rotary(self: Any, x: Tensor) -> Tensor:
    q = torch.view_as_complex(self.q(x).unflatten(-1, (4, 2)))
    turn = torch.polar(torch.ones(x.shape[1], 4), torch.outer(torch.arange(x.shape[1]).float(), self.freq))
    return torch.view_as_real(q * turn).flatten(2)


def transforms(self: Any, x: Tensor) -> list[Tensor]:
    y = self.fc(x)
    f = torch.fft.fftn(y, dim=(1, 2))
    return [
        torch.fft.fft(y, dim=1).abs(),
        torch.fft.ifftn(torch.fft.fftshift(f, dim=(1,)), dim=(1, 2)).real,
        torch.fft.ifftshift(torch.fft.rfft(y, norm="ortho")).imag,
        torch.fft.irfft(torch.fft.rfft(y, n=10), n=8),
        torch.fft.hfft(f, dim=-1),
        torch.fft.ihfft(y).real,
        torch.fft.fft2(y).abs().log1p(),
        torch.fft.irfftn(torch.fft.rfftn(y, dim=(1, 2)), s=(4, 8), dim=(1, 2)),
        torch.fft.ifft2(f).real + torch.fft.ifft(f, dim=1).imag,
    ]


def complex_arithmetic(self: Any, x: Tensor) -> list[Tensor]:
    z = torch.complex(self.fc(x), x)
    w = z * self.w.conj() + self.w.abs() - z.conj() / (1 + z.abs())
    return [w.real, w.imag, w.angle(), (w @ w.mH).real, torch.view_as_real(w), torch.vdot(self.w, self.w).real, w.exp().resolve_conj().abs(), w]


CASES |= {
    "fourier_layer": case(net(fourier_layer, w=param(4, 5, 2, 2, dtype=torch.complex64), skip=of(nn.Conv2d, 4, 5, 1)), IMAGE),
    "fourier_filter": case(
        net(
            lambda self, x: torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.w), s=x.shape[-2:], norm="ortho"),
            w=param(4, 8, 4, 2),
        ),
        IMAGE,
    ),
    "stft": case(net(spectrum, fc=linear(16, 16), window=of(torch.hann_window, 8)), "x=float32[B,16]"),
    "spectrogram": case(
        net(
            lambda self, x: self.fc(torch.stft(x, 8, 4, window=self.window, return_complex=True).abs().pow(2).mT),
            fc=linear(5, 4),
            window=of(torch.hann_window, 8),
        ),
        "x=float32[B,4*T]",
    ),
    "complex_rotary": case(net(complex_rotary, q=linear(8, 8), freq=lambda: torch.tensor([1.0, 0.3, 0.1, 0.03])), TEXT),
    "transforms": case(net(transforms, fc=linear(6, 8)), FLAT),
    "complex_arithmetic": case(net(complex_arithmetic, fc=linear(6, 6), w=param(6, dtype=torch.complex64)), ROWS),
    "complex_input": case(
        net(lambda self, x: x @ self.w + self.b, w=param(6, 5, dtype=torch.complex64), b=param(5, dtype=torch.complex64)), "x=complex64[B,6]"
    ),
}


# Losses in forward


def losses(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    p = self.fc(x)
    q = y.sigmoid()
    return {
        "mse": F.mse_loss(p, y),
        "mse_rows": F.mse_loss(p, y, reduction="none"),
        "l1": F.l1_loss(p, y, reduction="sum"),
        "smooth": F.smooth_l1_loss(p, y, beta=0.5),
        "huber": F.huber_loss(p, y),
        "bce": F.binary_cross_entropy(p.sigmoid(), q),
        "logits": F.binary_cross_entropy_with_logits(p, q, pos_weight=self.w),
        "margin": F.soft_margin_loss(p, y.sign()),
        "divergence": F.kl_div(p.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        "poisson": F.poisson_nll_loss(p, q),
        "cosine": F.cosine_embedding_loss(p, y, y[:, 0].sign()),
        "triplet": F.triplet_margin_loss(p, y, y.flip(0) + p.detach() * 2),
    }


def class_losses(self: Any, x: Tensor, labels: Tensor, pixels: Tensor) -> dict[str, Tensor]:
    p = self.fc(x)
    image = p[:, :, None] * self.w[None, None]
    return {
        "mean": F.cross_entropy(p, labels),
        "none": F.cross_entropy(p, labels, reduction="none"),
        "ignored": F.cross_entropy(p, labels, ignore_index=0, reduction="sum"),
        "smoothed": F.cross_entropy(p, labels, label_smoothing=0.1),
        "weighted": F.cross_entropy(p, labels, weight=self.by_class),
        "pixels": F.cross_entropy(image, pixels),
        "soft": F.cross_entropy(p, p.detach().exp().softmax(-1)),
        "nll": F.nll_loss(p.log_softmax(-1), labels),
    }


CASES |= {
    "losses": case(net(losses, fc=linear(6, 5), w=lambda: torch.rand(5) + 0.5), ROWS, "y=float32[B,5]"),
    "class_losses": case(
        net(class_losses, fc=linear(6, 5), w=param(4), by_class=lambda: torch.linspace(0.5, 1.5, 5)),
        ROWS,
        "labels=int64[B]:0..4",
        "pixels=int64[B,4]:0..4",
    ),
}


# Dynamic dims


def even_length(self: Any, x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        x = F.pad(x, (0, 0, 0, 1))
    return self.fc(x.view(x.shape[0], -1, 16))


CASES |= {
    "length": case(
        net(lambda self, x: self.b(self.a(x.transpose(1, 2)).transpose(1, 2)).relu(), a=of(nn.Conv1d, 8, 6, 3, padding=1), b=linear(6, 5)),
        TEXT,
        T=(7, 1, 30),
    ),
    "image_size": case(
        chain(
            of(nn.Conv2d, 4, 6, 3, stride=2, padding=1), of(nn.BatchNorm2d, 6), of(nn.ReLU), of(nn.AdaptiveAvgPool2d, 1), of(nn.Flatten), linear(6, 5)
        ),
        I2,
        H=(9, 5, 2),
        W=(6, 11, 1),
    ),
    "image_multiple": case(
        net(lambda self, x: x + self.up(self.down(x)), down=of(nn.Conv2d, 4, 6, 4, stride=4), up=of(nn.ConvTranspose2d, 6, 4, 4, stride=4)),
        "x=float32[B,4,4*H,4*W]",
        H=(3, 1, 2),
        W=(2, 4, 1),
    ),
    "batch_on_axis_1": case(net(lambda self, x: self.fc(x).mean(0), fc=linear(8, 5)), "x=float32[T,B,8]"),
    "batch_last": case(net(lambda self, x: self.w @ x, w=param(5, 6)), "x=float32[6,B]"),
    "no_batch": case(net(lambda self, x: self.fc(x).softmax(0), fc=linear(8, 5)), "x=float32[T,8]"),
    "no_dynamic_dim": case(net(lambda self, x: self.fc(x).sum() * self.fc(x), fc=linear(8, 5)), "x=float32[4,8]"),
    "vector": case(net(lambda self, x: self.fc(x), fc=linear(8, 5)), "x=float32[8]"),
    "number": case(net(lambda self, x: torch.tanh(self.w * x + self.b), w=param(4), b=param(4)), "x=float32[]"),
    "two_lengths": case(
        net(lambda self, x, y: self.q(x) @ self.k(y).mT / math.sqrt(5), q=linear(8, 5), k=linear(6, 5)), TEXT, "y=float32[B,S,6]", S=(3, 9, 1)
    ),
    "across_the_batch": case(net(lambda self, x: (self.fc(x) - self.fc(x).mean(0)) @ self.fc(x).t() / x.shape[0], fc=linear(6, 5)), ROWS),
    "sizes_as_numbers": case(net(lambda self, x: self.fc(x).sum(1) / x.shape[1] + x.size(0) * self.w + x.numel(), fc=linear(8, 5), w=param()), TEXT),
    "sizes_in_shapes": case(
        net(
            lambda self, x: torch.ones(x.shape[0], x.shape[1] + 1, 1) * self.w + torch.arange(x.shape[1] + 1)[:, None] * self.fc(x).mean(),
            fc=linear(8, 5),
            w=param(5),
        ),
        TEXT,
    ),
    "table_by_length": case(
        net(lambda self, x: self.fc(x) + self.positions[: x.shape[1]], fc=linear(8, 5), positions=param(16, 5)), TEXT, "T=1..16", T=(7, 16, 1)
    ),
    "guard_even": case(net(even_length, fc=linear(16, 5)), TEXT, T=(8, 2, 30)),
    "half_length": case(
        net(lambda self, x: self.fc(x[:, : x.shape[1] // 2]) + self.fc(x[:, x.shape[1] // 2 :]), fc=linear(8, 5)), "x=float32[B,2*T,8]"
    ),
    "stride_by_length": case(
        net(lambda self, x: self.fc(x.reshape(x.shape[0] * x.shape[1], 8)).view(*x.shape[:2], 5).flatten(1).logsumexp(1), fc=linear(8, 5)), TEXT
    ),
}

# Cases in which a node runs once a member: the ops, and why.
ONCE_A_MEMBER: dict[str, tuple[set[str], str]] = {
    "bag_padding_max": ({"aten.embedding_bag.padding_idx"}, "the maximum over what is no padding hangs on the order in which a bag meets NaN"),
    "bag_own_offsets": ({"aten.embedding_bag.padding_idx"}, "where bags begin is data, which each member checks against its own ids"),
}

SLOW = {
    "transformer", "decoder", "decoder_layer", "encoder", "encoder_masks", "encoder_causal", "swin_window", "grid_sample_bicubic", "gru_layers",
    "conv_circular", "mha_cross", "mha_other_sizes", "pools", "lstm_layers", "losses", "grid_sample", "mha", "mha_both_masks", "mha_bias_kv", "bag_mean",
    "mha_zero_attn", "pixel_unshuffle", "activations", "conv_bn_relu_pool", "gru_state", "mha_float_mask", "mha_mask_by_head", "gru", "mha_float_padding",
    "mha_bool_mask", "spatial_transformer", "rnn_relu", "mha_unbatched", "mha_time_first", "group_norm_in_chain", "upsample", "mha_key_padding",
    "channel_shuffle", "gaussian_log_prob", "encoder_layer_norm_first", "interpolate_like", "relative_bias", "mha_no_weights", "unfold_fold",
    "lstm_last_step", "patch_softmax", "spectrogram", "image_multiple", "complex_arithmetic",
}  # fmt: skip

# Cases in which one member's weights are NaN: no bit of another member's answer changes.
ISOLATED = [
    "parted_index", "bilinear", "cdist", "masked_scatter", "in_place_put", "batch_norm_no_statistics", "instance_norm_tracked", "mha_bool_mask", "cells",
    "bag_padding_mean", "grid_sample", "fourier_layer", "class_losses",
]  # fmt: skip


def member(case: Case, seed: int) -> nn.Module:
    """A module as training leaves it: weights, norms and statistics of its own."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = case.make().eval()
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for name, b in module.named_buffers():
            if name.endswith("running_var"):
                b.copy_(torch.rand_like(b) + 0.5)
            elif name.endswith("running_mean"):
                b.copy_(torch.randn_like(b))
    return module


def exact(case: Case, seed: int) -> nn.Module:
    """The member in float64 and complex128."""
    return member(case, seed)._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t)


def made(case: Case, folder: Path, ill: int | None = None) -> tuple[WideModel, BuildReport]:
    """The case built and loaded. ill: the member whose floating weights are all NaN."""
    paths = []
    for i in range(N):
        state = member(case, i).state_dict()
        if i == ill:
            state = {k: torch.full_like(v, float("nan")) if v.is_floating_point() or v.is_complex() else v for k, v in state.items()}
        paths.append(folder / f"m{i}.pt")
        torch.save(state, paths[-1])
    how: dict[str, Any] = {"inputs": case.inputs}
    if case.sample is not None:
        how = {"sample_kwargs": case.sample(case.example, 0), "dynamic": dict(case.dynamic)}
    report = build(paths, folder / "e.wide", model=case.make, **how, **QUICK)
    return load(folder / "e.wide", verify="off", warmup=False), report


def once_a_member(ens: WideModel, folder: Path) -> set[str]:
    """The ops of the nodes that run once a member in either preset."""
    entry = ens.manifest.entries["forward"]
    ops = {n.name: n.op for n in Reader(folder / "e.wide").program(entry.member[0]).nodes}
    found = set()
    for pattern in ("shared", "each"):
        for plan in ens.plans(pattern):
            found |= {ops[n] for n in plan.looped()} | {ops.get(n, n) for n, c in plan.choices.items() if c.strategy == "sequential"}
    return found


def truth_of(module: nn.Module, given: Mapping[str, Any]) -> Any:
    """The member's answer in float64: what its code makes itself, and what it calls float, too."""
    with pytest.MonkeyPatch.context() as patch, double_by_default():
        for name in ("float", "half", "bfloat16"):
            patch.setattr(Tensor, name, Tensor.double)
        to = Tensor.to
        patch.setattr(Tensor, "to", lambda x, *args, **kwargs: to(x, *(_double(a) for a in args), **{k: _double(v) for k, v in kwargs.items()}))
        return run(module, (), raised(given))


def _double(value: Any) -> Any:
    """A floating dtype as float64; anything else as it is."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def raised(value: Any) -> Any:
    return tree_map(lambda x: x.to(torch.complex128) if isinstance(x, Tensor) and x.is_complex() else double(x), value)


def flat(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def parts(result: Any) -> list[Tensor]:
    """The tensors of a result, in order, of classes too."""
    return [x.detach() for x in leaves([v for v in vars(result).values() if v is not None] if isinstance(result, Answer) else result)]


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in CASES])
def test_every_member_answers_as_alone(name: str, tmp_path: Path) -> None:
    hold(CASES[name], tmp_path, ONCE_A_MEMBER.get(name, (set(), ""))[0])


def hold(case: Case, folder: Path, once: set[str]) -> None:
    """Build a case and hold it to every member alone. once: the ops of the nodes that run once a member."""
    ens, _ = made(case, folder)
    alone_ops = once_a_member(ens, folder)
    assert alone_ops == once, alone_ops
    alone, right = [member(case, i) for i in range(N)], [exact(case, i) for i in range(N)]
    found: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
    sizes = case.calls()
    for k in itertools.count():
        if k >= len(sizes) and all(sum(m.numel() for _, m, _ in rows) * N >= 64 for rows in found.values()):
            break
        own = [case.draw(sizes[k % len(sizes)], 10 * k + i) for i in range(N)]
        each = {n: stack([o[n] for o in own]) if any(isinstance(x, Tensor) for x in tree_leaves(own[0][n])) else own[0][n] for n in own[0]}
        for answer, given in ((ens(**own[0]), [own[0]] * N), (ens.each(**each), own)):
            for i in range(N):
                mine, truth = run(alone[i], (), given[i]), truth_of(right[i], given[i])
                for j, (w, m, t) in enumerate(zip(parts(answer), parts(mine), parts(truth), strict=True)):
                    assert w[i].shape == m.shape
                    if m.is_floating_point() or m.is_complex():
                        found.setdefault((j, i), []).append((flat(w[i]), flat(m), flat(t)))
                    else:
                        assert torch.equal(w[i], m)
                        assert w.dtype == m.dtype
    for j in {j for j, _ in found}:
        bound = Bound()
        for i in range(N):  # a member's errors are pooled over its calls
            bound.add(*(torch.cat([x.flatten() for x in column]) for column in zip(*found[j, i])))
        bound.check()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if i % 4 == 0 else [pytest.mark.slow]) for i, n in enumerate(ISOLATED)])
def test_nan_in_one_members_weights_stays_there(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "ill").mkdir()
    well, ill = made(case, tmp_path)[0], made(case, tmp_path / "ill", ill=1)[0]
    for sizes in case.calls()[:2]:
        own = [case.draw(sizes, i) for i in range(N)]
        for given in (own[0], {n: stack([o[n] for o in own]) for n in own[0]}):
            clean, spoilt = (parts(e(**given) if given is own[0] else e.each(**given)) for e in (well, ill))
            assert any(y[1].isnan().any() for y in spoilt if y.is_floating_point())
            for a, b in zip(clean, spoilt, strict=True):
                assert torch.equal(a[0], b[0])
                assert torch.equal(a[2], b[2])


# Ragged: sizes that differ by member


class Vocabularies(nn.Module):
    """An embedding of as many words, and heads of as many classes, as the weights say."""

    def __init__(self, words: int, classes: tuple[int, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.body = nn.Linear(8, 8)
        self.first, self.second = (nn.Linear(8, c) for c in classes)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.body(self.embed(ids))).mean(1)
        return {"first": self.first(x).log_softmax(-1), "second": self.second(x), "body": x}


class Codebook(nn.Module):
    """Class counts in several places: an embedding of the label, the head, a bias by class, and a norm over the classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 6, 3, padding=1)
        self.labels = nn.Embedding(classes, 6)
        self.head = nn.Linear(6, classes)
        self.norm = nn.LayerNorm(classes)
        self.prior = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        y = self.stem(x).mean(-1) + self.labels(label)
        return self.norm(self.head(y) + self.prior)


def vocabularies(state_dict: Mapping[str, Tensor] | None = None, sizes: tuple[int, int, int] = (9, 4, 2)) -> nn.Module:
    words, a, b = sizes if state_dict is None else (state_dict[k].shape[0] for k in ("embed.weight", "first.weight", "second.weight"))
    return Vocabularies(words, (a, b))


def codebook(state_dict: Mapping[str, Tensor] | None = None, classes: int = 4) -> nn.Module:
    return Codebook(classes if state_dict is None else state_dict["prior"].shape[0])


RAGGED: dict[str, tuple[Callable[..., nn.Module], list[Any], tuple[str, ...]]] = {
    "vocabularies": (vocabularies, [(9, 4, 2), (12, 4, 5), (7, 6, 2)], ("ids=int64[B,T]:0..6",)),
    "one_vocabulary_differs": (vocabularies, [(9, 4, 2), (9, 4, 2), (12, 4, 2)], ("ids=int64[B,T]:0..8",)),
    "codebook": (codebook, [4, 7, 4], ("x=float32[B,4,T]", "label=int64[B]:0..3")),
}


@pytest.mark.parametrize("name", RAGGED)
def test_sizes_that_differ_by_member(name: str, tmp_path: Path) -> None:
    make, all_sizes, inputs = RAGGED[name]
    cases = [case(partial(make, None, s), *inputs) for s in all_sizes]
    alone, right = [member(c, i) for i, c in enumerate(cases)], [exact(c, i) for i, c in enumerate(cases)]
    paths = [tmp_path / f"m{i}.pt" for i in range(N)]
    for path, module in zip(paths, alone):
        torch.save(module.state_dict(), path)
    build(paths, tmp_path / "e.wide", model=make, inputs=inputs, **QUICK)
    ens = load(tmp_path / "e.wide", verify="off", warmup=False)
    found: dict[int, Bound] = {}
    for k, sizes in enumerate([*cases[0].calls(), {"B": 16, "T": 5}]):
        own = [cases[0].draw(sizes, 10 * k + i) for i in range(N)]
        for answer, given in ((ens(**own[0]), [own[0]] * N), (ens.each(**{n: stack([o[n] for o in own]) for n in own[0]}), own)):
            rows = list(answer.values()) if isinstance(answer, Mapping) else [answer]
            for i in range(N):
                mine, truth = parts(run(alone[i], (), given[i])), parts(truth_of(right[i], given[i]))
                for j, (w, m, t) in enumerate(zip(rows, mine, truth, strict=True)):
                    found.setdefault(j, Bound()).add(w[i], m, t)
    for bound in found.values():
        bound.check()
