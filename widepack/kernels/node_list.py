"""Collects the ATen nodes that replace one node of widepack's own ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Node, Ref


class NodeList:
    """Collects the nodes that replace one node, named after it."""

    def __init__(self, node: Node, separator: str = "_") -> None:
        self.node, self.separator = node, separator
        self.nodes: list[Node] = []

    def add(self, op: str, *args: Any, suffix: str = "", **kwargs: Any) -> Ref:
        """Appends a node and returns its value."""
        name = f"{self.node.name}{self.separator}{suffix or len(self.nodes)}"
        self.nodes.append(Node(name, op, args, kwargs, "", self.node.source, self.node.member))
        return Ref(name)

    def named_as_the_node(self) -> list[Node]:
        """Returns the nodes, the last of them under the name of the node that they replace."""
        *before, last = self.nodes
        return [*before, replace(last, name=self.node.name, out=self.node.out)]
