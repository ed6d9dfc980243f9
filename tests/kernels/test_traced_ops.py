"""Tests that a compiler meets ops of torch and of widepack only, wherever Python checks or replaces an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from widepack.ir import ops
from widepack.ir.ops import PYTHON
from widepack.ir.torch_internals import is_overload
from widepack.kernels.checks import CHECKS
from widepack.kernels.replacements import REPLACEMENTS
from widepack.registry.samples import SAMPLES, Draw
from widepack_artifacts.opset import OPS

# An op without a sample has another op of its family here.
WITH_PYTHON = sorted({*CHECKS, *REPLACEMENTS} & SAMPLES.keys(), key=lambda n: ("attention" not in n, n))
NOT_TRACED = {
    "aten.lstm.data": "torch reads the values of batch_sizes",
    "aten.gru.data": "torch reads the values of batch_sizes",
    "aten.rnn_tanh.data": "torch reads the values of batch_sizes",
    "aten.rnn_relu.data": "torch reads the values of batch_sizes",
}


def in_other_memory(value: Any) -> Any:
    """Returns the same numbers with two dims swapped in memory, as a projection of heads has them."""
    if not isinstance(value, Tensor) or value.dim() < 3:
        return value
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def graph_of(op: Any, args: Any, kwargs: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    """Returns a graph of one call, in which all but the tensors is literal, and the tensors."""
    graph, tensors = fx.Graph(), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    holders = iter([graph.placeholder(f"x{i}") for i in range(len(tensors))])
    args, kwargs = tree_map(lambda x: next(holders) if isinstance(x, Tensor) else x, (args, kwargs))
    graph.output(graph.call_function(op, args, kwargs))
    return fx.GraphModule({}, graph), tensors


def test_every_function_of_a_traced_graph_is_an_op() -> None:
    for name in sorted(OPS):
        if str(name) in PYTHON or name == "loop":
            continue
        target: Any = ops.function(name, "sizes")
        assert is_overload(target), name
        assert ops.name_of(target).partition(".")[0] in ("aten", "widepack"), name


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("name", WITH_PYTHON)
@pytest.mark.parametrize("checks", ["sizes", "none"])
def test_torch_compile_takes_every_replaced_op_as_one_op(name: str, checks: ops.Checks) -> None:
    seen: list[fx.Graph] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        seen.append(module.graph)
        return module

    if name in NOT_TRACED:
        pytest.skip(NOT_TRACED[name])
    (args, kwargs), *_ = SAMPLES[name](Draw(0))
    for given in (args, tree_map(in_other_memory, args)):
        torch._dynamo.reset()
        module, tensors = graph_of(ops.function(name, checks), given, kwargs)
        with torch.no_grad():
            found = torch.compile(module, fullgraph=True, backend=keep, dynamic=True)(*tensors)
        want = ops.function(name)(*given, **kwargs)
        for a, b in zip(tree_leaves(found), tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    python: list[Any] = list(PYTHON.values())
    for graph in seen:
        called = [n.target for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        assert all(is_overload(t) or t in python for t in called), called
