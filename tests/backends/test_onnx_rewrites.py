"""Tests that an ONNX model with rewritten splits, joins and reshapes returns the same answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack.backends.onnx_rewrites import join_members, simplify_reshapes

onnxruntime = pytest.importorskip("onnxruntime")
onnxscript = pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch's exporter about its own code


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def exported(function: Callable[..., Any], inputs: tuple[Tensor, ...], dynamic: tuple[int, ...]) -> Any:
    shapes = tuple(dict.fromkeys(dynamic, torch.export.Dim.AUTO) for _ in inputs)
    program = torch.export.export(Of(function), inputs, dynamic_shapes=(shapes,))
    result: Any = torch.onnx.export(program, dynamo=True, optimize=True, verbose=False)
    return result.model


def answers(model: Any, inputs: tuple[Tensor, ...]) -> list[Any]:
    import onnx_ir

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        onnx_ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {i.name: v.numpy() for i, v in zip(session.get_inputs(), inputs)}))


def kinds(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def loop(x: Tensor) -> Tensor:
    return torch.stack([(x[i] * (i + 1)).relu() for i in range(x.shape[0])])


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (2, 4, 5, 6)])
@pytest.mark.parametrize("dynamic", [(), (1,)])
def test_a_loop_is_one_split_and_one_concat(shape: tuple[int, ...], dynamic: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    model = exported(loop, (x,), dynamic)
    before = kinds(model)
    assert before["Gather"] == before["Unsqueeze"] == shape[0]
    want = answers(model, (x,))
    assert join_members(model) == 2
    onnxscript.optimizer.remove_unused_nodes(model)
    after = kinds(model)
    assert (
        not after["Gather"]
        and not after["Unsqueeze"]
        and after["Split"] == after["Concat"] == 1
        and after["Reshape"] == 2
    )
    for n in {shape[1], 0, 1, 7} if dynamic else {shape[1]}:
        y = torch.randn(shape[0], n, *shape[2:])
        (found,) = answers(model, (y,))
        assert torch.equal(torch.from_numpy(found), loop(y))
    (found,) = answers(model, (x,))
    assert (found == want[0]).all()


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [
        (lambda x: x[0] + x[2], ()),  # not all members
        (
            lambda x: torch.stack([x[i].T for i in range(3)]),
            (1, 2),
        ),  # a size after the first two dims is not a number
        (lambda x: x[:, 0] + x[:, 1], ()),  # another dim
        (lambda x: (x[0], x[1], x[2]), ()),  # members that are outputs of the model
        (lambda x: torch.cat([x[0].unsqueeze(1), x[2].unsqueeze(1)]), ()),
    ],
)
def test_other_forms_are_not_rewritten(function: Callable[..., Any], dynamic: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 5)
    model = exported(function, (x,), dynamic)
    want, before = answers(model, (x,)), kinds(model)
    join_members(model)
    assert not kinds(model)["Split"] - before["Split"]
    for a, b in zip(want, answers(model, (x,)), strict=True):
        assert (a == b).all()


def in_a_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """One loop returns a value, the next loop splits it, and other nodes read all of it."""
    y = loop(x)
    return y, loop(y) + y


def reshaped(x: Tensor) -> Tensor:
    """The sizes of the value are simplified too."""
    y = x.flatten(0, 1).mul(2.0).view(3, -1, 5)
    return y + loop(y)


def read_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = [x[i].unsqueeze(0) for i in range(3)]
    return torch.cat(parts) * 2, parts[1] + x[1] + x.sum()


@pytest.mark.parametrize(
    ("function", "dynamic", "least"),
    [(in_a_row, (), 3), (in_a_row, (1,), 3), (reshaped, (1,), 1), (read_twice, (1,), 1)],
)
def test_a_rewritten_model_answers_as_before(
    function: Callable[..., Any], dynamic: tuple[int, ...], least: int
) -> None:
    x = torch.randn(3, 4, 5)
    model = exported(function, (x,), dynamic)
    want = answers(model, (x,))
    simplify_reshapes(model)
    assert join_members(model) >= least
    onnxscript.optimizer.remove_unused_nodes(model)
    for a, b in zip(want, answers(model, (x,)), strict=True):
        assert a.shape == b.shape and abs(a - b).max() < 1e-5


def test_weights_are_left_as_they_are() -> None:
    x = torch.randn(3, 4, 5)
    model = exported(loop, (x,), ())
    assert join_members(model, model.graph.inputs) == 1 and kinds(model)["Gather"] == 3
