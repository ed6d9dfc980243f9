"""Inputs with named fields: named tuples, and classes that torch's pytrees know."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from small_builds import built, member
from torch import Tensor, nn

import widepack
from widepack.errors import InputError


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor
    scale: Any = None


@dataclasses.dataclass
class Pair:
    graph: Graph
    shift: Tensor

    @property
    def count(self) -> int:
        return self.graph.nodes.shape[0]


torch.export.register_dataclass(Pair)


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, graph: Graph) -> Graph:
        h = self.linear(graph.nodes)
        return Graph(h.index_add(0, graph.edges[1], h[graph.edges[0]]), graph.edges)


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Passing()

    def forward(self, pair: Pair) -> Any:
        return self.inner(pair.graph).nodes * pair.count + pair.shift


GRAPH = Graph(torch.randn(5, 3), torch.randint(0, 5, (2, 7)))


def made(folder: Path, make: type[nn.Module], *sample: Any, dynamic: Any) -> tuple[Any, list[nn.Module]]:
    path = built(make, folder, sample=sample, dynamic=dynamic, budget=0)
    return widepack.load(path), [member(make, i) for i in range(2)]


def test_a_call_takes_any_object_with_the_fields(tmp_path: Path) -> None:
    dynamic = {"graph": {"nodes": {0: "N"}, "edges": {1: "E"}}}
    ens, members = made(tmp_path, Passing, GRAPH, dynamic=dynamic)
    assert ens.manifest.version == (1, 5)
    one = Graph(torch.randn(1, 3), torch.zeros(2, 4, dtype=torch.int64))
    for graph in (GRAPH, one):
        for given in (graph, tuple(graph), graph._asdict(), SimpleNamespace(**graph._asdict())):
            y = ens(given)
            assert isinstance(y, widepack.Output)
            for i, module in enumerate(members):
                torch.testing.assert_close(y.nodes[i], module(graph).nodes)
    with pytest.raises(InputError, match="needs the fields nodes, edges, scale"):
        ens({"nodes": GRAPH.nodes})


def test_a_registered_dataclass_holds_a_named_tuple(tmp_path: Path) -> None:
    pair = Pair(GRAPH, torch.randn(5, 2))
    dynamic = {"pair": {"graph": [{0: "N"}, {1: "E"}, None], "shift": {0: "N"}}}
    ens, members = made(tmp_path, OfPair, pair, dynamic=dynamic)
    for i, one in enumerate(members):
        torch.testing.assert_close(ens(pair)[i], one(pair))


@pytest.mark.extended
def test_the_fields_of_a_declared_named_tuple_may_be_a_dict(tmp_path: Path) -> None:
    fields = {"nodes": GRAPH.nodes, "edges": GRAPH.edges}
    ens, members = made(tmp_path, Passing, fields, dynamic={"graph": {"nodes": {0: "N"}, "edges": {1: "E"}}})
    torch.testing.assert_close(ens(GRAPH).nodes[1], members[1](GRAPH).nodes)


@pytest.mark.extended
def test_a_fused_module_takes_and_saves_them(tmp_path: Path) -> None:
    members = [Passing().eval() for _ in range(2)]
    fused = widepack.fuse(members, GRAPH)
    fused.eval().save(tmp_path / "e.wide")
    torch.testing.assert_close(widepack.load(tmp_path / "e.wide")(GRAPH).nodes[1], members[1](GRAPH).nodes)
