"""Patterns of everyday code: inputs and outputs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from networks.patterns.case import Case, Make, case, linear, net, of, param
from networks.patterns.shapes import ROWS

Pair = namedtuple("Pair", ["mean", "scale"])


@dataclass
class Answer:
    """An output class like those of transformers."""

    logits: Tensor
    hidden: Tensor | None = None


torch.export.register_dataclass(Answer, serialized_type_name="test_patterns.Answer")


class Many(nn.Module):
    """Has positional, optional and keyword-only arguments, including numbers and None."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(
        self,
        x: Tensor,
        shift: Tensor | None = None,
        *,
        scale: float = 2.0,
        mask: Tensor | None = None,
        flag: bool = True,
    ) -> Tensor:
        y = self.fc(x) * scale
        y = y if shift is None else y + shift
        return y if mask is None or not flag else y.masked_fill(mask, 0)


def nested_inputs(sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(sizes["B"], 6, generator=g) for _ in range(3))
    return {"batch": {"image": a, "pair": (b, c)}, "scale": 3}


def pyramid(sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"levels": [torch.randn(sizes["B"], 4, s, s, generator=g) for s in (8, 4)]}


def either(sizes: Mapping[str, int], seed: int, name: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {"x": torch.randn(sizes["B"], 6, generator=g)}
    shift = {"shift": torch.randn(sizes["B"], 1, generator=g)}
    mask = {"mask": torch.randn(sizes["B"], 5, generator=g) > 0, "scale": 0.5}
    return given | (shift if name == "shift" else mask)


def batch_sample(
    sample: Callable[[Mapping[str, int], int], dict[str, Any]], make: Make, dynamic: Mapping[str, Any]
) -> Case:
    return Case(make, (), {"B": (5, 1, 2)}, sample, dynamic, {"B": 4})


CASES: dict[str, Case] = {
    "several_inputs": case(
        net(lambda self, a, b, c: self.fc(a) * b + c.sum(1, keepdim=True), fc=linear(6, 5)),
        "a=float32[B,6]",
        "b=float32[B,5]",
        "c=float32[B,T]",
    ),
    "keyword_inputs": case(
        net(
            lambda self, *, ids, types: self.a(ids) + self.b(types),
            a=of(nn.Embedding, 9, 4),
            b=of(nn.Embedding, 2, 4),
        ),
        "ids=int64[B,T]:0..8",
        "types=int64[B,T]:0..1",
    ),
    "dict_output": case(
        net(
            lambda self, x: {"logits": self.fc(x), "probs": self.fc(x).softmax(-1), "input": x},
            fc=linear(6, 5),
        ),
        ROWS,
    ),
    "tuple_output": case(
        net(lambda self, x: (self.fc(x), (x.mean(1), [self.fc(x).sum(1)])), fc=linear(6, 5)), ROWS
    ),
    "named_tuple_output": case(net(lambda self, x: Pair(*self.fc(x).chunk(2, 1)), fc=linear(6, 4)), ROWS),
    "dataclass_output": case(net(lambda self, x: Answer(self.fc(x)), fc=linear(6, 5)), ROWS),
    "none_output": case(
        net(lambda self, x: (self.fc(x), None, {"aux": None, "n": 3}), fc=linear(6, 5)), ROWS
    ),
    "parameter_output": case(
        net(lambda self, x: (self.fc(x), self.w, self.w * 2), fc=linear(6, 5), w=param(4)), ROWS
    ),
    "nested_inputs": batch_sample(
        nested_inputs,
        net(
            lambda self, batch, scale: (
                self.fc(batch["image"]) * scale + batch["pair"][0][:, :5] - batch["pair"][1][:, :5]
            ),
            fc=linear(6, 5),
        ),
        {"batch": {"image": {0: "B"}, "pair": ({0: "B"}, {0: "B"})}},
    ),
    "list_input": batch_sample(
        pyramid,
        net(
            lambda self, levels: [c(x) for c, x in zip(self.convs, levels)],
            convs=lambda: nn.ModuleList(nn.Conv2d(4, 5, 3) for _ in range(2)),
        ),
        {"levels": [{0: "B"}, {0: "B"}]},
    ),
    "optional_given": batch_sample(partial(either, name="shift"), Many, {"x": {0: "B"}, "shift": {0: "B"}}),
    "optional_keyword": batch_sample(partial(either, name="mask"), Many, {"x": {0: "B"}, "mask": {0: "B"}}),
    "whole_number_inputs": case(
        net(
            lambda self, x, step: self.fc(x) * self.table(step)[None],
            fc=linear(6, 4),
            table=of(nn.Embedding, 9, 4),
        ),
        ROWS,
        "step=int64[]:0..8",
    ),
    "double_inputs": case(
        net(lambda self, x: self.fc(x.float()).double() + x[:, :5], fc=linear(6, 5)), "x=float64[B,6]"
    ),
}
