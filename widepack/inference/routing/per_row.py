"""Makes a function of rows of several members that reads the weights of each row's own member.

| node that reads a weight of a member | what runs on all rows |
|---|---|
| linear layer, product of `[B, I]` | a sum of rows of the stacked weights (`kernels/streamed.py`): no copy |
| op on each number alone, with a vector | the vectors of the rows' members are gathered |
| norm over the last dims | the norm without weights, then two such ops |

Other nodes run on all rows as they are. If another node reads a weight of a member, there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from ...ir import ops
from ...ir.encoding import decode
from ...ir.tensor_type import tensor_type
from ...kernels.streamed import linear_of_rows, row_places
from ...rows.layout import Layout, RowAxis

_LINEAR = "aten.linear.default"
_PRODUCTS = frozenset({"aten.matmul.default", "aten.mm.default"})
_NORM = "aten.layer_norm.default"
_WEIGHTS = "float32"
"""The dtype of the weights that are read for each row."""
_LARGEST_VECTOR = 4096
"""The most numbers of a weight that is gathered for each row."""
_START_NS, _LAYER_NS, _OP_NS = 15_000.0, 16_000.0, 2_500.0
"""How long a call, a linear layer and another op take for rows of several members, beside arithmetic."""
_NUMBER_NS = 0.095
"""How long they take for a number of a weight and one row."""
_CALL_NS, _FIRST_ROW_NS, _MORE_ROWS_NS = 4_000.0, 0.2, 0.06
"""How long an op of one member takes, and for a number of a weight: with one row, and for each more row.

Measured on a CPU with AVX2, with layers of 64 to 512 inputs.
"""


TABLE, TRANSPOSED, VECTORS = "table", "transposed", "vectors"
"""How the members' values of a weight are stacked: `[N * I, O]` from `[I, O]`, the same from `[O, I]`, and
`[N, *shape]`."""


@dataclass(frozen=True)
class PerRowProgram:
    """A function of rows of several members.

    function: takes the stacked weights, the number of each row's member, and the inputs. Returns the outputs.
    forms: for each weight of the program how its values are stacked; "" for one that members share. shapes:
    of one member's value, by its number in the program. nodes: how many ops a call of one member runs.
    layers: how many of them are linear layers. numbers: how many numbers of weights these read for each row.
    """

    function: Callable[..., Any]
    forms: Sequence[str]
    shapes: Mapping[int, tuple[int, ...]]
    nodes: int
    layers: int
    numbers: int

    def is_faster(self, rows: int, members: int, apart_ms: float | None = None) -> bool:
        """Returns whether the function is faster than a call of each member, by rules of thumb.

        rows: of the batch. members: the number of those that have rows. apart_ms: what their calls take, if
        it was measured.
        """
        others = self.nodes - self.layers
        together = _START_NS + self.layers * _LAYER_NS + others * _OP_NS + rows * self.numbers * _NUMBER_NS
        if apart_ms is not None:
            return together < 1e6 * apart_ms
        apart = members * (self.nodes * _CALL_NS + self.numbers * _FIRST_ROW_NS)
        apart += (rows - members) * self.numbers * _MORE_ROWS_NS
        return together < apart


class _NoForm(Exception):
    """A node that has no form for rows of several members."""


def per_row_program(
    program: Program,
    own: Collection[str],
    layouts: Mapping[str, Layout],
    device: torch.device,
) -> PerRowProgram | None:
    """Returns the function of a member program for rows of several members; None if it has no such form.

    Args:
        program: The member program, or the part of it that reads the members' own weights.
        own: The names of the weights that members do not share.
        layouts: Where the rows are in each value.
        device: Where it runs.
    """
    try:
        return _PerRowGraph(program, own, layouts, device).written()
    except _NoForm:
        return None


class _PerRowGraph:
    """Writes the graph of one program."""

    def __init__(
        self,
        program: Program,
        own: Collection[str],
        layouts: Mapping[str, Layout],
        device: torch.device,
    ) -> None:
        self._program, self._own, self._layouts, self._device = program, own, layouts, device
        self._graph = fx.Graph()
        self._at: dict[str, fx.Node] = {}
        self._forms: dict[str, str] = {}
        self._places: dict[int, fx.Node] = {}
        self._layers, self._numbers = 0, 0
        slots = {s.name: s.type for s in (*program.weights, *program.inputs)}
        self._types = {**slots, **{n.name: n.out for n in program.nodes}}
        for slot in program.weights:
            self._at[slot.name] = self._graph.placeholder(f"w{len(self._at)}")
        self._ids = self._graph.placeholder("ids")
        for slot in program.inputs:
            self._at[slot.name] = self._graph.placeholder(f"x{len(self._at)}")

    def written(self) -> PerRowProgram:
        """Returns the function. Raises: _NoForm."""
        for node in self._program.nodes:
            self._at[node.name] = self._node(node)
        outputs = [o.value.name for o in self._program.outputs]
        if set(outputs) & set(self._own):
            raise _NoForm
        self._graph.output(tuple(self._at[name] for name in outputs))
        forms = [self._forms.get(s.name, "") for s in self._program.weights]
        if any(s.name in self._own and s.name not in self._forms for s in self._program.weights):
            raise _NoForm  # a weight that no node reads
        function = fx.GraphModule(nn.Module(), self._graph).forward
        shapes = {i: self._shape(s.name) for i, s in enumerate(self._program.weights) if forms[i]}
        return PerRowProgram(function, forms, shapes, len(self._program.nodes), self._layers, self._numbers)

    def _node(self, node: Node) -> fx.Node:
        if node.body is not None:
            raise _NoForm
        read = [name for name in refs((node.args, node.kwargs)) if name in self._own]
        if not read:
            args = decode(substitute(node.args, self._at.__getitem__), self._device)
            kwargs = decode(substitute(node.kwargs, self._at.__getitem__), self._device)
            return self._graph.call_function(ops.direct(node.op, kwargs), tuple(args), kwargs)
        given = ops.bind(node.op, node.args, node.kwargs)
        if node.op == _LINEAR:
            return self._linear(given["input"], given["weight"], given.get("bias"), TRANSPOSED)
        if node.op in _PRODUCTS:
            return self._linear(given["self"], given["other" if "other" in given else "mat2"], None, TABLE)
        if node.op == _NORM:
            return self._norm(node, given)
        pointwise = torch.Tag.pointwise in getattr(ops.resolve(node.op), "tags", ())
        if pointwise and self._layouts[node.name] == RowAxis(0):
            rank = self._rank(node.name)
            others = [n for n in refs((node.args, node.kwargs)) if n not in self._own]
            if any(self._layouts[n] is not None and self._rank(n) != rank for n in others):
                raise _NoForm
            if any(not self._shape(n) for n in read) and any(map(self._promotes, others)):
                raise _NoForm
            at = {**self._at, **{name: self._gathered(name, rank) for name in set(read)}}
            args = decode(substitute(node.args, at.__getitem__), self._device)
            kwargs = decode(substitute(node.kwargs, at.__getitem__), self._device)
            return self._graph.call_function(ops.direct(node.op, kwargs), tuple(args), kwargs)
        raise _NoForm

    # ---------------------------------------------------------------- nodes that read weights of members

    def _linear(self, x: Any, weight: Any, bias: Any, form: str) -> fx.Node:
        """`x @ weight` for rows `[B, I]`, with a bias of the members or none."""
        if not (isinstance(x, Ref) and isinstance(weight, Ref)) or x.name in self._own:
            raise _NoForm
        if weight.name not in self._own or self._layouts[x.name] != RowAxis(0):
            raise _NoForm
        shape = self._shape(weight.name)
        if len(shape) != 2 or self._rank(x.name) != 2:
            raise _NoForm
        self._form(weight.name, form)
        inputs = shape[1] if form == TRANSPOSED else shape[0]
        self._layers += 1
        self._numbers += shape[0] * shape[1]
        if inputs not in self._places:
            self._places[inputs] = self._graph.call_function(row_places, (self._ids, inputs))
        added = self._gathered(bias.name, 2) if isinstance(bias, Ref) and bias.name in self._own else None
        if added is None and isinstance(bias, Ref):
            added = self._at[bias.name]
        given = (self._at[x.name], self._at[weight.name], self._places[inputs], added)
        return self._graph.call_function(linear_of_rows, given)

    def _norm(self, node: Node, given: Mapping[str, Any]) -> fx.Node:
        """A layer norm over the last dims, with weights of the members."""
        x, shape = given["input"], given["normalized_shape"]
        if not isinstance(x, Ref) or x.name in self._own or self._layouts[x.name] != RowAxis(0):
            raise _NoForm
        if any(
            isinstance(v, Ref) and self._promotes(v.name) for v in (x, given.get("weight"), given.get("bias"))
        ):
            raise _NoForm  # the norm keeps the dtype of its input
        rank = self._rank(x.name)
        plain = (self._at[x.name], list(shape), None, None, given.get("eps", 1e-5))
        y = self._graph.call_function(torch.layer_norm, plain)
        for name, op in (("weight", torch.mul), ("bias", torch.add)):
            value = given.get(name)
            if isinstance(value, Ref):
                own = value.name in self._own
                with_rows = self._gathered(value.name, rank) if own else self._at[value.name]
                y = self._graph.call_function(op, (y, with_rows))
        return y

    def _gathered(self, name: str, rank: int) -> fx.Node:
        """The values of a weight for each row, with the dims of a value of `rank` dims."""
        shape = self._shape(name)
        if len(shape) == rank and shape[0] == 1:
            shape = shape[1:]
        size = 1
        for s in shape:
            size *= s
        if len(shape) >= rank or size > _LARGEST_VECTOR:
            raise _NoForm
        self._form(name, VECTORS)
        dims = [-1, *([1] * (rank - 1 - len(shape))), *shape]
        rows = self._graph.call_function(torch.index_select, (self._at[name], 0, self._ids))
        return self._graph.call_function(torch.reshape, (rows, dims))

    def _form(self, name: str, form: str) -> None:
        """Says how a weight's members are stacked; only one form for all nodes that read it."""
        if self._forms.setdefault(name, form) != form:
            raise _NoForm

    # ---------------------------------------------------------------- what is known of values

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        type_ = tensor_type(self._types[name])
        if type_ is None or type_.numbers is None or type_.dtype != _WEIGHTS:
            raise _NoForm
        return type_.numbers

    def _promotes(self, name: str) -> bool:
        """Whether a value has another floating dtype than the members' weights.

        A tensor without dims does not change the dtype of others of its kind: a half times such a weight is a
        half. The gathered weights have dims and would.
        """
        type_ = tensor_type(self._types[name])
        return type_ is None or (type_.is_rounded and type_.dtype != _WEIGHTS)

    def _rank(self, name: str) -> int:
        """The number of dims of a value."""
        type_ = tensor_type(self._types[name])
        if type_ is None:
            raise _NoForm
        return type_.rank


def stack(values: Sequence[Tensor], form: str) -> Tensor:
    """Returns the members' values of a weight as one tensor. form: `TABLE`, `TRANSPOSED` or `VECTORS`."""
    made = torch.stack([v.t() if form == TRANSPOSED else v for v in values])
    return made if form == VECTORS else made.flatten(0, 1)


def replace_part(stacked: Tensor, place: int, value: Tensor, form: str) -> None:
    """Replaces the value of one member in what `stack` returned."""
    part = value.t() if form == TRANSPOSED else value
    rows = 1 if form == VECTORS else part.shape[0]
    stacked[place * rows : (place + 1) * rows].copy_(part)
