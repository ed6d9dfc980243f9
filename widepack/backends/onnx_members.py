"""Divides an ONNX model into the part that reads one member's values, and the rest.

The model is a translation of a program whose loop bodies are there once (`member_loops.py`). The nodes that
read a member's values, directly or through other nodes, become a local function. Nodes of the domain `DOMAIN`
say where members begin and end; `onnx_repeat.py` replaces them, and repeats the calls:

    Select(x) -> x of one member      body(x, w) -> y of one member      Join(y) -> y of all members
    Any(flag of one member) -> whether the flag of any member is set

A model with loops behind one another has a function for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .onnx_repeat import ANY, ANY_OF, DOMAIN, JOIN, REST, SELECT


@dataclass
class Borders:
    """Values of an ONNX model whose body is written once.

    selects: a member's part of a value, and the value. joins: the value of all members, and the member's
    value. inputs: the inputs and weights of one member. outputs: the model's outputs, each with the number of
    its member: -1 for a value of all, and `ANY`.
    """

    selects: list[tuple[Any, Any]]
    joins: list[tuple[Any, Any]]
    inputs: list[Any]
    outputs: list[tuple[Any, int]]


def divide(model: Any, given: Borders) -> list[tuple[Any, int]]:
    """Rewrites an onnx_ir model, whose inputs are the values of `given` that no node computes.

    Returns: the values that take the place of `given.outputs`.
    """
    return _Division(model, given).run()


class _Division:
    """stages: of each value, the number of joins before it. outside: what takes the place of a body's value
    outside of its function. of_member: the values that members have on their own. new: the nodes of the new
    model.
    """

    def __init__(self, model: Any, given: Borders) -> None:
        self.model, self.graph, self.given = model, model.graph, given
        self.stages: dict[Any, int] = {}
        self.outside: dict[Any, Any] = {}
        self.of_member = {*given.inputs, *(part for part, _ in given.selects)}
        self.new: list[Any] = []

    def run(self) -> list[tuple[Any, int]]:
        nodes = list(self.graph)
        self._find_stages(nodes)
        borders = {v for v, _ in [*self.given.selects, *self.given.joins]}
        inputs = [v for v in self.graph.inputs if v not in borders]
        self.graph.outputs.clear()
        self.graph.inputs.clear()
        self.graph.remove(nodes)
        for stage in range(1 + max(self.stages.values(), default=0)):
            here = [n for n in nodes if self._stage(n.outputs[0]) == stage]
            self.new += [n for n in here if n.outputs[0] not in self.of_member]
            for part, whole in self.given.selects:
                if self._stage(whole) == stage:
                    self._add(SELECT, whole, part)
            if body := [n for n in here if n.outputs[0] in self.of_member]:
                self._call(f"body_{stage}", body)
            for joined, value in self.given.joins:
                if self._stage(value) == stage:
                    sizes = list(value.shape or ())[1:]
                    fixed = value.shape is not None and len(value.shape) and all(_fixed(s) for s in sizes)
                    self._add(JOIN, self._out(value), joined, **{REST: sizes} if fixed else {})
        outputs = [(self._output(v, member), member) for v, member in self.given.outputs]
        self.graph.extend(self.new)
        self.graph.inputs.extend(inputs)
        self.graph.outputs.extend(dict.fromkeys(v for v, _ in outputs))
        return outputs

    def _stage(self, value: Any) -> int:
        return self.stages.get(value, 0)

    def _out(self, value: Any) -> Any:
        return self.outside.get(value, value)

    def _find_stages(self, nodes: Sequence[Any]) -> None:
        """Finds the stage of each value, and which values members have on their own."""
        changed = True
        while changed:  # a value that selects may come before the value that it selects from
            before = dict(self.stages)
            for part, whole in self.given.selects:
                self.stages[part] = self._stage(whole)
            for joined, value in self.given.joins:
                self.stages[joined] = 1 + self._stage(value)
            for node in nodes:
                read = _reads(node)
                of_member = any(v in self.of_member for v in read)
                for out in node.outputs:
                    self.stages[out] = max((self._stage(v) for v in read), default=0)
                    if of_member:
                        self.of_member.add(out)
            changed = before != self.stages

    def _call(self, name: str, nodes: Sequence[Any]) -> None:
        """Makes a function of nodes, and calls it."""
        import onnx_ir

        inside = {id(n) for node in nodes for n in _with_nested(node)}
        made = {v for node in nodes for v in node.outputs}
        inputs = list(dict.fromkeys(v for node in nodes for v in _reads(node) if v not in made))
        parameters = [onnx_ir.Value(name=v.name, type=v.type, shape=v.shape) for v in inputs]
        for value, parameter in zip(inputs, parameters):
            for user, index in list(value.uses()):
                if id(user) in inside:
                    user.replace_input_with(index, parameter)
        asked = {v for _, v in self.given.joins} | {v for v, _ in self.given.outputs}
        outputs = [v for v in made if v in asked or any(id(u) not in inside for u, _ in v.uses())]
        outputs.sort(key=lambda v: str(v.name))
        results = [onnx_ir.Value(name=v.name, type=v.type, shape=v.shape) for v in outputs]
        for value, result in zip(outputs, results):
            for user, index in list(value.uses()):
                if id(user) not in inside:
                    user.replace_input_with(index, result)
        graph = onnx_ir.Graph(
            parameters, outputs, nodes=nodes, opset_imports=dict(self.model.opset_imports), name=name
        )
        function = onnx_ir.Function(DOMAIN, name, graph=graph, attributes=[])
        self.model.functions[function.identifier()] = function
        self.model.opset_imports[DOMAIN] = 1
        self.outside.update(zip(outputs, results))
        read = [self._out(v) for v in inputs]
        self.new.append(onnx_ir.node(name, read, domain=DOMAIN, outputs=results, name=name))

    def _add(self, op: str, value: Any, result: Any, **attributes: Any) -> None:
        """Adds a node that computes a value from another one."""
        import onnx_ir

        self.model.opset_imports[DOMAIN] = 1
        self.new.append(onnx_ir.node(op, [value], attributes, domain=DOMAIN, outputs=[result]))

    def _output(self, value: Any, member: int) -> Any:
        """The value that an output is."""
        import onnx_ir

        if member != ANY:
            return self._out(value)
        found = onnx_ir.Value(name=f"{value.name}_of_any", type=value.type, shape=value.shape)
        self._add(ANY_OF, self._out(value), found)
        return found


def _fixed(size: Any) -> bool:
    return isinstance(size, int) and size > 0


def _graphs(node: Any) -> list[Any]:
    """The graphs that a node has as attributes: the branches of an If, the body of a Loop."""
    import onnx_ir

    found: list[Any] = []
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            found.append(attribute.value)
        elif attribute.type == onnx_ir.AttributeType.GRAPHS:
            found += attribute.value
    return found


def _with_nested(node: Any) -> list[Any]:
    """A node and all nodes of its graphs."""
    return [node, *(n for graph in _graphs(node) for inner in graph for n in _with_nested(inner))]


def _reads(node: Any) -> list[Any]:
    """The values outside of a node that it reads, also in its graphs."""
    nodes = _with_nested(node)
    made = {v for n in nodes for v in n.outputs}
    made |= {v for n in nodes for graph in _graphs(n) for v in (*graph.inputs, *graph.initializers.values())}
    read = [v for n in nodes for v in n.inputs]
    read += [v for n in nodes for graph in _graphs(n) for v in graph.outputs]
    return list(dict.fromkeys(v for v in read if v is not None and v not in made))
