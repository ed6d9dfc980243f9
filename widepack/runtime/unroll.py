"""Writes out every loop region of a program, member after member, for readers that do not know loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, substitute


def unroll(program: Program) -> Program:
    """The program in ATen ops alone: each loop region is replaced by its body, once for each member."""
    if not any(n.body for n in program.nodes):
        return program
    work = _Unroller(program.members)
    for node in program.nodes:
        if node.body is not None:
            work.loop(node, node.body)
        elif not work.part_of_loop(node):
            work.nodes.append(node)
    outputs = tuple(
        replace(o, value=work.lists[o.value.name])
        if isinstance(o.value, Ref) and o.value.name in work.lists
        else o
        for o in program.outputs
    )
    return replace(program, nodes=tuple(work.nodes), outputs=outputs)


class _Unroller:
    """nodes: the new program so far. lists: for each value that is a list of parts, the parts."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.nodes: list[Node] = []
        self.lists: dict[str, list[Any]] = {}

    def part_of_loop(self, node: Node) -> bool:
        """Replaces a node that reads one part of a list by that part. Returns: whether the node is one."""
        source = node.args[0] if node.op == "operator.getitem" else None
        if not isinstance(source, Ref) or source.name not in self.lists:
            return False
        part = self.lists[source.name][node.args[1]]
        if isinstance(part, list):
            self.lists[node.name] = part
        else:
            self.nodes.append(
                Node(node.name, "aten.alias.default", (part,), out=node.out, member=node.member)
            )
        return True

    def loop(self, node: Node, body: Program) -> None:
        """Writes out one loop and joins the members' results."""
        results: list[list[Any]] = [[] for _ in body.outputs]
        for i in range(self.members):
            for k, value in enumerate(self._member(node, body, i)):
                results[k].append(value)
        parts: list[Any] = []
        for k, output in enumerate(body.outputs):
            if output.kind == "stacked":
                stacked = f"{node.name}_stack_{k}"
                self.nodes.append(Node(stacked, "aten.stack.default", (results[k],)))
                parts.append(Ref(stacked))
            else:
                parts.append(results[k])
        self.lists[node.name] = parts

    def _member(self, node: Node, body: Program, i: int) -> list[Any]:
        """Writes out the body for member i. Returns: its outputs."""
        at = {
            s.name: self._argument(a, s.kind, i, f"{node.name}_{s.name}_{i}")
            for s, a in zip(body.inputs, node.args)
        }
        for inner in body.nodes:
            name = f"{node.name}_{inner.name}_{i}"
            args, kwargs = (substitute(a, at.__getitem__) for a in (inner.args, inner.kwargs))
            self.nodes.append(replace(inner, name=name, args=args, kwargs=kwargs))
            at[inner.name] = Ref(name)
        return [substitute(o.value, at.__getitem__) for o in body.outputs]

    def _argument(self, arg: Any, kind: Kind, i: int, name: str) -> Any:
        """Member i's part of an argument. name: of the node that reads it, where one is needed."""
        if kind == "shared":
            return arg
        if not isinstance(arg, Ref):
            return arg[i]
        if arg.name in self.lists:
            return self.lists[arg.name][i]
        if kind == "ragged":
            self.nodes.append(Node(name, "operator.getitem", (arg, i)))
        else:
            self.nodes.append(Node(name, "aten.select.int", (arg, 0, i)))
        return Ref(name)
