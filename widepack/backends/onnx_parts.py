"""Takes the part of a session's file that computes some of its outputs.

The session of all members, with its packed weights, is one file. Each member's part of it is a file of a few
kB over the same weights: a session of it maps the same pages, and packs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import onnx_wire as wire


class SessionFile:
    """An ONNX file, as a session has written it.

    inputs, outputs: the names.
    """

    def __init__(self, data: bytes) -> None:
        self._model = wire.read(data)
        (graph,) = wire.messages(self._model, wire.MODEL_GRAPH)
        self._graph = wire.read(graph)
        self.inputs = self._names(wire.GRAPH_INPUTS)
        self.outputs = self._names(wire.GRAPH_OUTPUTS)
        self._nodes = wire.messages(self._graph, wire.GRAPH_NODES)
        self._reads: list[list[str]] = []
        self._made_by: dict[str, int] = {}
        for number, fields in enumerate(map(wire.read, self._nodes)):
            self._reads.append(wire.names_read(fields))
            self._made_by.update(dict.fromkeys(wire.texts(fields, wire.NODE_OUTPUTS), number))

    def _names(self, number: int) -> list[str]:
        return [wire.text(wire.read(v), wire.NAME) for v in wire.messages(self._graph, number)]

    def part(self, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
        """Returns the file of some outputs.

        inputs: those that the part has, also if it does not read them. It reads no others.
        """
        nodes, read = set[int](), set(outputs)
        todo = list(outputs)
        while todo:
            number = self._made_by.get(todo.pop(), -1)
            if number >= 0 and number not in nodes:
                nodes.add(number)
                todo += [n for n in self._reads[number] if n not in read]
                read.update(self._reads[number])
        kept = {wire.GRAPH_INPUTS: set(inputs), wire.GRAPH_OUTPUTS: set(outputs)}
        graph: list[wire.Field] = [(wire.GRAPH_NODES, self._nodes[n]) for n in sorted(nodes)]
        for number, value in self._graph:
            if number in kept and isinstance(value, bytes):
                if wire.text(wire.read(value), wire.NAME) in kept[number]:
                    graph.append((number, value))
            elif number == wire.GRAPH_INITIALIZERS and isinstance(value, bytes):
                if wire.text(wire.read(value), wire.TENSOR_NAME) in read:
                    graph.append((number, value))
            elif number not in (wire.GRAPH_NODES, wire.GRAPH_VALUES):
                graph.append((number, value))
        others = ((n, v) for n, v in self._model if n != wire.MODEL_GRAPH)
        return wire.write([*others, (wire.MODEL_GRAPH, wire.write(graph))])
