"""Random arguments of ops, for programs that grow in `row_programs.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Ref

Drawn = tuple[str, list[Any], dict[str, Any]]
"""An op with its arguments."""


class Args:
    """Draws arguments from the values of a program.

    names: of its tensors. at: its values for two batches. size: returns an argument that is a size, by its
    numbers for both.
    """

    def __init__(
        self,
        draw: random.Random,
        names: Sequence[str],
        at: tuple[Mapping[str, Any], Mapping[str, Any]],
        size: Callable[[int, int], Any],
    ) -> None:
        self.draw, self.names, self.at, self.size = draw, names, at, size

    def one(self, names: str) -> str:
        """Draws one of the names that a text lists."""
        return self.draw.choice(names.split())

    def any(self, least: int = 0, most: int = 9, dtypes: str = "float bool int", **sized: int) -> Ref:
        """Draws a tensor by its number of dims and its kind of dtype; later ones more often."""
        found = []
        for name in self.names:
            x = self.at[0][name]
            kind = "float" if x.is_floating_point() else "bool" if x.dtype == torch.bool else "int"
            kind = "complex" if x.is_complex() else kind
            last = "last" not in sized or (x.dim() and x.shape[-1] == sized["last"])
            if least <= x.dim() <= most and kind in dtypes.split() and last:
                follows = self.at[0][name].shape != self.at[1][name].shape
                found += [name] * (6 if name.startswith("n") and follows else 2 if follows else 1)
        if not found:
            raise ValueError("no such value")
        return Ref(self.draw.choice(found))

    def real(self, least: int = 0, most: int = 9) -> Ref:
        """Draws a tensor of floats."""
        return self.any(least, most, "float")

    def value(self, ref: Ref) -> Tensor:
        """Returns a value for the first batch."""
        found: Tensor = self.at[0][ref.name]
        return found

    def shapes(self, ref: Ref) -> list[tuple[int, int]]:
        """Returns the sizes of a value for both batches."""
        return list(zip(*(v[ref.name].shape for v in self.at)))

    def dim(self, ref: Ref, more: int = 0) -> int:
        """Draws a dim, from the front or from the back."""
        rank = self.value(ref).dim() + more
        return self.draw.randrange(-rank, rank) if rank else 0

    def like(self, ref: Ref, dtypes: str = "float") -> Ref:
        """Draws a tensor whose last dims are those of another, or any."""
        shape = self.value(ref).shape
        found = [n for n in self.names if _broadcasts(self.at[0][n].shape, shape)]
        found = [n for n in found if self.at[0][n].is_floating_point() == (dtypes == "float")]
        return Ref(self.draw.choice(found)) if found and self.draw.random() < 0.8 else self.any(0, 9, dtypes)

    def sizes(self, shapes: Sequence[tuple[int, int]]) -> list[Any]:
        """Returns the arguments of a list of sizes."""
        return [self.size(a, b) for a, b in shapes]


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(x == y or x == 1 or y == 1 for x, y in zip(reversed(a), reversed(b)))


def _one(names: str, **kwargs: Any) -> Callable[[Args], Drawn]:
    return lambda a: (f"aten.{a.one(names)}", [a.real()], dict(kwargs))


def _two(a: Args) -> Drawn:
    x = a.real()
    op = a.one("add.Tensor mul.Tensor sub.Tensor maximum.default gt.Tensor atan2.default")
    return f"aten.{op}", [x, a.like(x)], {}


def _where(a: Args) -> Drawn:
    x = a.any(dtypes="bool")
    return "aten.where.self", [x, a.like(x), a.like(x)], {}


def _reduced(a: Args) -> Drawn:
    x, op = (
        a.real(),
        a.one("sum mean amax std argmax vector norm prod all logsumexp"),
    )
    dim, keep = a.dim(x), a.draw.random() < 0.5
    if op in ("sum", "mean"):
        dims = list({d % max(1, a.value(x).dim()) for d in (dim, a.dim(x))})
        whole = a.draw.random() < 0.1
        return f"aten.{op}.{'dim_IntList' if op == 'sum' else 'dim'}", [x, None if whole else dims, keep], {}
    if op == "std":
        return "aten.std.correction", [x, [dim]], {"correction": 0, "keepdim": keep}
    if op == "vector":
        return "aten.linalg_vector_norm.default", [x, 2, [dim], keep], {}
    if op == "norm":
        return "aten.norm.ScalarOpt_dim", [x, 2, [dim], keep], {}
    name = {"prod": "prod.dim_int", "all": "all.dim"}.get(op, f"{op}.default")
    return f"aten.{name}", [x, [dim] if op in ("amax", "logsumexp") else dim, keep], {}


def _along(a: Args) -> Drawn:
    x = a.any(1)
    op = a.one("softmax.int cumsum flip roll sort topk argsort fft_fft diff cummax renorm glu")
    dim = a.dim(x)
    args: dict[str, list[Any]] = {
        "flip": [[dim]],
        "roll": [[1], [dim]],
        "topk": [2, dim],
        "fft_fft": [None, dim],
        "diff": [1, dim],
        "renorm": [2, dim, 0.5],
    }
    name = {"sort": "sort.default", "softmax.int": "softmax.int"}.get(op, f"{op}.default")
    return f"aten.{name}", [x, *args.get(op, [dim])], {}


def _moved(a: Args) -> Drawn:
    x, op = a.any(1), a.one("transpose permute unsqueeze squeeze movedim t")
    rank = a.value(x).dim()
    if op == "transpose":
        return "aten.transpose.int", [x, a.dim(x), a.dim(x)], {}
    if op == "permute":
        return "aten.permute.default", [x, a.draw.sample(range(rank), rank)], {}
    if op == "squeeze":
        return "aten.squeeze.dim", [x, a.dim(x)], {}
    if op == "movedim":
        return "aten.movedim.int", [x, a.dim(x), a.dim(x)], {}
    return ("aten.t.default", [x], {}) if op == "t" else ("aten.unsqueeze.default", [x, a.dim(x, 1)], {})


def _shaped(a: Args) -> Drawn:
    """Another shape: dims that are joined, split and exchanged."""
    x = a.any(1)
    sizes = a.shapes(x)
    for _ in range(a.draw.choice([1, 1, 2, 3])):
        at = a.draw.randrange(len(sizes))
        kind = a.one("join split split swap")
        if kind == "join" and at + 1 < len(sizes):
            sizes[at : at + 2] = [(sizes[at][0] * sizes[at + 1][0], sizes[at][1] * sizes[at + 1][1])]
        elif kind == "split":
            p, q = sizes[at]
            parts = [(f, f) for f in range(2, 8) if p % f == q % f == 0]
            if p % 5 == 0 and q % 7 == 0:
                parts += [(5, 7), (5, 7)]
            if parts:
                f, g = a.draw.choice(parts)
                new = [(f, g), (p // f, q // g)]
                sizes[at : at + 1] = new if a.draw.random() < 0.5 else new[::-1]
        elif len(sizes) > 1:
            other = a.draw.randrange(len(sizes))
            sizes[at], sizes[other] = sizes[other], sizes[at]
    return "aten.reshape.default", [x, a.sizes(sizes)], {}


def _expanded(a: Args) -> Drawn:
    x = a.any(0, 3)
    op = a.one("expand repeat repeat_interleave tile")
    batch = (5, 7)
    if op == "expand":
        sizes = [a.draw.choice([batch, (2, 2), (5, 5)]) if p == q == 1 else (p, q) for p, q in a.shapes(x)]
        more = [a.draw.choice([batch, (3, 3)]) for _ in range(a.draw.choice([0, 1, 1]))]
        return "aten.expand.default", [x, a.sizes([*more, *sizes])], {}
    if op == "repeat_interleave":
        times = a.size(*a.draw.choice([(2, 2), (3, 3), batch]))
        dim = a.draw.choice([None, a.dim(x)])
        return "aten.repeat_interleave.self_int", [x, times, dim], {}
    count = a.value(x).dim() + a.draw.choice([0, 0, 1])
    times = a.sizes([a.draw.choice([(1, 1), (1, 1), (2, 2), batch]) for _ in range(count)])
    return f"aten.{op}.default", [x, times], {}


def _part(a: Args) -> Drawn:
    x = a.any(1)
    op, dim = (
        a.one("select slice split chunk unbind diagonal unfold tril pad narrow"),
        a.dim(x),
    )
    if op == "slice":
        start, end = a.draw.choice([0, 1, -2]), a.draw.choice([2, 3, -1, 5, 2**63 - 1])
        return "aten.slice.Tensor", [x, dim, start, end, a.draw.choice([1, 1, 2])], {}
    if op == "split":
        size = a.size(*a.draw.choice([(1, 1), (2, 2), (3, 3), (5, 7), (5, 7)]))
        return "aten.split.Tensor", [x, size, dim], {}
    if op == "pad":
        return "aten.pad.default", [x, [a.draw.choice([0, 1]) for _ in range(2 * a.draw.choice([1, 2]))]], {}
    rest: dict[str, list[Any]] = {
        "select": [dim, a.draw.choice([0, 1, -1])],
        "chunk": [2, dim],
        "unbind": [dim],
        "diagonal": [0, dim, a.dim(x)],
        "unfold": [dim, 2, 1],
        "tril": [],
        "narrow": [dim, 0, 2],
    }
    name = {"select": "select.int", "unbind": "unbind.int"}.get(op, f"{op}.default")
    return f"aten.{name}", [x, *rest[op]], {}


def _joined(a: Args) -> Drawn:
    x = a.any()
    other = a.draw.choice([x, a.like(x, "float" if a.value(x).is_floating_point() else "int")])
    many = [x, other] if a.draw.random() < 0.5 else [other, x]
    op = a.one("cat cat stack")
    return f"aten.{op}.default", [many, a.dim(x, op == "stack")], {}


def _product(a: Args) -> Drawn:
    x, op = (
        a.real(1),
        a.one("matmul matmul bmm einsum tensordot vecdot cosine distance cdist"),
    )
    y = a.draw.choice([x, a.like(x), a.real(1)])
    if op == "einsum":
        letters = [
            "".join(a.draw.choices("abcd", k=a.value(v).dim()))
            if a.draw.random() < 0.3
            else "abcdefg"[: a.value(v).dim()]
            for v in (x, y)
        ]
        used = sorted(set("".join(letters)))
        out = "".join(a.draw.sample(used, a.draw.randint(1, len(used))))
        return "aten.einsum.default", [f"{letters[0]},{letters[1]}->{out}", [x, y]], {}
    if op == "tensordot":
        return "aten.tensordot.default", [x, y, [a.dim(x)], [a.dim(y)]], {}
    if op == "vecdot":
        return "aten.linalg_vecdot.default", [x, y], {"dim": a.dim(x)}
    if op == "cosine":
        return "aten.cosine_similarity.default", [x, y, a.dim(x)], {}
    if op == "distance":
        return "aten.pairwise_distance.default", [x, y], {}
    if a.draw.random() < 0.4 and op in ("matmul", "bmm"):
        name = f"aten.{op}.default"
        return name, [x, y], {}
    return f"aten.{op}.default", [x, y], {}


def _network(a: Args) -> Drawn:
    x = a.real(2)
    last = a.value(x).shape[-1]
    op = a.one("linear layer_norm group_norm batch_norm pool max_pool nearest attention conv")
    if op == "linear":
        return "aten.linear.default", [x, a.any(2, 2, "float", last=last)], {}
    if op == "layer_norm":
        return "aten.layer_norm.default", [x, a.sizes(a.shapes(x)[-a.draw.choice([1, 1, 2]) :])], {}
    if op == "group_norm":
        return "aten.group_norm.default", [x, 1], {}
    if op == "batch_norm":
        if a.draw.random() < 0.5:
            stats = [None, None, Ref("w"), Ref("w")]
            return "aten._native_batch_norm_legit_no_training.default", [x, *stats, 0.1, 1.0], {}
        return "aten._native_batch_norm_legit.no_stats", [x, None, None, True, 0.1, 1.0], {}
    if op == "pool":
        return "aten.avg_pool1d.default", [x, [2]], {}
    if op == "max_pool":
        return "aten.max_pool1d.default", [x, [2], [1]], {}
    if op == "nearest":
        return "aten.upsample_nearest1d.vec", [x, None, [2.0]], {}
    if op == "conv":
        return "aten.conv1d.default", [x, a.real(3, 3)], {}
    keys = a.draw.choice([x, a.like(x)])
    causal = a.draw.random() < 0.3
    return "aten.scaled_dot_product_attention.default", [x, keys, keys, None, 0.0, causal], {}


def _indexed(a: Args) -> Drawn:
    x, i = a.any(1), a.any(0, 3, "int")
    op = a.one(
        "gather take_along_dim index_select index index scatter scatter_add embedding one_hot isin"
        " searchsorted masked_fill index_put index_add slice_scatter select_scatter"
    )
    dim = a.dim(x)
    if op in ("scatter", "scatter_add"):
        name = f"aten.{'scatter.src' if op == 'scatter' else 'scatter_add.default'}"
        return name, [x, dim, i, a.draw.choice([x, a.real()])], {}
    if op == "index":
        count = min(a.value(x).dim(), a.draw.choice([1, 1, 2]))
        indices: list[Any] = [a.draw.choice([i, a.any(0, 3, "int")]) for _ in range(count)]
        if a.value(x).dim() > 1 and a.draw.random() < 0.3:
            indices = [None, *indices[: a.value(x).dim() - 1]]
        return "aten.index.Tensor", [x, indices], {}
    if op == "embedding":
        return "aten.embedding.default", [a.any(2, 2, "float"), i], {}
    if op == "one_hot":
        return "aten.one_hot.default", [i, 9], {}
    if op == "isin":
        kwargs = {"assume_unique": a.draw.random() < 0.5}
        return "aten.isin.Tensor_Tensor", [a.any(1, 3, "int float"), a.real(1)], kwargs
    if op == "searchsorted":
        return "aten.searchsorted.Tensor", [a.real(1), a.real(1)], {}
    if op == "masked_fill":
        return "aten.masked_fill.Scalar", [x, a.any(0, 4, "bool"), 0.5], {}
    if op == "index_put":
        return "aten.index_put.default", [a.real(1), [a.any(1, 2, "bool")], Ref("one")], {}
    if op == "index_add":
        return "aten.index_add.default", [x, dim, i, a.draw.choice([x, a.any(1)])], {}
    if op == "slice_scatter":
        return "aten.slice_scatter.default", [x, a.any(1), dim, 0, a.draw.choice([1, 2, 2**63 - 1])], {}
    if op == "select_scatter":
        return "aten.select_scatter.default", [x, a.any(), dim, 0], {}
    return f"aten.{op}.default", [x, i, dim] if op == "take_along_dim" else [x, dim, i], {}


def _made(a: Args) -> Drawn:
    op = a.one("zeros ones arange zeros_like new_ones view_as expand_as eye full cast half")
    x = a.any()
    if op in ("zeros_like", "view_as", "expand_as"):
        return f"aten.{op}.default", [x] if op == "zeros_like" else [x, a.any()], {}
    if op == "arange":
        return "aten.arange.default", [a.size(5, 7)], {}
    if op == "cast":
        dtype = a.draw.choice([torch.int64, torch.float64, torch.int32])
        return "aten._to_copy.default", [a.any(dtypes="int bool")], {"dtype": dtype}
    if op == "half":
        x = a.any(dtypes="int")  # bits of floats would show how they are rounded
        return "aten.view.dtype", [x, a.draw.choice([torch.int32, torch.int16])], {}
    if op == "eye":
        return "aten.eye.default", [a.size(5, 7)], {}
    shape = [a.draw.choice([(5, 7), (1, 1), (3, 3), (6, 6), (5, 5)]) for _ in range(a.draw.choice([1, 2]))]
    if math.prod(p for p, _ in shape) > 200:
        raise ValueError("too large")
    sizes = a.sizes(shape)
    kwargs = {} if op == "new_ones" else {"dtype": torch.float64}
    if op == "full":
        return "aten.full.default", [sizes, 0.25], kwargs
    return f"aten.{op}.default", [a.real(), sizes] if op == "new_ones" else [sizes], kwargs


def _counted(a: Args) -> Drawn:
    """A number of the batch in an op."""
    number = a.size(*a.draw.choice([(5, 7), (3, 5), (10, 14)]))
    return f"aten.{a.draw.choice(['mul', 'add'])}.Tensor", [a.real(), number], {}


OPS: list[Callable[[Args], Drawn]] = [
    _one("exp.default tanh.default neg.default clone.default contiguous.default view_as.default"),
    _one("relu.default sigmoid.default square.default floor.default"),
    _two,
    _two,
    _where,
    _reduced,
    _reduced,
    _along,
    _along,
    _moved,
    _moved,
    _shaped,
    _shaped,
    _expanded,
    _expanded,
    _part,
    _part,
    _joined,
    _joined,
    _product,
    _product,
    _network,
    _indexed,
    _indexed,
    _made,
    _counted,
]
