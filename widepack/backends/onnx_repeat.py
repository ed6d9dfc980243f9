"""Repeats the ONNX graph of one member, once for each member.

    Select(x) -> x of one member      Gather(x, 0), Gather(x, 1), ...
    body(x, w) -> y                   body(x.0, w.0) -> y.0, body(x.1, w.1) -> y.1, ...
    Join(y) -> y of all members       Reshape(Concat(y.0, y.1, ...)), or Concat(Unsqueeze(y.0), ...)
    Any(flag)                         Or(flag.0, flag.1), ...

The graph is made by `onnx_members.py`, which needs the packages onnx and onnxscript. This needs none, so that
a load from the cache, or of a graph that an artifact has, needs onnxruntime alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from . import onnx_wire as wire

DOMAIN = "widepack.member"
_METADATA = "widepack.graph"
SELECT, JOIN, ANY_OF = "Select", "Join", "Any"
REST = "rest"
"""The attribute of a join: the sizes of a member's value behind the first one, which are numbers."""
ANY = -2
"""In the place of a member: whether the value is true for any member."""


@dataclass(frozen=True)
class GraphInput:
    """An input, or a weight, of a member's graph.

    name: in the graph. number: of the flat program's input or weight. each: whether each member has its own.
    dtype, dims, bytes: of a weight; dtype as a number of ONNX.
    """

    name: str
    number: int
    each: bool
    dtype: int = 0
    dims: tuple[int, ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class MemberGraph:
    """The ONNX graph of one member.

    Attributes:
        model: The file.
        inputs, weights: What it reads. The values of weights are not in it.
        outputs: The name of each output, and the member whose value it is: -1 for a value of all members.
        booleans: Which outputs are boolean.
    """

    model: bytes
    inputs: tuple[GraphInput, ...]
    weights: tuple[GraphInput, ...]
    outputs: tuple[tuple[str, int], ...]
    booleans: tuple[bool, ...]

    def file(self) -> bytes:
        """Returns the graph as one file, whose metadata says what it reads and answers."""
        record = {
            "inputs": [asdict(i) for i in self.inputs],
            "weights": [asdict(w) for w in self.weights],
            "outputs": [list(o) for o in self.outputs],
            "booleans": list(self.booleans),
        }
        entry = wire.write([(1, _METADATA), (2, json.dumps(record, sort_keys=True))])
        return wire.write([*wire.read(self.model), (wire.MODEL_METADATA, entry)])

    @classmethod
    def of_file(cls, data: bytes) -> MemberGraph:
        """Reads what `file` wrote. Raises: KeyError, TypeError, ValueError."""
        fields = wire.read(data)
        texts = {
            wire.text(entry, 1): wire.text(entry, 2)
            for entry in map(wire.read, wire.messages(fields, wire.MODEL_METADATA))
        }
        record = json.loads(texts[_METADATA])
        inputs, weights = (
            tuple(
                GraphInput(
                    str(row["name"]),
                    int(row["number"]),
                    bool(row["each"]),
                    int(row["dtype"]),
                    tuple(map(int, row["dims"])),
                    int(row["bytes"]),
                )
                for row in record[key]
            )
            for key in ("inputs", "weights")
        )
        outputs = tuple((str(name), int(member)) for name, member in record["outputs"])
        model = wire.write((n, v) for n, v in fields if n != wire.MODEL_METADATA)
        return cls(model, inputs, weights, outputs, tuple(map(bool, record["booleans"])))

    def inputs_of(self, members: range) -> list[tuple[str, int, int]]:
        """The inputs of a session of some members: name, number, and the member whose row it is, else -1."""
        return [place for i in self.inputs for place in _places(i, members)]

    def weights_of(self, members: range) -> list[tuple[str, int, int]]:
        """The weights of a session of some members, as `inputs_of`."""
        return [place for w in self.weights for place in _places(w, members)]

    def outputs_of(self, members: range) -> list[int]:
        """The numbers of the outputs that a session of some members has."""
        return [k for k, (_, member) in enumerate(self.outputs) if member < 0 or member in members]


def _places(row: GraphInput, members: range) -> list[tuple[str, int, int]]:
    if not row.each:
        return [(row.name, row.number, -1)]
    return [(f"{row.name}.{i}", row.number, member) for i, member in enumerate(members)]


def repeated(graph: MemberGraph, members: range, *, apart: bool = False) -> bytes:
    """The ONNX file of a session of some members. Its weights are given to the session.

    apart: whether each member's part of each value of all members is an output, too. They follow the other
    outputs, member after member.
    """
    model = wire.read(graph.model)
    work = _Repetition(graph, members, apart)
    changed = [(n, work.graph(v) if n == wire.MODEL_GRAPH and isinstance(v, bytes) else v) for n, v in model]
    return wire.write(changed)


class _Repetition:
    """each: the values that each member has. parts: a member's part of each value of all members. nodes,
    constants: of the new graph.
    """

    def __init__(self, graph: MemberGraph, members: range, apart: bool) -> None:
        self.given, self.members, self.count, self.apart = graph, members, len(members), apart
        self.parts: dict[str, str] = {}
        self.each = {i.name for i in (*graph.inputs, *graph.weights) if i.each}
        self.nodes: list[bytes] = []
        self.constants: list[bytes] = []

    def graph(self, data: bytes) -> bytes:
        """The new graph."""
        fields = wire.read(data)
        for node in wire.messages(fields, wire.GRAPH_NODES):
            self._node(node)
        inputs = {wire.text(wire.read(v), wire.NAME): v for v in wire.messages(fields, wire.GRAPH_INPUTS)}
        outputs = {wire.text(wire.read(v), wire.NAME): v for v in wire.messages(fields, wire.GRAPH_OUTPUTS)}
        made = [(wire.GRAPH_NODES, n) for n in self.nodes]
        for row in self.given.weights:
            for name, _, _ in _places(row, self.members):
                self.constants.append(wire.from_memory(name, row.dtype, row.dims, row.bytes))
        made += [(wire.GRAPH_INITIALIZERS, c) for c in self.constants]
        for i in self.given.inputs:
            made += [
                (wire.GRAPH_INPUTS, wire.renamed(inputs[i.name], name))
                for name, _, _ in _places(i, self.members)
            ]
        for k in self.given.outputs_of(self.members):
            name, member = self.given.outputs[k]
            new = f"{name}.{member - self.members.start}" if member >= 0 and name in self.each else name
            made.append((wire.GRAPH_OUTPUTS, wire.renamed(outputs[name], new)))
        made += self._parts() if self.apart else []
        replaced = (wire.GRAPH_NODES, wire.GRAPH_INPUTS, wire.GRAPH_OUTPUTS)
        return wire.write([*((n, v) for n, v in fields if n not in replaced), *made])

    def _parts(self) -> list[tuple[int, bytes]]:
        """The nodes and outputs of members' parts of the outputs. Their types are found by the session."""
        made: list[tuple[int, bytes]] = []
        for i in range(self.count):
            for k in self.given.outputs_of(self.members):
                if (part := self.parts.get(self.given.outputs[k][0])) is not None:
                    name = f"{part}.{i}.output_{k}"
                    made.append((wire.GRAPH_NODES, wire.node("Identity", [self._of(part, i)], [name])))
                    made.append((wire.GRAPH_OUTPUTS, wire.write([(wire.NAME, name)])))
        return made

    def _node(self, data: bytes) -> None:
        fields = wire.read(data)
        if wire.text(fields, wire.NODE_DOMAIN) != DOMAIN:
            self.nodes.append(data)
            return
        op = wire.text(fields, wire.NODE_OP)
        inputs, outputs = wire.texts(fields, wire.NODE_INPUTS), wire.texts(fields, wire.NODE_OUTPUTS)
        if op == SELECT:
            self.each.add(outputs[0])
            for i in range(self.count):
                number = self._constant(i, f"{outputs[0]}.{i}.number")
                self.nodes.append(wire.node("Gather", [inputs[0], number], [f"{outputs[0]}.{i}"], axis=0))
        elif op == JOIN:
            self.parts[outputs[0]] = inputs[0]
            self._join(inputs[0], outputs[0], wire.attribute(fields, REST))
        elif op == ANY_OF:
            self.parts[outputs[0]] = inputs[0]
            self._any(inputs[0], outputs[0])
        else:
            for i in range(self.count):
                read = [self._of(name, i) for name in inputs]
                self.nodes.append(wire.node(op, read, [f"{name}.{i}" for name in outputs], DOMAIN))
            self.each.update(outputs)

    def _of(self, name: str, i: int) -> str:
        return f"{name}.{i}" if name in self.each else name

    def _constant(self, value: Sequence[int] | int, name: str) -> str:
        self.constants.append(wire.numbers(value, name))
        return name

    def _join(self, value: str, joined: str, rest: Sequence[int] | None) -> None:
        """Adds the nodes that join members' values. Copies of whole members are the fastest."""
        parts = [self._of(value, i) for i in range(self.count)]
        if rest is not None:
            together = f"{joined}.rows"
            sizes = self._constant([self.count, -1, *rest], f"{joined}.sizes")
            self.nodes.append(wire.node("Concat", parts, [together], axis=0))
            self.nodes.append(wire.node("Reshape", [together, sizes], [joined]))
            return
        axis = self._constant([0], f"{joined}.axis")
        rows = [f"{joined}.{i}.row" for i in range(self.count)]
        self.nodes += [wire.node("Unsqueeze", [part, axis], [row]) for part, row in zip(parts, rows)]
        self.nodes.append(wire.node("Concat", rows, [joined], axis=0))

    def _any(self, flag: str, result: str) -> None:
        """Adds the nodes that say whether a flag is set."""
        found = self._of(flag, 0)
        for i in range(1, self.count):
            self.nodes.append(wire.node("Or", [found, self._of(flag, i)], [f"{result}.{i}"]))
            found = f"{result}.{i}"
        self.nodes.append(wire.node("Identity", [found], [result]))
