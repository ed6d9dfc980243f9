"""Repeats the part of an ONNX model that reads one member's values, once for each member.

The model is a translation of a program whose loop bodies are there once (`member_loops.py`). The nodes that
read a member's values, directly or through other nodes, become a local function, which is called N times:

    member 0's part of x -> Gather(x, 0)      y = body(x_0, w_0), body(x_1, w_1), ...
    joined y             -> Concat(Unsqueeze(y_0), Unsqueeze(y_1), ...)

A model with loops behind one another has a function for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .onnx_rewrites import constant

DOMAIN = "widepack.member"
ANY = -2
"""In the place of a member: whether the value is true for any member."""


@dataclass
class Repeated:
    """Values of an ONNX model whose body is written once.

    members: how often it runs. selects: a member's part of a value, and the value. joins: the value of all
    members, and the member's value. weights: the member's weights. outputs: the model's outputs, each with
    the number of its member: -1 for a value of all, and `ANY`.
    """

    members: int
    selects: list[tuple[Any, Any]]
    joins: list[tuple[Any, Any]]
    weights: list[Any]
    outputs: list[tuple[Any, int]]


def repeat(model: Any, given: Repeated) -> dict[str, list[Any]]:
    """Rewrites an onnx_ir model, whose inputs are the values of `given` that no node computes.

    Returns: for the name of each member's weight the N values that take its place, which are no inputs yet.
    """
    return _Repetition(model, given).run()


class _Repetition:
    """stages: of each value, the number of joins before it. copies: the N values of each value that members
    have on their own. of_member: these values. joined: what takes the place of each joined value. new: the
    nodes of the new model.
    """

    def __init__(self, model: Any, given: Repeated) -> None:
        self.model, self.graph, self.given = model, model.graph, given
        self.stages: dict[Any, int] = {}
        self.copies: dict[Any, list[Any]] = {w: self._values(w) for w in given.weights}
        self.of_member = {*given.weights, *(part for part, _ in given.selects)}
        self.joined: dict[Any, Any] = {}
        self.new: list[Any] = []

    def run(self) -> dict[str, list[Any]]:
        nodes = list(self.graph)
        self._find_stages(nodes)
        self.graph.outputs.clear()
        self.graph.remove(nodes)
        for stage in range(1 + max(self.stages.values(), default=0)):
            here = [n for n in nodes if self._stage(n.outputs[0]) == stage]
            self.new += [n for n in here if n.outputs[0] not in self.of_member]
            for part, whole in self.given.selects:
                if self._stage(whole) == stage:
                    self.copies[part] = [self._gather(whole, part, i) for i in range(self.given.members)]
            if body := [n for n in here if n.outputs[0] in self.of_member]:
                self._call(f"body_{stage}", body)
            for joined, value in self.given.joins:
                if self._stage(value) == stage:
                    self.joined[joined] = self._join(value)
                    joined.replace_all_uses_with(self.joined[joined])
        outputs = [self._output(v, member) for v, member in self.given.outputs]
        self.graph.extend(self.new)
        gone = {v for v, _ in [*self.given.selects, *self.given.joins]} | set(self.given.weights)
        inputs = [v for v in self.graph.inputs if v not in gone]
        self.graph.outputs.extend(outputs)
        self.graph.inputs.clear()
        self.graph.inputs.extend(inputs)
        return {str(w.name): self.copies[w] for w in self.given.weights}

    def _stage(self, value: Any) -> int:
        return self.stages.get(value, 0)

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
        """Makes a function of nodes, and calls it once for each member."""
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
        graph = onnx_ir.Graph(
            parameters, outputs, nodes=nodes, opset_imports=dict(self.model.opset_imports), name=name
        )
        function = onnx_ir.Function(DOMAIN, name, graph=graph, attributes=[])
        self.model.functions[function.identifier()] = function
        self.model.opset_imports[DOMAIN] = 1
        self.copies.update((v, self._values(v)) for v in outputs)
        for i in range(self.given.members):
            read = [self.copies[v][i] if v in self.copies else v for v in inputs]
            results = [self.copies[v][i] for v in outputs]
            self.new.append(onnx_ir.node(name, read, domain=DOMAIN, outputs=results, name=f"{name}_{i}"))

    def _values(self, value: Any) -> list[Any]:
        """N values of a value's type."""
        import onnx_ir

        names = (f"{value.name}.{i}" for i in range(self.given.members))
        return [onnx_ir.Value(name=n, type=value.type, shape=value.shape) for n in names]

    def _add(self, op: str, inputs: Sequence[Any], name: str, shape: Any, **attributes: Any) -> Any:
        """Adds a node of one output. shape: the output's sizes."""
        import onnx_ir

        node = onnx_ir.node(op, inputs, attributes, name=name)
        (out,) = node.outputs
        out.name, out.dtype, out.shape = name, inputs[0].dtype, onnx_ir.Shape(shape)
        self.new.append(node)
        return out

    def _gather(self, whole: Any, part: Any, i: int) -> Any:
        number = constant(self.graph, f"{part.name}_{i}_number", i)
        return self._add("Gather", [whole, number], f"{part.name}.{i}", part.shape, axis=0)

    def _join(self, value: Any) -> Any:
        """`[N, ...]` of the members' values."""
        axis = constant(self.graph, f"{value.name}_axis", [0])
        shape = [1, *value.shape]
        copies = self.copies.get(value, [value] * self.given.members)
        parts = [
            self._add("Unsqueeze", [v, axis], f"{value.name}.{i}_row", shape) for i, v in enumerate(copies)
        ]
        return self._add("Concat", parts, f"{value.name}_joined", [len(parts), *value.shape], axis=0)

    def _output(self, value: Any, member: int) -> Any:
        if member >= 0:
            return self.copies[value][member] if value in self.copies else value
        if member == ANY:
            return self._any(self._join(value))
        return self.joined.get(value, value)

    def _any(self, flags: Any) -> Any:
        """Whether one of N booleans is true."""
        import onnx_ir

        name, kinds = flags.name, onnx_ir.DataType
        numbers = self._add("Cast", [flags], f"{name}_numbers", flags.shape, to=int(kinds.INT32))
        numbers.dtype = kinds.INT32
        largest = self._add("ReduceMax", [numbers], f"{name}_largest", [], keepdims=0)
        result = self._add("Cast", [largest], f"{name}_any", [], to=int(kinds.BOOL))
        result.dtype = kinds.BOOL
        return result


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
