"""Values at the true places of a mask that differs by member: their number is data, so no value can hold them for all members.

`y[m]` has `[*a, K, *b]`, where m is true at K places of the dims `[*m]` of y. What is computed of it place by place is computed at every place here,
`[*a, *m, *b]`, and the mask decides at the end, where the number K goes again:

| read by | becomes |
|---|---|
| `x[m] = v`, `x.index_put([m], v)` | `where(m, v, x)`; `where(m, x + v, x)` where it accumulates |
| `x.masked_scatter(m, v)` | `where(m, v, x)` |
| a sum, or a mean, over the places | of the values with 0 at the other places, for a mean by the number of true ones |
| a loss of every place and its mean or sum | the same of the loss |
| `x.index_add(0, i, v)`, `x[i] = v` | i the numbers of the places along a dim: of the values with 0 at the other places, summed over m's other dims |

Masks are compared by their meaning: `y > 0` written twice is one mask, for equal pure calls of equal values are equal in a functional program.
The numbers of the places themselves, `nonzero(m)` and `where(m)`, are followed to where they choose: `x[i]` is x along a dim of m.

What stands at the other places is computed too and never seen: no op is taken that could refuse it (a whole number divided by 0, a look-up out of range).
A mask that is Shared needs none of this: its places are the same for all members.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag, refs, substitute

from ..ir import ops
from .. import primitives  # fills the registry
from ..ir.edit import rank_of, renamed, sweep, with_nodes
from ..ir.kinds import kinds
from ..registry.registry import REGISTRY, full_name

_TRAILING = {
    full_name(n) for n in ["softmax.int", "log_softmax.int", "_softmax", "_log_softmax", "amax", "amin", "logsumexp", "unsqueeze", "select.int"]
}
_TRAILING |= {
    full_name(n)
    for n in [
        "slice.Tensor",
        "sum.dim_IntList",
        "mean.dim",
        "argmax",
        "var.correction",
        "var.dim",
        "std.dim",
        "std.correction",
        "linalg_vector_norm",
        "cumsum",
        "flip",
    ]
}
_ROWS = {full_name(n): n for n in ["linear", "layer_norm", "rms_norm"]}  # of the last dims alone; every other tensor is a weight
_REFUSING = {
    full_name(n) for n in ["div.Tensor_mode", "div.Scalar_mode", "floor_divide", "floor_divide.Scalar", "remainder.Tensor", "remainder.Scalar"]
}
_REFUSING |= {full_name(n) for n in ["fmod.Tensor", "fmod.Scalar", "remainder.Scalar_Tensor", "pow.Tensor_Tensor", "pow.Scalar"]}
_SEVERAL = {full_name("frexp.Tensor")}
_SUMS = {full_name(n): n.partition(".")[0] for n in ["sum", "mean", "sum.dim_IntList", "mean.dim"]}
_LOSSES = {full_name(n) for n in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"]}


@dataclass(frozen=True)
class Selected:
    """A value `[*a, K, *b]` by the value `[*a, *m, *b]` that it is read from.

    before: the number of dims of a; within: of m; behind: of b. Dims of m that the value does not hang on may have size 1.
    """

    mask: str
    dense: Ref
    before: int
    within: int
    behind: int

    @property
    def rank(self) -> int:
        return self.before + 1 + self.behind

    def like(self, other: Selected) -> bool:
        return (self.mask, self.before, self.within) == (other.mask, other.before, other.within)


@dataclass(frozen=True)
class Numbers:
    """Where the places are: the K numbers along `dim` of the mask, or `[K, within]` of all its dims (dim None)."""

    mask: str
    within: int
    dim: int | None


def select_by_masks(program: Program, slots: Mapping[str, Kind]) -> Program:
    """The program without values whose number is one of true places of a Stacked mask, as far as they can be followed; those that cannot stay."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    found = kinds(program, slots, values=False)  # what is selected is Ragged until it is followed, and a mask made of it is none of this
    if not any(_selects(n, types, found) or _numbers(n, types, found) for n in program.nodes):
        return program
    follow = _Follow(types)
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        node = renamed(node, to)
        follow.learn(node)
        made = _selects(node, types, found)
        if made is not None and made.mask not in follow.selected and made.dense.name not in follow.selected:
            follow.selected[node.name] = replace(made, mask=follow.meaning(made.mask))
        elif _numbers(node, types, found):
            follow.number(node)
            kept += follow.made
            follow.made = []
        elif node.op == "operator.getitem" and node.args[0].name in follow.several:
            follow.selected[node.name] = follow.several[node.args[0].name][node.args[1]]
        elif any(r in follow.selected or r in follow.numbers for r in refs((node.args, node.kwargs))):
            result = follow.part(node) if any(r in follow.numbers for r in refs((node.args, node.kwargs))) else follow.read(node)
            kept += follow.made
            follow.made = []
            if isinstance(result, Selected):
                follow.selected[node.name] = result
            elif result is not None:
                to[node.name] = result
                types[result.name] = node.out
                continue
        kept.append(node)
    return sweep(with_nodes(program, kept, to))


def _selects(node: Node, types: Mapping[str, str], found: Mapping[str, Kind]) -> Selected | None:
    """What a node reads by a mask of the members' own."""
    if node.op not in ("aten.index.Tensor", "aten.masked_select.default") or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0]
    indices = list(node.args[1]) if node.op == "aten.index.Tensor" else [node.args[1]]
    mask = indices[-1]
    if any(i is not None for i in indices[:-1]) or not isinstance(mask, Ref) or not types.get(mask.name, "").startswith("bool["):
        return None
    before, within = len(indices) - 1, rank_of(types[mask.name])
    behind = rank_of(types.get(source.name, "")) - before - within
    whole = node.op == "aten.index.Tensor" or behind == 0
    at_places = _sizes(types.get(source.name, ""))[before : before + within] == _sizes(types[mask.name])  # a mask that broadcasts has other places
    fits = found.get(mask.name) == "stacked" and within > 0 and behind >= 0 and whole and at_places
    return Selected(mask.name, source, before, within, behind) if fits else None


def _numbers(node: Node, types: Mapping[str, str], found: Mapping[str, Kind]) -> bool:
    """Whether a node gives the numbers of the places of a mask of the members' own."""
    names = ("aten.nonzero.default", "aten.nonzero_numpy.default", "aten.where.default")
    return node.op in names and isinstance(node.args[0], Ref) and found.get(node.args[0].name) == "stacked" and rank_of(types[node.args[0].name]) > 0


class _Follow:
    """Selected values by name, and the nodes that take the place of what reads them."""

    def __init__(self, types: dict[str, str]) -> None:
        self.types = types
        self.numbers: dict[str, Numbers] = {}
        self.several: dict[str, list[Selected]] = {}  # by the name of a tuple
        self.selected: dict[str, Selected] = {}
        self.made: list[Node] = []
        self.at = Node("", "")
        self.first: dict[str, str] = {}  # the name of a value -> the first one that is made in the same way
        self.ways: dict[str, str] = {}

    def learn(self, node: Node) -> None:
        """Note how a value is made."""
        if node.body is not None or not ops.pure(node.op, node.args, node.kwargs):
            self.ways.clear()  # nothing that is made after it is what was made before it
            return
        args, kwargs = (substitute(a, lambda n: Ref(self.meaning(n))) for a in (node.args, node.kwargs))
        given = ops.bind(node.op, args, kwargs) if node.op.startswith("aten.") else {"": args}
        way = repr((node.op, sorted(given.items())))  # as text 1, 1.0 and True differ
        self.first[node.name] = self.ways.setdefault(way, node.name)

    def meaning(self, name: str) -> str:
        """The first value that is made as this one is."""
        return self.first.get(name, name)

    def add(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        """A node for the one at work; its type is found when it is run."""
        name = f"{self.at.name}_at_{len(self.made)}"
        self.made.append(Node(name, full_name(op), args, kwargs, "", self.at.source))
        return Ref(name)

    def read(self, node: Node) -> Selected | Ref | None:
        """What stands for a node that reads selected values: another one, a value that has no such dim, or None where it cannot be followed."""
        self.at = node
        if not node.op.startswith("aten."):
            return None
        if node.op in ("aten.index_put.default", "aten.masked_scatter.default"):
            return self.put(node)
        if node.op == "aten.broadcast_tensors.default":
            parts = [self.selected.get(v.name) for v in node.args[0]]
            if None not in parts and len({self.types[v.name] for v in node.args[0]}) == 1:
                self.several[node.name] = [p for p in parts if p is not None]
            return None
        given = ops.bind(node.op, node.args, node.kwargs)
        of = [self.selected[r] for r in refs((node.args, node.kwargs)) if r in self.selected]
        one = of[0]
        if any(not one.like(s) or s.behind != one.behind for s in of) or node.op in _REFUSING | _SEVERAL:
            return None
        if node.op in _LOSSES:
            return self.loss(node, given, one)
        first = next(iter(given.values()))
        alone = isinstance(first, Ref) and first.name in self.selected and list(refs(tuple(given.values()))).count(first.name) == 1
        if node.op in _SUMS and alone and len(of) == 1:
            return self.total(node, given, one)
        if node.op in _ROWS and alone and len(of) == 1:
            last = 1 if node.op == "aten.linear.default" else len(given["normalized_shape"])
            if one.behind < last:
                return None
            return replace(one, dense=self.add(_ROWS[node.op], one.dense, *node.args[1:], **node.kwargs))
        if node.op in _TRAILING and alone and len(of) == 1:
            return self.trailing(node, given, one)
        if node.op in ("aten.reshape.default", "aten.view.default", "aten.squeeze.dim", "aten.squeeze.dims") and len(of) == 1:
            return self.reshaped(node, one)
        if node.op in REGISTRY and REGISTRY[node.op].family == "pointwise" and ops.pure(node.op, node.args, node.kwargs):
            return self.pointwise(node, one)
        return None

    def number(self, node: Node) -> None:
        """The numbers of a mask's places."""
        self.at = node
        mask = node.args[0]
        type_ = self.types[mask.name]
        if not type_.startswith("bool["):
            mask = self.add("ne.Scalar", mask, 0)
            self.types[mask.name] = f"bool[{type_.partition('[')[2]}"
            self.learn(self.made[-1])
        self.numbers[node.name] = Numbers(self.meaning(mask.name), rank_of(type_), None)

    def part(self, node: Node) -> Selected | Ref | None:
        """What reads numbers of places: a part of them, or what is read or written at them."""
        self.at = node
        given = ops.bind(node.op, node.args, node.kwargs) if node.op.startswith("aten.") else {}
        first = node.args[0]
        table = self.numbers.get(first.name) if isinstance(first, Ref) else None
        if table is not None:
            if node.op == "operator.getitem" and table.dim is None:
                self.numbers[node.name] = replace(table, dim=node.args[1])
            elif node.op == "aten.unbind.int" and table.dim is None and given.get("dim") in (1, -1):
                self.numbers[node.name] = table
            elif node.op == "aten.select.int" and table.dim is None and given["dim"] in (1, -1):
                self.numbers[node.name] = replace(table, dim=given["index"] % table.within)
            elif (
                node.op in ("aten.squeeze.dim", "aten.squeeze.dims")
                and table.dim is None
                and table.within == 1
                and given["dim"] in (1, -1, [1], [-1])
            ) or (node.op in ("aten.reshape.default", "aten.view.default") and table.within == 1 and len(_sizes(node.out)) == 1):
                self.numbers[node.name] = replace(table, dim=0)
            return None
        if node.op in ("aten.index.Tensor", "aten.index_select.default"):
            return self.taken(
                first, given["indices"] if "indices" in given else [None] * (given["dim"] % rank_of(self.types[first.name])) + [given["index"]]
            )
        if node.op == "aten.index_put.default":
            return self.written(first, given["indices"], given["values"], bool(given.get("accumulate", False)), 1)
        if node.op in ("aten.index_add.default", "aten.index_copy.default"):
            dim = given["dim"] % rank_of(self.types[first.name])
            return self.written(first, [None] * dim + [given["index"]], given["source"], "add" in node.op, given.get("alpha", 1))
        return None

    def along(self, indices: list[Any]) -> tuple[Numbers, list[int]] | None:
        """The mask whose places these indices number, and the dims of it, one an index; they stand side by side at the end."""
        given = [self.numbers.get(i.name) if isinstance(i, Ref) else None for i in indices if i is not None]
        first = given[0]
        if first is None or any(i is not None for i in indices[: len(indices) - len(given)]):
            return None
        dims = [n.dim for n in given if n is not None and n.mask == first.mask and n.dim is not None]
        return (first, dims) if len(dims) == len(given) == len(set(dims)) else None

    def of_one_size(self, x: Ref, before: int, places: Numbers, dims: list[int]) -> bool:
        """Whether the dims of x that numbers choose along are as long as the mask's: else its places are not x's."""
        mask = _sizes(self.types[places.mask])
        return _sizes(self.types[x.name])[before : before + len(dims)] == [mask[d] for d in dims]

    def taken(self, x: Any, indices: list[Any]) -> Selected | None:
        """`x[..., i, j]`: x with the dims that are chosen along as dims of the mask, in its order; dims of the mask that choose none have size 1."""
        found = self.along(indices)
        if found is None or not isinstance(x, Ref) or x.name in self.selected or x.name in self.numbers:
            return None
        places, dims = found
        before, rank = len(indices) - len(dims), rank_of(self.types[x.name])
        behind = rank - before - len(dims)
        if behind < 0:
            return None
        if not self.of_one_size(x, before, places, dims):
            return None
        order = [before + dims.index(d) for d in sorted(dims)]
        value = x if sorted(dims) == dims else self.add("permute", x, [*range(before), *order, *range(before + len(dims), rank)])
        for d in range(places.within):
            value = value if d in dims else self.add("unsqueeze", value, before + d)
        return Selected(places.mask, value, before, places.within, behind)

    def written(self, x: Any, indices: list[Any], value: Any, add: bool, alpha: Any) -> Ref | None:
        """What is written, or added, at numbered places."""
        found = self.along(indices)
        one = self.selected.get(value.name) if isinstance(value, Ref) else None
        if found is None or not isinstance(x, Ref) or x.name in self.selected or (isinstance(value, Ref) and value.name in self.numbers):
            return None
        places, dims = found
        before = len(indices) - len(dims)
        behind = rank_of(self.types[x.name]) - before - len(dims)
        if behind < 0 or not self.of_one_size(x, before, places, dims):
            return None
        if one is None:
            if not isinstance(value, Ref) or rank_of(self.types[value.name]) > behind or dims != list(range(places.within)) or (add and alpha != 1):
                return None
            one = Selected(places.mask, value, before, places.within, behind)
        if (one.mask, one.before, one.behind) != (places.mask, before, behind) or dims != sorted(dims):
            return None
        if len(dims) == places.within and not (add and alpha != 1):
            dense = self.add("add.Tensor", x, one.dense) if add else one.dense
            return self.add("where.self", self.masked(one), dense, x)
        if not add:  # several values for one place: which one stays is not defined
            return None
        summed = self.add("where.ScalarOther", self.masked(one), one.dense, 0)
        rest = [before + d for d in range(places.within) if d not in dims]
        summed = self.add("sum.dim_IntList", summed, rest) if rest else summed
        return self.add("add.Tensor", x, summed, alpha=alpha)

    def reshaped(self, node: Node, one: Selected) -> Selected | None:
        """`[1, K, *b]` as `[K, *b]`."""
        sizes, out = _sizes(self.types[node.args[0].name]), _sizes(node.out)
        if one.before and sizes[: one.before] == ["1"] * one.before and out == sizes[one.before :]:
            return replace(one, dense=self.add("squeeze.dims", one.dense, list(range(one.before))), before=0)
        return None

    def pointwise(self, node: Node, one: Selected) -> Selected | None:
        """The same op at every place; what is no selected value broadcasts over the places."""
        ready: dict[str, Any] = {}
        for r in dict.fromkeys(refs((node.args, node.kwargs))):
            if r in self.selected:
                ready[r] = self.selected[r].dense
                continue
            rank = rank_of(self.types.get(r, ""))
            if rank > one.behind:
                at = rank - 1 - one.behind
                if rank > one.rank or _sizes(self.types[r])[at] != "1":
                    return None
                value = Ref(r)
                for _ in range(one.within - 1):
                    value = self.add("unsqueeze", value, at)
                ready[r] = value
        moved = renamed(node, ready)
        return replace(one, dense=self.add(node.op, *moved.args, **moved.kwargs))

    def trailing(self, node: Node, given: dict[str, Any], one: Selected) -> Selected | None:
        """An op along dims behind the places."""
        name = next((a for a in ops.dim_arguments(node.op) if a == "dim" or a == "dims"), "")
        default = next((d for a, _, d in ops.arguments(node.op) if a == name), None)
        dims = given.get(name, default)
        more = node.op == "aten.unsqueeze.default"
        many = isinstance(dims, (list, tuple))
        if not name or dims is None or dims in ([], ()) or any(not isinstance(d, int) for d in (dims if many else [dims])):
            return None
        rank = one.rank + more
        plain = [d % rank for d in (dims if many else [dims])]
        if any(d <= one.before for d in plain):
            return None
        shifted = [d + one.within - 1 for d in plain]
        lost = 0
        if node.op == "aten.select.int":
            lost = 1
        elif "keepdim" in {a for a, _, _ in ops.arguments(node.op)} and not given.get("keepdim", False):
            lost = len(plain)
        named = {**given, name: shifted if many else shifted[0]}
        order = [a for a, _, _ in ops.arguments(node.op)]
        by_name = {a: v for a, v in named.items() if a in node.kwargs and a != name}
        positional = [a for a in order if a in named and a not in by_name]
        if order[: len(positional)] != positional:
            return None
        dense = self.add(node.op, one.dense, *(named[a] for a in positional[1:]), **by_name)
        return replace(one, dense=dense, behind=one.behind + more - lost)

    def masked(self, one: Selected) -> Ref:
        """The mask as `[*m, 1, ...]`: broadcasts over what stands behind the places."""
        mask = Ref(one.mask)
        for _ in range(one.behind):
            mask = self.add("unsqueeze", mask, -1)
        return mask

    def total(self, node: Node, given: dict[str, Any], one: Selected) -> Selected | Ref | None:
        """A sum or a mean that takes in the places."""
        how = _SUMS[node.op]
        dims = given.get("dim")
        if dims in (None, [], ()):
            dims = list(range(one.rank))
        elif any(not isinstance(d, int) for d in dims):
            return None
        plain = sorted({d % one.rank for d in dims})
        if one.before not in plain:
            return self.trailing(node, given, one)
        keep, dtype = bool(given.get("keepdim", False)), given.get("dtype")
        if not _floats(node.out) or dtype is not None:
            return None
        value = one.dense
        others = [d for d in plain if d != one.before]
        if others:  # the other dims first: their sizes are no data
            dims = [d if d < one.before else d + one.within - 1 for d in others]
            value = self.add("mean.dim" if how == "mean" else "sum.dim_IntList", value, dims, True)
        value = self.add("where.ScalarOther", self.masked(one), value, 0)
        out = node.out.partition("[")[0]
        wide = (
            {"dtype": Tag("dtype", "float32")} if how == "mean" and out in ("float16", "bfloat16") else {}
        )  # the sum may be more than float16 holds
        if len(plain) == one.rank:
            value = self.add("sum", value, **wide)
        else:
            value = self.add("flatten.using_ints", value, one.before, one.before + one.within - 1) if one.within > 1 else value
            value = self.add("sum.dim_IntList", value, [one.before], True, **wide)
        if how == "mean":
            value = self.add("div.Tensor", value, self.add("sum", Ref(one.mask)))
            value = self.add("_to_copy", value, dtype=Tag("dtype", out)) if wide else value
        if len(plain) == one.rank:
            return self.add("reshape", value, [1] * one.rank) if keep else value
        return value if keep else self.add("squeeze.dims", value, plain)

    def loss(self, node: Node, given: dict[str, Any], one: Selected) -> Selected | Ref | None:
        """A loss of every place, then its mean or sum over them."""
        if any(isinstance(v, Ref) and v.name not in self.selected for v in given.values()) or not _floats(node.out):
            return None
        how = given.get("reduction", 1)
        order = [a for a, _, _ in ops.arguments(node.op)]
        full = {a: given.get(a, d) for a, _, d in ops.arguments(node.op)} | {"reduction": 0}
        dense = {a: self.selected[v.name].dense if isinstance(v, Ref) else v for a, v in full.items()}
        if node.op == full_name(
            "binary_cross_entropy_with_logits"
        ):  # the one that broadcasts nothing: places along two dims of a mask may have sizes of 1
            pair = self.add("broadcast_tensors", [dense[order[0]], dense[order[1]]])
            dense |= {a: self.add("operator.getitem", pair, k) for k, a in enumerate(order[:2])}
        value = replace(one, dense=self.add(node.op, *(dense[a] for a in order)))
        if how == 0:
            return value
        return self.total(replace(node, op=full_name("mean" if how == 1 else "sum")), {}, value)

    def put(self, node: Node) -> Ref | None:
        """Values written at the places that they were read from."""
        x = node.args[0]
        given = ops.bind(node.op, node.args, node.kwargs)
        if node.op == "aten.index_put.default":
            indices, value, add = given["indices"], given["values"], bool(given.get("accumulate", False))
            if any(i is not None for i in indices[:-1]):
                return None
            mask, before = indices[-1], len(indices) - 1
        else:
            mask, value, add, before = given["mask"], given["source"], False, 0
        one = self.selected.get(value.name) if isinstance(value, Ref) else None
        if not isinstance(x, Ref) or x.name in self.selected or not isinstance(mask, Ref) or one is None:
            return None
        behind = rank_of(self.types.get(x.name, "")) - before - one.within
        if self.meaning(mask.name) != one.mask or before != one.before or behind != one.behind or (node.op != "aten.index_put.default" and behind):
            return None
        dense = self.add("add.Tensor", x, one.dense) if add else one.dense
        return self.add("where.self", self.masked(one), dense, x)


def _sizes(type_: str) -> list[str]:
    """The sizes of a type text, parentheses kept whole."""
    sizes, depth = [""], 0
    for c in type_.partition("[")[2].rpartition("]")[0]:
        depth += (c == "(") - (c == ")")
        if c == "," and not depth:
            sizes.append("")
        else:
            sizes[-1] += c
    return sizes


def _floats(type_: str) -> bool:
    return type_.startswith(("float", "bfloat"))
